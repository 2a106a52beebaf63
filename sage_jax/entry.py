"""What all entry points share: flags, the start of a process, a clean stop. No logic of the method.

Flags: --config (a file of configs/, locked: unknown keys raise), --workdir, --print_config.
"""

from __future__ import annotations

import fcntl
import glob
import json
import logging as stdlib_logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from sage_jax.errors import ConfigError, SageError

CONFIG = config_flags.DEFINE_config_file("config", None, "Recipe: a file of configs/, e.g. configs/quickstart.py.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that the run writes. The same folder resumes the run.")
PRINT_CONFIG = flags.DEFINE_bool("print_config", False, "Print the resolved config and stop.")

INTERRUPTED = 130


def run(main: Callable[[ConfigDict, Path | None], None], command: str, workdir: bool = True) -> None:
    """Parses flags, prepares the process and calls `main(config, workdir)`; with `workdir=False` the command writes nothing and starts JAX itself.

    Typed errors end the process with their message and exit code 1; Ctrl-C and SIGTERM with code 130 and the command that
    resumes.
    """
    flags.mark_flag_as_required("config")

    def wrapped(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        config = CONFIG.value
        if PRINT_CONFIG.value:
            print(config)
            return
        if workdir and not WORKDIR.value:
            raise app.UsageError("--workdir is missing: the folder for everything that the run writes, e.g. --workdir=runs/mine")
        folder = Path(WORKDIR.value).expanduser().absolute() if workdir else None
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # raising SIGINT would do nothing in a shell's background job
        try:
            if folder is not None:
                start(folder)
            main(config, folder)
        except KeyboardInterrupt:
            print(f"\nStopped. What is finished is kept; go on with:\n  {python()} -m {command} {shlex.join(sys.argv[1:])}", file=sys.stderr)
            sys.exit(INTERRUPTED)
        except SageError as error:
            logging.debug("details", exc_info=True)
            print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
            sys.exit(1)

    app.run(wrapped)


def python() -> str:
    """This interpreter as one would type it here: `.venv/bin/python` rather than a whole path."""
    path = sys.executable or "python"
    short = os.path.relpath(path)
    return shlex.quote(path if short.startswith("..") else short)


def start(workdir: Path) -> None:
    """Makes the workdir and keeps other processes out of it, names an accelerator that JAX would not use, switches the
    persistent compile cache on. Raises ConfigError if another process works in the workdir."""
    workdir.mkdir(parents=True, exist_ok=True)
    lock(workdir)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it need not say that torch is missing
    stdlib_logging.getLogger("jax._src.xla_bridge").setLevel(stdlib_logging.WARNING)
    import jax

    from sage_jax.world.roots import cache_home

    hint = unused_accelerator(jax.default_backend())
    if hint:
        print(hint, file=sys.stderr)
    jax.config.update("jax_compilation_cache_dir", str(cache_home() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    logging.set_verbosity(logging.WARNING)


def lock(workdir: Path) -> int:
    """Holds workdir/.lock for the life of this process, not of those that it starts; returns the open file.

    Raises ConfigError naming the process that holds it: two in one folder would overwrite each other's files.
    """
    file = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(file, 32).decode().strip()
        os.close(file)
        raise ConfigError(f"process {pid} works in {workdir}. Wait until it ends, stop it, or choose another --workdir.") from None
    except OSError as error:  # a file system that knows no locks
        print(f"{workdir} cannot be locked ({error.strerror}): let no other process write there", file=sys.stderr)
    os.ftruncate(file, 0)
    os.write(file, f"{os.getpid()}\n".encode())
    return file


def unused_accelerator(backend: str, devices: Callable[[str], list[str]] = glob.glob) -> str:
    """One line with the install command if a GPU or TPU is present and JAX runs on the CPU, else "".

    Args:
      backend: jax.default_backend().
      devices: pattern -> paths that exist.
    """
    if backend != "cpu" or os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return ""
    if devices("/dev/nvidia[0-9]*"):
        return f'An NVIDIA GPU is present, but this JAX runs on the CPU only. To use it: {python()} -m pip install -e ".[cuda]"'
    if devices("/dev/accel[0-9]*") or (devices("/dev/vfio/[0-9]*") and "TPU_NAME" in os.environ):
        return f'A TPU is present, but this JAX runs on the CPU only. To use it: {python()} -m pip install -e ".[tpu]"'
    return ""


def check_workdir(config: ConfigDict, workdir: Path) -> None:
    """Raises ConfigError naming the keys that differ if the workdir holds a run with another config."""
    path = workdir / "config.json"
    if not path.exists():
        return
    old, new = _flat(json.loads(path.read_text())), _flat(json.loads(config.to_json_best_effort()))
    changed = sorted(k for k in old.keys() | new.keys() if old.get(k) != new.get(k))
    if changed:
        shown = "; ".join(f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in changed[:8])
        raise ConfigError(f"{workdir} holds a run with another config ({shown}). Choose another --workdir, or delete this one.")


def write_config(config: ConfigDict, workdir: Path) -> None:
    """workdir/config.json, written once, when all that the config names has been found; see `check_workdir`."""
    from sage_jax.report.episodes import write_text

    check_workdir(config, workdir)
    path = workdir / "config.json"
    if not path.exists():
        write_text(path, json.dumps(json.loads(config.to_json_best_effort()), indent=2, sort_keys=True) + "\n")


def _flat(tree: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat

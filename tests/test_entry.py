"""The entry of every command: how it stops and what it says."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax import entry
from sage_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
WAITS = "import time\nfrom sage_jax import entry\ndef main(config, workdir):\n    print('ready', flush=True)\n    while True: time.sleep(0.1)\nentry.run(main, 'sage_jax.train')\n"


@pytest.mark.parametrize(
    ("backend", "there", "environment", "said"),
    [
        ("cpu", "/dev/nvidia[0-9]*", {}, r'pip install -e "\.\[cuda\]"'),
        ("cpu", "/dev/accel[0-9]*", {}, r'pip install -e "\.\[tpu\]"'),
        ("cpu", "/dev/vfio/[0-9]*", {"TPU_NAME": "t"}, r'pip install -e "\.\[tpu\]"'),
        ("cpu", "/dev/vfio/[0-9]*", {}, "^$"),
        ("cpu", "", {}, "^$"),
        ("gpu", "/dev/nvidia[0-9]*", {}, "^$"),
        ("cpu", "/dev/nvidia[0-9]*", {"JAX_PLATFORMS": "cpu"}, "^$"),
    ],
)
def test_an_accelerator_that_jax_does_not_use_is_named(monkeypatch, backend, there, environment, said):
    for name in ("JAX_PLATFORMS", "TPU_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.search(said, entry.unused_accelerator(backend, lambda pattern: ["/dev/it"] if pattern == there else []))


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(entry.fcntl, "flock", flock)
    os.close(entry.lock(tmp_path))
    assert "cannot be locked" in capsys.readouterr().err and int((tmp_path / ".lock").read_text()) == os.getpid()


@pytest.mark.parametrize("ignored", [False, True], ids=["foreground", "a shell's background job"])
def test_sigterm_stops_and_says_how_to_go_on(tmp_path, ignored):
    """A shell starts background jobs with SIGINT ignored; they stop on SIGTERM all the same."""
    command = [sys.executable, "-c", WAITS, f"--config={ROOT}/configs/sft_tiny.py", f"--workdir={tmp_path}"]
    before = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "SAGE_CACHE": str(tmp_path)}, preexec_fn=before, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        with pytest.raises(ConfigError, match=rf"process {process.pid} works in .*choose another --workdir"):
            entry.lock(tmp_path)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    held = entry.lock(tmp_path)
    assert not os.get_inheritable(held), "what a run starts must not hold its folder"
    os.close(held)
    assert process.returncode == 130 and "go on with:" in errors and f"--workdir={tmp_path}" in errors

"""Serves worlds to other machines: python -m sage_jax.world.serve --port=8600 --token_file=~/.sage_worlds_token

The token file is made (readable for this user alone) if it is not there; give its text to clients as SAGE_WORLDS_TOKEN and the address as
--config.world.remote=http://HOST:8600. Whoever has the token may run code in the worlds; without --certificate it crosses the network
as it is, so use that on a network that you trust.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import uvicorn
from absl import app, flags

from sage_jax.errors import ConfigError, SageError
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.roots import DEFAULT_SCENARIOS, KINDS, resolve_root
from sage_jax.world.service import Service

HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
PORT = flags.DEFINE_integer("port", 8600, "Port to listen on.", lower_bound=0, upper_bound=65535)
TOKEN_FILE = flags.DEFINE_string("token_file", "~/.sage_worlds_token", "File with the token; made if missing.")
CERTIFICATE = flags.DEFINE_string("certificate", "", "PEM certificate, for https.")
KEY = flags.DEFINE_string("key", "", "PEM key of the certificate.")
KIND = flags.DEFINE_enum("kind", "miniworld", KINDS, "Data root.")
ROOT = flags.DEFINE_string("root", "", "Folder that holds data/; empty: the mini world of the cache, or APPWORLD_ROOT.")
SCENARIOS = flags.DEFINE_integer("scenarios", DEFAULT_SCENARIOS, "Size of the mini world.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the mini world.")
OUTPUTS = flags.DEFINE_string("outputs", "", "Folder for kept outputs; empty: kept nowhere.")
MAX_OPEN = flags.DEFINE_integer("max_open", 0, "Worlds open at once; 0: by cores and memory.", lower_bound=0)
MEMORY_MB = flags.DEFINE_integer("memory_mb", 1024, "Memory of the code of one world.", lower_bound=1)
EXECUTE_S = flags.DEFINE_float("execute_s", 60.0, "Seconds of one step.")
LEASE_S = flags.DEFINE_float("lease_s", 60.0, "Seconds after which the worlds of a silent client are closed.", lower_bound=1.0)
UNISOLATED = flags.DEFINE_bool("allow_unisolated", False, "Serve also where the file-system layer cannot be had.")


def token_of(path: Path) -> str:
    """The token in a file, which is made with a new one if it is not there.

    Raises:
      ConfigError: the file is empty, or others may read it.
    """
    path = path.expanduser()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path} can be read by others: chmod 600 {path}")
    token = path.read_text().strip()
    if not token:
        raise ConfigError(f"{path} is empty; delete it to get a new token")
    return token


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        root = resolve_root(KIND.value, ROOT.value or None, scenarios=SCENARIOS.value, seed=SEED.value)
        limits = Limits(memory_mb=MEMORY_MB.value, execute_s=EXECUTE_S.value)
        outputs = Path(OUTPUTS.value).expanduser() if OUTPUTS.value else None
        pool = WorldPool(root.path, limits=limits, outputs=outputs, max_open=MAX_OPEN.value, allow_unisolated=UNISOLATED.value)
        service = Service(pool, root, token_of(Path(TOKEN_FILE.value)), LEASE_S.value)
    except SageError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    print(f"serving {pool.max_open} worlds of {root.path} on {HOST.value}:{PORT.value}; token in {TOKEN_FILE.value}", flush=True)
    uvicorn.run(
        service.app, host=HOST.value, port=PORT.value, log_level="warning", ssl_certfile=CERTIFICATE.value or None, ssl_keyfile=KEY.value or None,
        timeout_graceful_shutdown=10,
    )


if __name__ == "__main__":
    app.run(main)

"""What killed processes leave behind, found and removed: processes of a fork server, scratch folders of a trainer.

All that descends from a fork server carries the server's name in its command line, whatever session, group or parent it has by then; as root
it has a user id of the server's range too, which it cannot change. A scratch folder is named after its trainer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

_RANGES, _RANGE = 320_000, 10_000
_SERVER = b"sage_jax.world.forkserver"
_ROUNDS, _PAUSE_S = 200, 0.01


def first_uid(server: int) -> int:
    """The first of the user ids that belong to the worlds of a fork server, given its process id: no file and no other world has them."""
    return 1_000_000_000 + server % _RANGES * _RANGE


def scratch_prefix() -> str:
    """How the names of this process's scratch folders begin."""
    return f"sage-worlds-{_namespace()}-{os.getpid()}-{_started(os.getpid())}-"


def end_processes(name: str, server: int | None) -> None:
    """Kills whatever has an argument that begins with `name`, or a user id of the server with this process id; returns when none is left,
    or after some seconds. Blocking."""
    first = first_uid(server) if server is not None and os.geteuid() == 0 else None
    for _ in range(_ROUNDS):
        found = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_of(int(pid), name.encode(), first)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)  # they may have forked meanwhile


def remove_stale(folder: Path) -> None:
    """Removes the scratch folders in `folder` whose trainer is dead, with the processes that may use them. Those of other users and of
    other process-id namespaces, whose trainers cannot be seen from here, are left alone."""
    for path in folder.glob("sage-worlds-*"):
        parts = re.fullmatch(r"sage-worlds-(\d+)-(\d+)-(\d+)-.+", path.name)
        if not parts or int(parts[1]) != _namespace() or _started(int(parts[2])) == int(parts[3]):
            continue
        with contextlib.suppress(FileNotFoundError):  # another trainer was faster
            if path.lstat().st_uid == os.geteuid():
                end_processes(path.name, None)
                shutil.rmtree(path, ignore_errors=True)


def _is_of(pid: int, name: bytes, first_uid: int | None) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            arguments = file.read().split(b"\0")
        if any(argument.startswith(name) for argument in arguments):
            return True
        if first_uid is None or _SERVER in arguments:
            return False
        with open(f"/proc/{pid}/status") as file:
            status = file.read()
    except OSError:
        return False  # it is gone
    uid = int(re.search(r"^Uid:\s+(\d+)", status, re.M)[1])
    return first_uid <= uid < first_uid + _RANGE and not re.search(r"^State:\s+[ZX]", status, re.M)


def _namespace() -> int:
    return int(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")))


def _started(pid: int) -> int:
    """When a process started, in ticks since the machine did; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as line:
            return int(line.read().rsplit(")", 1)[1].split()[19])
    except OSError:
        return 0

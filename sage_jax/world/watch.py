"""What processes hold, read from /proc and from their folder, and how they ended. No engine, no state."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Container, Iterable


def parent_of(pid: int) -> int:
    """Process id of the parent; raises OSError if the process is gone."""
    with open(f"/proc/{pid}/stat") as line:
        return int(line.read().rsplit(")", 1)[1].split()[1])


def describe_status(status: int | None) -> str:
    """How a process ended, in words; `status` as `waitpid` gives it, None where the fork server ended with it."""
    if status is None:
        return "the fork server ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in {*signal.Signals}
        return f"ended by signal {signal.Signals(number).name if known else number}"  # most real-time signals have no name
    return f"exited with code {os.WEXITSTATUS(status)}"


def memory(pid: int) -> int:
    """Bytes of anonymous and shared memory that a process holds; 0 if it is gone."""
    fields = _status(pid)
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def limited_memory() -> tuple[int, int]:
    """(private writable memory, address space) of this process, in bytes: what RLIMIT_DATA and RLIMIT_AS bound."""
    fields = _status(os.getpid())
    return fields["VmData"], fields["VmSize"]


def _status(pid: int) -> dict[str, int]:
    """The fields of /proc/PID/status that are sizes, in bytes."""
    fields = {}
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.endswith(" kB\n"):
                name, _, size = line.partition(":")
                fields[name] = int(size.split()[0]) * 1024
    return fields


def tree_memory(pids: Iterable[int], each: int = 0) -> int:
    """`memory` of processes, beyond `each` bytes that every one of them inherited."""
    return sum(max(0, memory(one) - each) for one in pids)


def descendants(pid: int, without: Container[int] = ()) -> list[int]:
    """The process and all below it, but for those in `without` and what is below them; at most about 10,000."""
    found, open_ones = [], [pid]
    while open_ones and len(found) < 10_000:
        one = open_ones.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{one}/task/{thread}/children") as children:
                    open_ones += [child for child in map(int, children.read().split()) if child not in without]
    return found


def folder_bytes(folder: str) -> int:
    """Bytes of the files below a folder, as the disk counts them; without end where one cannot be listed."""
    total, open_ones = 0, [folder]
    while open_ones:
        try:
            with os.scandir(open_ones.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            open_ones.append(entry.path)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return 1 << 62
    return total


def deleted_bytes(pids: Iterable[int]) -> int:
    """Bytes of files that processes hold open and that have no name any more, as far as this user may look."""
    held = {}
    for one in pids:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{one}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{one}/fd/{number}")
                    if not found.st_nlink and stat.S_ISREG(found.st_mode):
                        held[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(held.values())

"""What processes hold, read from /proc and from their folder. No engine, no state."""

from __future__ import annotations

import contextlib
import os


def parent_of(pid: int) -> int:
    """Process id of the parent; raises OSError if the process is gone."""
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[1])


def tree_memory(pid: int, each: int = 0) -> int:
    """Bytes of anonymous memory that a process and its descendants hold, beyond `each` bytes that every one of them inherited."""
    total = 0
    for one in descendants(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{one}/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
            total += max(0, (resident - shared) * _PAGE - each)
    return total


_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """The process and all below it, at most about 10,000."""
    found, open_ones = [], [pid]
    while open_ones and len(found) < 10_000:
        one = open_ones.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{one}/task/{thread}/children") as children:
                    open_ones += map(int, children.read().split())
    return found


def folder_bytes(folder: str) -> int:
    """Bytes of the files below a folder, as the disk counts them."""
    total, open_ones = 0, [folder]
    while open_ones:
        with contextlib.suppress(OSError), os.scandir(open_ones.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        open_ones.append(entry.path)
    return total

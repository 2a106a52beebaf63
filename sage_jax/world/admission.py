"""What this process may take of the machine: processors and memory, as the scheduler and control groups bound them.

Sources: sched_setaffinity(2), cgroup v2 (memory.max, memory.current, memory.stat, cpu.max) of the kernel's documentation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def cores(groups: Path = _GROUPS) -> int:
    """Processors that this process may use, at least one."""
    found = float(len(os.sched_getaffinity(0)))
    for group in _own_groups(groups):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found = min(found, int(quota) / int(period))
    return max(1, int(found))


def available_mb(groups: Path = _GROUPS) -> int:
    """Memory that this process and its children can still get, in MiB."""
    found = _machine_bytes()
    for group in _own_groups(groups):
        most, held = _text(group / "memory.max"), _text(group / "memory.current")
        if most.isdigit() and held.isdigit():
            fields = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            found = min(found, int(most) - int(held) + int(fields.get("inactive_file", 0)))  # which the kernel drops when asked for more
    return max(0, found) >> 20


def worlds_that_fit() -> int:
    """Worlds for this machine: 16 a core, and at most one for each 128 MiB of half of the memory that is available."""
    return max(1, min(16 * cores(), available_mb() // 2 // 128))


def _machine_bytes() -> int:
    with open("/proc/meminfo") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def _own_groups(groups: Path) -> Iterator[Path]:
    """The control group of this process and all above it, as far as they are mounted."""
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = groups / line[3:].strip("/")
            yield own
            while own != groups:
                own = own.parent
                yield own


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

"""Folders that appear whole or not at all: written under a temporary name beside their place, then put there in one step."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from sage_jax.errors import CheckpointError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux's renameat2


@contextlib.contextmanager
def whole_folder(folder: Path, needs: int, mark: str) -> Iterator[Path]:
    """Yields an empty temporary folder that takes the place of `folder` when the block ends; after an exception the old one stays.

    Args:
      needs: bytes that will be written; refused at once where the disk has less.
      mark: an existing folder is replaced if it is empty or holds the file `mark`; anything else is not ours to remove.

    Raises:
      CheckpointError: no room, or `folder` is something else.
    """
    folder = folder.resolve()  # a link stays one
    if folder.exists() and not (folder.is_dir() and ((folder / mark).exists() or not any(folder.iterdir()))):
        raise CheckpointError(f"{folder} is there and is not a folder with {mark}: it is not replaced; name another place")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < needs:
        raise CheckpointError(
            f"{folder} needs {needs:,} bytes and {folder.parent} has {free:,} free; nothing was written. "
            "An existing folder keeps its room until the new one is whole"
        )
    part = folder.with_name(f".{folder.name}.{_host()}-{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        _put(part, folder)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise CheckpointError(f"{folder} was not written, {'the old one stays' if folder.exists() else 'nothing is left of it'}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put(part: Path, folder: Path) -> None:
    """`part` takes the place of `folder`; what was there is at `part` or gone."""
    if not folder.exists():
        os.rename(part, folder)
    elif not _exchange(part, folder):
        # File systems that cannot exchange: a kill between the two renames leaves the old folder under the name of `aside`.
        aside = part.with_suffix(".old")
        os.rename(folder, aside)
        try:
            os.rename(part, folder)
        except OSError:
            os.rename(aside, folder)
            raise
        shutil.rmtree(aside)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two paths in one step; False where the system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0


def _sweep(folder: Path) -> None:
    """Removes what killed writers of this machine left; the old folder that one had set aside goes back to its place."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        found = re.fullmatch(re.escape(f".{folder.name}.{_host()}-") + r"(\d+)\.(part|old)", left.name)
        if not found or _alive(int(found[1])):
            continue
        if found[2] == "old" and not folder.exists():
            os.rename(left, folder)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    return re.sub(r"\W", "_", socket.gethostname())

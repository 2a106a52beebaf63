"""The safetensors format: a u64 length, a JSON header padded with spaces, raw little-endian bytes; one file, or several with an index.

Read and written here because the library's numpy side knows no bfloat16 and takes all tensors of a file at once; this one
hands out and takes one tensor at a time. Faults of files are collected, so that one error can name them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {"F32": DTYPES["float32"], "F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"]}
_CODES = {dtype: code for code, dtype in _NAMES.items()}
_LARGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file. Nothing is read before `open`."""

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def open(self) -> np.ndarray:
        """A memory map, whose pages are given back when the last view of it is gone."""
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        size = math.prod(self.shape) * self.dtype.itemsize
        return np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=(size,)).view(self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Opened:
    """What a folder holds. `lost`: tensors that the index places in files which are missing or whose header cannot be read."""

    tensors: dict[str, Stored]
    faults: list[str]
    lost: frozenset[str] = frozenset()


def open_folder(folder: Path, stem: str = "model") -> Opened:
    """All tensors of `STEM.safetensors`, else of the files that `STEM.safetensors.index.json` names.

    With both the single file counts, as for transformers. Every fault of every file is listed; none is raised.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        tensors, faults = _read_header(single)
        return Opened(tensors, faults)
    if not index.is_file():
        other = sorted(p.name for p in folder.glob("*.bin"))
        hint = f"; {', '.join(other)} is not read: save it as safetensors" if other else ""
        return Opened({}, [f"there is neither {single.name} nor {index.name}{hint}"])
    try:
        places = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return Opened({}, [f"{index.name} is damaged: it has no JSON object weight_map"])
    tensors, faults, unread = {}, [], set()
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            faults.append(f"{file}, which the index names, is missing")
            unread.add(file)
            continue
        found, wrong = _read_header(folder / file)
        faults += wrong
        faults += [f"{name} is in {tensors[name].path.name} and in {file}" for name in sorted(set(found) & set(tensors))]
        if wrong and not found:
            unread.add(file)
        tensors.update(found)
    return Opened(tensors, faults, frozenset(name for name, file in places.items() if file in unread))


def _read_header(path: Path) -> tuple[dict[str, Stored], list[str]]:
    """(tensors, faults) of one file. Tensors that a truncation cut are among both, so that their shapes are checked too."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8:
            return {}, [f"{path.name} is truncated: it has {size} bytes"]
        if length > _LARGEST_HEADER:
            return {}, [f"{path.name} is damaged: its header claims {length} bytes"]
        if length + 8 > size:
            return {}, [f"{path.name} is truncated: its header wants {length + 8} bytes and it has {size}"]
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError):
            return {}, [f"{path.name} is damaged: its header is no JSON object"]
    header.pop("__metadata__", None)
    tensors, faults, cut, end = {}, [], [], 0
    for name, info in header.items():
        try:
            code, shape, (begin, stop) = info["dtype"], tuple(map(int, info["shape"])), info["data_offsets"]
        except (KeyError, TypeError, ValueError):
            faults.append(f"{path.name} is damaged: its header has no dtype, shape or place of {name}")
            continue
        end = max(end, 8 + length + stop)
        if code not in _NAMES:
            faults.append(f"{name} in {path.name} has dtype {code}: valid are {', '.join(_NAMES)}")
            tensors[name] = Stored(path, 0, np.dtype(np.void), shape)  # never opened: its fault is raised
            continue
        if begin < 0 or stop - begin != math.prod(shape) * _NAMES[code].itemsize:
            faults.append(f"{path.name} is damaged: {name} {list(shape)} {code} has {stop - begin} bytes")
        if 8 + length + stop > size:
            cut.append(name)
        tensors[name] = Stored(path, 8 + length + begin, _NAMES[code], shape)
    if cut:
        names = f"{', '.join(cut[:3])}{f' and {len(cut) - 3} more' if len(cut) > 3 else ''}"
        faults.append(f"{path.name} is truncated: its tensors end at byte {end} and it has {size}; {names} cut")
    return tensors, faults


class Writer:
    """Writes tensors of known names and shapes into as many files as their size asks for, each when it comes, in any order.

    max_shard_bytes: no file is larger, unless it holds a single tensor that is. One file has no index; the names of
    several count them, and the index is written last, at the end of the `with` block, which raises ValueError where a tensor
    did not come.
    """

    def __init__(self, folder: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: np.dtype, max_shard_bytes: int, stem: str = "model"):
        self._folder, self._stem, self._dtype = folder, stem, dtype
        self._waiting = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes}
        self._place: dict[str, tuple[BinaryIO, int]] = {}
        self._index: dict[str, str] = {}
        groups = split(shapes, dtype, max_shard_bytes)
        for n, group in enumerate(groups):
            name = f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{n + 1:05d}-of-{len(groups):05d}.safetensors"
            self._begin(folder / name, group)
            self._index |= {tensor: name for tensor, _ in group}
        self._sizes = sum(self._waiting.values())

    def _begin(self, path: Path, group: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in group:
            size = self._waiting[name]
            header[name] = {"dtype": _CODES[self._dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = path.open("wb")
        for name, _ in group:
            self._place[name] = (file, 8 + len(text) + header[name]["data_offsets"][0])
        file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: np.ndarray) -> None:
        """An array of the tensor's dtype and size."""
        size = self._waiting.pop(name)
        file, offset = self._place[name]
        raw = np.ascontiguousarray(array, self._dtype).reshape(-1).view(np.uint8)
        if raw.size != size:
            raise ValueError(f"{name}: {raw.size} bytes instead of {size}")
        file.seek(offset)
        file.write(raw.data)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        files = {id(file): file for file, _ in self._place.values()}.values()
        try:
            if kind is None:
                self._finish(files)
        finally:
            for file in files:
                with contextlib.suppress(OSError):  # a full disk again: the first error counts
                    file.close()

    def _finish(self, files: Iterable[BinaryIO]) -> None:
        if self._waiting:
            raise ValueError(f"{len(self._waiting)} tensors were not written: {', '.join(sorted(self._waiting)[:3])}")
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        if len(set(self._index.values())) > 1:
            index = {"metadata": {"total_size": self._sizes, "total_parameters": self._sizes // self._dtype.itemsize}, "weight_map": self._index}
            (self._folder / f"{self._stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def split(
    shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: np.dtype, max_shard_bytes: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The tensors of each file, in order: as many as fit with their part of the header."""
    groups: list[list] = [[]]
    room = max_shard_bytes
    for name, shape in shapes:
        size = math.prod(shape) * dtype.itemsize + len(json.dumps(name)) + 160  # the entry's dtype, shape and two offsets
        if groups[-1] and size > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append((name, shape))
        room -= size
    return groups

"""Where the engine's files go: one folder a world, laid out so that the engine's own tools can read what is kept.

Two folders look like an engine root each (`data` is a link to the data root's `data`, `experiments/outputs` holds
what the engine writes):

- the scratch folder of the pool, in memory (/dev/shm) where there is room: worlds that nobody wants to keep, each
  under an experiment name of its own, removed when the world closes and with the pool;
- the outputs folder: worlds opened with `keep=True`, as `experiments/outputs/<experiment>/tasks/<task_id>/`. Run
  `cd <outputs> && appworld evaluate <experiment> <split>` to have the engine report on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sage_jax.errors import ConfigError, DataRootError
from sage_jax.world import leftovers

_SHARED_MEMORY = Path("/dev/shm")
_ROOM_WANTED = 1 << 30  # bytes free before shared memory is used for scratch


@dataclasses.dataclass(frozen=True)
class Place:
    """The folder of one world."""

    root: str  # what the engine gets as its root
    experiment: str
    task_id: str
    keep: bool
    agent: str  # the one folder in which the agent's code (and that of copies) may write; removed when the world closes
    slot: int  # a number that no other open world has
    copy: int = 0  # 0: opened; else a number of its own

    @property
    def folder(self) -> Path:
        return Path(self.root) / "experiments" / "outputs" / self.experiment / "tasks" / self.task_id

    @property
    def agent_folder(self) -> Path:
        """Where the agent's code of this world begins."""
        return Path(self.agent) / str(self.copy)


class Outputs:
    """Hands out folders; knows which are in use.

    Args:
      data_root: folder that holds `data/`.
      kept: folder for worlds opened with `keep=True`; None keeps them in the scratch folder until `remove`.
    """

    def __init__(self, data_root: Path, kept: Path | None):
        self.data = (Path(data_root) / "data").resolve()
        if not (self.data / "tasks").is_dir():
            raise DataRootError(
                f"{self.data} holds no tasks. Build the mini world, or give the folder in which "
                "'appworld download data' put its 'data' folder."
            )
        for parent in {_SHARED_MEMORY, Path(tempfile.gettempdir())}:
            leftovers.remove_stale(parent)
        self.scratch = Path(tempfile.mkdtemp(prefix=leftovers.scratch_prefix(), dir=_scratch_parent()))
        os.chmod(self.scratch, 0o711)  # other users may pass through to their own folder, and see nothing
        self.view = self.scratch / "view"
        self.home = self.scratch / "home"
        self.agents = self.scratch / "agents"
        self.kept = Path(kept).absolute() if kept is not None else self.scratch / "kept"
        try:
            self.home.mkdir(mode=0o700)
            self.agents.mkdir(mode=0o711)
            _lay_out(self.view, self.data)
            _lay_out(self.kept, self.data)
        except BaseException:
            self.remove()
            raise
        for folder in (self.view, self.scratch / "kept"):
            if folder.exists():
                os.chmod(folder, 0o700)
        self._in_use: set[tuple[str, str]] = set()
        self._slots: set[int] = set()
        self._serial = 0

    def first_task(self) -> str:
        """Any task of the root, to warm up with."""
        for entry in sorted(self.data.joinpath("tasks").iterdir()):
            if (entry / "specs.json").is_file():
                return entry.name
        raise DataRootError(f"{self.data / 'tasks'} holds no task")

    def take(self, task_id: str, experiment: str, keep: bool) -> Place:
        """A folder for one world.

        Raises:
          ConfigError: unknown task, unusable experiment name, or the kept folder is in use by an open world.
        """
        if not re.fullmatch(r"[\w:.-]+", task_id) or not (self.data / "tasks" / task_id / "specs.json").is_file():
            raise ConfigError(f"task {task_id!r} is not in {self.data / 'tasks'}")
        if not keep:
            self._serial += 1
            return Place(str(self.view), f"world{self._serial:07d}", task_id, False, *self._agent_folder())
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", experiment) or ".." in experiment.split("/"):
            raise ConfigError(f"experiment name {experiment!r} is no relative path of letters, digits, '_', '-', '.'")
        if "memory" in experiment:
            raise ConfigError(f"experiment name {experiment!r}: the engine takes paths with 'memory' for databases in memory")
        if (experiment, task_id) in self._in_use:
            raise ConfigError(f"task {task_id} is already open in experiment {experiment!r}; give each run its own name")
        self._in_use.add((experiment, task_id))
        return Place(str(self.kept), experiment, task_id, True, *self._agent_folder())

    def take_copy(self, place: Place) -> Place:
        """A folder for a copy of an open world, whose files of the agent lie beside the original's."""
        self._serial += 1
        return dataclasses.replace(place, root=str(self.view), experiment=f"world{self._serial:07d}", keep=False, copy=self._serial)

    def _agent_folder(self) -> tuple[str, int]:
        slot = next(n for n in itertools.count() if n not in self._slots)
        self._slots.add(slot)
        return tempfile.mkdtemp(prefix=f"{slot}-", dir=self.agents), slot

    def give_back(self, place: Place) -> None:
        """Frees the folders; removes those that are not kept. Blocking. Only after the world's processes are gone."""
        _remove(place.agent_folder if place.copy else place.agent)
        if not place.copy:
            self._slots.discard(place.slot)
        if place.keep:
            self._in_use.discard((place.experiment, place.task_id))
        else:
            shutil.rmtree(place.folder.parent.parent, ignore_errors=True)

    def remove(self) -> None:
        """Removes the scratch folder. Blocking; harmless when done twice."""
        _remove(self.scratch)


def _remove(folder: Path | str) -> None:
    """Removes what the agent's code made of a folder; folders may lie deeper than Python's own way goes."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL)


def _scratch_parent() -> str:
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    if usable and shutil.disk_usage(_SHARED_MEMORY).free >= _ROOM_WANTED:
        return str(_SHARED_MEMORY)
    return tempfile.gettempdir()


def _lay_out(root: Path, data: Path) -> None:
    if "memory" in str(root):
        raise ConfigError(f"{root}: the engine takes paths with 'memory' for databases in memory; use another folder")
    (root / "experiments" / "outputs").mkdir(parents=True, exist_ok=True)
    link = root / "data"
    if not link.is_symlink() and not link.exists():
        # Another process may lay out the same folder in this moment; what it linked is checked below.
        with contextlib.suppress(FileExistsError):
            link.symlink_to(data, target_is_directory=True)
    if link.resolve() != data:
        raise ConfigError(f"{link} points to {link.resolve()}, not to the data root {data}; use another outputs folder")

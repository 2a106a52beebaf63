"""Data roots: the folder with AppWorld's `data/`, ours (the mini world) or the official one.

Reads plain files only and never imports the engine. Of a task's ground truth it reads the difficulty and nothing else.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from sage_jax.errors import ConfigError, DataRootError
from sage_jax.world.types import Supervisor, Task

KINDS = ("miniworld", "official")
SPLITS = ("train", "dev", "test_normal", "test_challenge")
DEFAULT_SCENARIOS = 180
SMOKE_SCENARIOS = 12
MARKER = "miniworld.json"  # stands in a mini world's folder when it is complete
_HOW = "Get the official tasks with `appworld install && appworld download data` and give the folder that holds `data/` " \
       "(APPWORLD_ROOT), or use the mini world: world.kind=miniworld, built by `python -m sage_jax.world.miniworld`."


def cache_home() -> Path:
    """The cache folder: SAGE_CACHE, else XDG_CACHE_HOME/sage_jax, else ~/.cache/sage_jax."""
    if os.environ.get("SAGE_CACHE"):
        return Path(os.environ["SAGE_CACHE"]).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "sage_jax"


@dataclasses.dataclass(frozen=True)
class DataRoot:
    """An AppWorld root that was found complete."""

    path: Path  # holds data/
    kind: str  # "miniworld" | "official"

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits that have a file."""
        return tuple(s for s in SPLITS if (self.path / "data" / "datasets" / f"{s}.txt").exists())

    def scenarios(self, split: str) -> dict[str, tuple[str, ...]]:
        """Scenario id -> its task ids, both in file order.

        split: a split's name, or the path of a text file of scenario or task ids, one a line (a scenario stands for all
        its tasks); with "@1,2" behind it only the scenarios whose hardest task has one of these difficulties.

        Raises:
          DataRootError: no such split or file, an id in it that the root does not have, or a task without a stated difficulty
            where difficulties are asked for.
          ConfigError: difficulties that are not among 1, 2, 3.
        """
        name, levels = split_levels(split)
        groups: dict[str, list[str]] = {}
        for task_id in self._lines(name):
            groups.setdefault(task_id.partition("_")[0], []).append(task_id)
        return {s: tuple(ids) for s, ids in groups.items() if not levels or self._hardest(ids) in levels}

    def _hardest(self, task_ids: Sequence[str]) -> int:
        difficulties = [self._difficulty(t) for t in task_ids]
        if 0 in difficulties:
            raise DataRootError(f"{self.path}: task {task_ids[difficulties.index(0)]} states no difficulty, so it cannot be chosen by it")
        return max(difficulties)

    def _difficulty(self, task_id: str) -> int:
        """1, 2 or 3; 0 where the root does not say."""
        metadata = self.path / "data" / "tasks" / task_id / "ground_truth" / "metadata.json"
        return json.loads(metadata.read_text()).get("difficulty", 0) if metadata.exists() else 0

    def task_ids(self, split: str) -> tuple[str, ...]:
        """The task ids of a split or a file of ids, those of a scenario side by side."""
        return tuple(t for ids in self.scenarios(split).values() for t in ids)

    def task(self, task_id: str) -> Task:
        """What may be known of a task. Raises DataRootError for an unknown id."""
        folder = self.path / "data" / "tasks" / task_id
        if not (folder / "specs.json").exists():
            raise DataRootError(f"{self.path} has no task {task_id!r}")
        specs = json.loads((folder / "specs.json").read_text())
        person = specs.get("supervisor") or specs["main_user"]
        return Task(
            task_id=task_id, scenario_id=task_id.partition("_")[0], split=self._split_of.get(task_id, ""),
            instruction=specs["instruction"],
            supervisor=Supervisor(**{k: person[k] for k in ("first_name", "last_name", "email", "phone_number")}),
            app_descriptions=self._app_descriptions,
            difficulty=self._difficulty(task_id),
        )

    @functools.cached_property
    def _split_of(self) -> dict[str, str]:
        return {t: split for split in self.splits for t in self._lines(split)}

    @functools.cached_property
    def _app_descriptions(self) -> dict[str, str]:
        documented = {p.stem for p in (self.path / "data" / "api_docs" / "standard").glob("*.json")}
        return {app: text for app, text in engine_app_descriptions().items() if app in documented}

    def _lines(self, split: str) -> list[str]:
        path = self.path / "data" / "datasets" / f"{split}.txt"
        if path.exists():
            return _read_ids(path)
        if not Path(split).is_file():
            raise DataRootError(f"no split {split!r}: {self.path} has {', '.join(self.splits)}; a file of scenario ids is taken too")
        tasks = self.path / "data" / "tasks"
        out = []
        for entry in _read_ids(Path(split)):
            ids = [entry] if "_" in entry else sorted(p.name for p in tasks.glob(f"{entry}_*"))
            if not ids or not (tasks / ids[0]).is_dir():
                raise DataRootError(f"{split}: {self.path} has no scenario or task {entry!r}")
            out += ids
        return out


def tasks_digest(root: DataRoot) -> str:
    """Names the tasks of a root, to tell whether two machines mean the same ones."""
    text = repr([(split, root.task_ids(split)) for split in root.splits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def split_levels(split: str) -> tuple[str, tuple[int, ...]]:
    """"train@1,2" -> ("train", (1, 2)); without "@" no levels. Raises ConfigError for levels that are not 1, 2 or 3."""
    name, at, levels = split.partition("@")
    if not at or Path(split).is_file():
        return split, ()
    if not set(levels.split(",")) <= {"1", "2", "3"}:
        raise ConfigError(f"split {split!r}: after @ stand difficulties, e.g. {name}@1 or {name}@1,2")
    return name, tuple(sorted(map(int, levels.split(","))))


def _read_ids(path: Path) -> list[str]:
    return [line.partition(":")[0].strip() for line in path.read_text().splitlines() if line.strip()]


@functools.cache
def engine_app_descriptions() -> dict[str, str]:
    """App -> one line, in the engine's order, read from the installed engine's source without running it.

    Raises DataRootError if the engine is not installed or not unpacked.
    """
    spec = importlib.util.find_spec("appworld")
    source = Path(spec.submodule_search_locations[0]) / "apps" / "__init__.py" if spec else None
    if source is None or not source.exists():
        raise DataRootError("the engine is not unpacked: run `pip install appworld && appworld install`")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "APP_TO_DESCRIPTION":
            return ast.literal_eval(node.value)
    raise DataRootError(f"{source} holds no app descriptions: this version of the engine is not known")


def open_root(path: Path | str) -> DataRoot:
    """Opens a root after checking that its parts are there.

    Raises:
      DataRootError: it is missing, not a root, or half-built; the message says how to get one.
    """
    path = Path(path).expanduser().absolute()
    data = path / "data"
    if not data.is_dir():
        where = f"{path} holds no folder data/" if path.exists() else f"{path} does not exist"
        raise DataRootError(f"no AppWorld data root: {where}. {_HOW}")
    needed = ("base_dbs/spotify.db", "api_docs/standard/spotify.json", "datasets", "tasks")
    missing = [f"data/{n}" for n in needed if not (data / n).exists()]
    if missing:
        raise DataRootError(f"{path} is not a complete AppWorld data root: {', '.join(missing)} missing. {_HOW}")
    ours = (path / MARKER).exists()
    if not ours and any(data.glob("tasks/*/ground_truth/references.json")):
        raise DataRootError(f"{path} is a half-built mini world: delete it and run `python -m sage_jax.world.miniworld`")
    root = DataRoot(path, "miniworld" if ours else "official")
    if not root.splits:
        raise DataRootError(f"{path}: data/datasets holds none of {', '.join(s + '.txt' for s in SPLITS)}. {_HOW}")
    for split in root.splits:
        for task_id in root._lines(split):
            if not (data / "tasks" / task_id / "specs.json").exists():
                raise DataRootError(f"{path}: task {task_id} of {split} has no specs.json. {_HOW}")
    return root


def resolve_root(kind: str, path: str | Path | None = None, scenarios: int = DEFAULT_SCENARIOS, seed: int = 0,
                 check: bool = True) -> DataRoot:
    """The root that a config asks for.

    Args:
      kind: "miniworld" (built into the cache on first use) or "official".
      path: official: the folder that holds `data/` (default APPWORLD_ROOT). Mini world: a built root to be used as it is.
      scenarios, seed: size and content of the mini world.
      check: run the mini world's build-time checks on every task.

    Raises:
      ConfigError: unknown kind.
      DataRootError: see `open_root`.
    """
    if kind not in KINDS:
        raise ConfigError(f"world.kind={kind!r}: valid kinds are {', '.join(KINDS)}")
    if kind == "miniworld":
        if path:
            root = open_root(path)
            if root.kind != "miniworld":
                raise DataRootError(f"{root.path} is an official root; set world.kind=official to use it")
            return root
        from sage_jax.world.miniworld.build import build

        return open_root(build(scenarios, seed, check=check))
    path = path or os.environ.get("APPWORLD_ROOT")
    if not path:
        raise DataRootError(f"world.kind=official needs world.path or APPWORLD_ROOT. {_HOW}")
    root = open_root(path)
    if root.kind != "official":
        raise DataRootError(f"{root.path} is a mini world; set world.kind=miniworld to use it")
    return root

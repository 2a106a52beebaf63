"""Builds mini worlds into the cache: one folder a (code version, seed, size), complete or absent.

A build works in a folder of its own beside the final one, checks every task, writes the marker and is renamed as its last
step. A lock file lets one process build while others wait and then find the result. Bytes depend on the code, the engine,
the seed and the size only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import queue
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sage_jax.errors import DataRootError
from sage_jax.world.miniworld.content import Plan
from sage_jax.world.miniworld.database import APPS
from sage_jax.world.miniworld.generate import FULL_PEOPLE, MIN_PEOPLE, make_plan
from sage_jax.world.miniworld.tasks import TaskPlan, plan_tasks, split_sizes, write_splits
from sage_jax.world.roots import MARKER, cache_home

# Apps that take longest come first, so that no process is left alone with one at the end.
_SLOW = ("api_docs", "spotify", "gmail", "splitwise", "venmo", "todoist", "phone")
_ORDER = [*_SLOW, *(app for app in APPS if app not in _SLOW)]


def people_of(scenarios: int) -> int:
    """How many people live in a world with so many scenarios."""
    return MIN_PEOPLE if scenarios <= 24 else FULL_PEOPLE


def code_version() -> str:
    """A digest of what decides a build's bytes: this package's sources, the engine's version, Python's and SQLite's."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    versions = (importlib.metadata.version("appworld"), sys.version_info[:2], sqlite3.sqlite_version)
    digest.update(repr(versions).encode())
    return digest.hexdigest()[:12]


def root_name(scenarios: int, seed: int) -> str:
    return f"miniworld-{code_version()}-s{seed}-n{scenarios}"


def build(scenarios: int, seed: int, cache: Path | str | None = None, check: bool = True, processes: int | None = None,
          quiet: bool = False) -> Path:
    """The folder of a complete mini world, built if the cache does not hold it.

    Args:
      scenarios: number of scenarios over all splits, at least 4; three tasks each.
      seed: draws the content and the tasks.
      cache: folder of the cache; default `cache_home()`.
      check: run the build-time checks on every task (a world without them is kept under another name).
      processes: worker processes; default one a usable core.
      quiet: no progress bar and no times.

    Raises:
      DataRootError: a task failed its checks (the message names task and requirement), or a worker process died.
    """
    split_sizes(scenarios)  # refuses impossible sizes before anything is written
    cache = Path(cache).absolute() if cache else cache_home()
    if "memory" in str(cache):
        raise DataRootError(f"{cache}: the engine takes paths with 'memory' in them for databases in memory; set SAGE_CACHE")
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / (root_name(scenarios, seed) + ("" if check else "-unchecked"))
    if is_complete(target):
        return target
    with _locked(target.with_name(target.name + ".lock"), quiet):
        if is_complete(target):
            return target
        for leftover in (target, *cache.glob(f"{target.name}.partial-*")):
            if leftover.exists():
                _say(quiet, f"removing a half-built mini world: {leftover}")
                shutil.rmtree(leftover)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        _build_into(partial, scenarios, seed, check, processes or len(os.sched_getaffinity(0)), quiet)
        os.replace(partial, target)
    _say(quiet, f"mini world: {target}")
    return target


def is_complete(path: Path) -> bool:
    """Whether a folder holds a mini world that was finished."""
    return (path / MARKER).is_file()


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(path: Path, quiet: bool) -> Iterator[None]:
    """Holds an exclusive lock of the file; the kernel releases it when the process ends, however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(quiet, f"waiting for another process that builds this mini world ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_into(root: Path, scenarios: int, seed: int, check: bool, processes: int, quiet: bool) -> None:
    start = time.perf_counter()
    plan: Plan = make_plan(seed, people_of(scenarios))
    planned: tuple[TaskPlan, ...] = plan_tasks(plan, scenarios)
    ids = list(dict.fromkeys(t.scenario_id for t in planned))
    if len(ids) != scenarios:
        raise DataRootError(f"seed {seed}: scenario ids collide; use another seed")
    (root / "data").mkdir(parents=True)
    (root / "data" / "version.txt").write_text(f"miniworld {code_version()}\n")
    write_splits(planned, root)
    common = {"root": str(root), "seed": seed, "people": len(plan.people)}
    with _Workers(processes, root) as workers, _Progress(len(APPS) + scenarios, quiet) as progress:
        progress.phase("databases")
        workers.run([{**common, "app": app} for app in _ORDER], progress)
        databases = time.perf_counter() - start
        progress.phase("tasks and checks" if check else "tasks")
        workers.run([{**common, "scenario": s, "scenarios": scenarios, "check": check} for s in ids], progress)
    shutil.rmtree(root / "experiments", ignore_errors=True)
    (root / "workers.log").unlink()
    marker = {"version": code_version(), "seed": seed, "scenarios": scenarios, "tasks": len(planned), "checked": check}
    (root / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
    total = time.perf_counter() - start
    _say(quiet, f"mini world of {scenarios} scenarios, {len(planned)} tasks: {total:.1f} s on {processes} processes "
                f"(databases {databases:.1f} s, tasks{' and checks' if check else ''} {total - databases:.1f} s)")


class _Workers:
    """Worker processes that share a queue of jobs; see `worker.py`."""

    def __init__(self, n: int, root: Path):
        self._log = root / "workers.log"
        with open(self._log, "w") as log:
            self._processes = [self._start(root, log) for _ in range(n)]

    @staticmethod
    def _start(root: Path, log) -> subprocess.Popen:
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
        env = {**os.environ, "APPWORLD_ROOT": str(root), "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        return subprocess.Popen([sys.executable, "-m", "sage_jax.world.miniworld.worker"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=log, env=env, text=True, cwd=root)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind, value, trace) -> None:
        for p in self._processes:
            if kind is not None:
                p.kill()
            with contextlib.suppress(BrokenPipeError):
                p.stdin.close()
            p.wait()
            p.stdout.close()

    def run(self, jobs: Sequence[dict], progress: _Progress) -> None:
        """Does all jobs; raises DataRootError with the first job that failed."""
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        for job in jobs:
            waiting.put(job)
        errors: list[str] = []
        threads = [threading.Thread(target=self._feed, args=(p, waiting, errors, progress), daemon=True) for p in self._processes]
        for t in threads:
            t.start()
        for t in threads:
            while t.is_alive():
                t.join(0.2)  # short waits let Ctrl-C through
        if errors:
            raise DataRootError(errors[0])

    def _feed(self, process: subprocess.Popen, waiting: queue.SimpleQueue, errors: list[str], progress: _Progress) -> None:
        while not errors:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            name = job.get("app") or f"scenario {job['scenario']}"
            line = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:
                code = process.wait()
                errors.append(f"building {name}: its worker process ended with status {code} (a negative one is a signal: "
                              f"-9 may be the system's memory killer). Run it again.\n{self._log.read_text()[-4000:]}")
            elif error := json.loads(line)["error"]:
                errors.append(f"building {name} failed.\n{error}")
            progress.step()


class _Progress:
    """A bar with rate and remaining time on a terminal, nothing when quiet."""

    def __init__(self, total: int, quiet: bool):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(TextColumn("mini world: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                             TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def phase(self, name: str) -> None:
        self._bar.update(self._task, description=name)

    def step(self) -> None:
        self._bar.advance(self._task)

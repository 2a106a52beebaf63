"""Checkpoints of a run: the newest N, and the best one by a metric in a place of its own.

    <root>/last/<step>/{params, opt, data, meta}   to continue from       (Orbax items, then MANIFEST.json)
    <root>/best/<step>/{params, meta}              to evaluate or export

`MANIFEST.json` is written last, after Orbax has committed the step: sizes of all files, SHA-256 of those up to 64 MiB (larger
array shards are checked by their size here and by the reader when restored). A step without one was not finished.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import orbax.checkpoint as ocp

from sage_jax.errors import CheckpointError
from sage_jax.report.episodes import write_text
from sage_jax.training.state import TrainState

MANIFEST = "MANIFEST.json"
HASH_LIMIT = 64 * 2**20  # bytes


class Checkpoints:
    """Saves asynchronously; what failed in the background is raised by the next `save`, `wait` or `close`.

    Args:
      root: folder of the checkpoints.
      keep: how many of the newest to keep.
      best_metric: name in the `metrics` of `save` by whose largest value the best one is kept; empty: none is.
    """

    def __init__(self, root: str | os.PathLike, keep: int = 3, best_metric: str = ""):
        self.root = Path(root).absolute()
        self.best_metric = best_metric
        self._last = _Folder(self.root / "last", keep)
        self._best = _Folder(self.root / "best", 1)

    def save(
        self, step: int, state: TrainState, iterator: Any, meta: dict[str, Any], metrics: dict[str, float] | None = None
    ) -> None:
        """Starts to save a step; device arrays are copied before it returns, so `state` may be donated afterwards. A best one is on
        disk when it returns.

        Args:
          step: the step that is done.
          iterator: a Grain iterator; its state is taken now.
          meta: what JSON can hold: seed, config digest, host-side random states. Counters of `state` are added.
          metrics: if `best_metric` is among them and better than before, the parameters also go to `best`.

        Raises:
          CheckpointError: an earlier save failed, or this step is already there and whole.
        """
        meta = {
            "step": step,
            "counters": state.counters(),
            "params_tree": describe(state.params),
            "opt_tree": describe(state.opt_state),
            "metrics": {k: float(v) for k, v in (metrics or {}).items()},
            "user": meta,
        }
        items = {
            "params": ocp.args.StandardSave(state.params),
            "opt": ocp.args.StandardSave(state.opt_state),
            "data": grain.checkpoint.CheckpointSave(iterator),
            "meta": ocp.args.JsonSave(meta),
        }
        value = meta["metrics"].get(self.best_metric, math.nan)
        if math.isfinite(value) and value > self.best_value() and step not in self._best.finished():
            self._best.save(step, {k: items[k] for k in ("params", "meta")})
            self._best.wait()  # a run stopped after `last` is there does not come back to this step
        self._last.save(step, items)

    def best_value(self) -> float:
        """The metric of the best checkpoint; -inf if there is none."""
        self._best.wait()
        step = next(iter(self._best.whole()), None)
        if step is None:
            return -math.inf
        return self._best.restore(step, {"meta": ocp.args.JsonRestore()})["meta"]["metrics"][self.best_metric]

    def latest_step(self) -> int | None:
        """The newest finished checkpoint to continue from; None if there is none."""
        return next(iter(self.steps()), None)

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint to continue from, newest first. Damage is found when one is restored."""
        self._last.wait()
        return self._last.finished()

    def restore_latest(self, like: TrainState, iterator: Any) -> tuple[TrainState, dict[str, Any]]:
        """The newest whole checkpoint, onto the shardings of `like`; `iterator` is set to its place.

        Damaged and unfinished ones are passed over with a warning that names them.

        Args:
          like: a state of the wanted shapes, dtypes and shardings; arrays or jax.ShapeDtypeStruct.
          iterator: a Grain iterator over the same pipeline.

        Returns:
          (state, the `meta` given to `save`).

        Raises:
          CheckpointError: there is none, all are damaged, or the checkpoint belongs to another model, optimizer or data pipeline.
        """
        self._last.wait()
        finished = self._last.finished()
        for step in self._last.whole():
            path = self._last.path / str(step)
            try:
                meta = self._last.restore(step, {"meta": ocp.args.JsonRestore()})["meta"]
            except Exception as error:  # Orbax raises many types for damaged files
                warnings.warn(f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); trying an older one", stacklevel=2)
                continue
            _same_tree(path, "model", meta["params_tree"], describe(like.params))
            _same_tree(path, "optimizer", meta["opt_tree"], describe(like.opt_state))
            try:
                got = self._last.restore(
                    step,
                    {
                        "params": ocp.args.StandardRestore(abstract(like.params)),
                        "opt": ocp.args.StandardRestore(abstract(like.opt_state)),
                        "data": grain.checkpoint.CheckpointRestore(iterator),
                    },
                )
            except Exception as error:
                warnings.warn(f"checkpoint {path} cannot be read ({type(error).__name__}: {error}); trying an older one", stacklevel=2)
                continue
            state = TrainState(got["params"], got["opt"], **meta["counters"])
            return state, meta["user"]
        if finished:
            raise CheckpointError(f"all checkpoints in {self._last.path} are damaged: steps {finished}; move the folder away to start anew")
        raise CheckpointError(f"{self._last.path} holds no finished checkpoint")

    def restore_params(self, params_like: Any, which: str = "best") -> tuple[TrainState, dict[str, Any]]:
        """Parameters alone, for evaluation and export: (a state without optimizer, meta).

        Args:
          params_like: arrays or abstract arrays with the wanted shardings.
          which: "best", "last", or the number of a step that is kept.

        Raises:
          CheckpointError: there is no such checkpoint, it is damaged, or it belongs to another model.
        """
        if which not in ("best", "last") and not which.isdigit():
            raise CheckpointError(f"which={which!r}; choices: best, last, or a step of {self.steps()}")
        folder = self._best if which == "best" else self._last
        folder.wait()
        whole = folder.whole()
        step = int(which) if which.isdigit() else next(iter(whole), None)
        if step is None or not (folder.path / str(step)).exists():
            raise CheckpointError(f"{folder.path} holds no whole checkpoint {which!r}; finished ones: {folder.finished()}")
        folder.verify(step)
        path = folder.path / str(step)
        try:
            meta = folder.restore(step, {"meta": ocp.args.JsonRestore()})["meta"]
            _same_tree(path, "model", meta["params_tree"], describe(params_like))
            got = folder.restore(step, {"params": ocp.args.StandardRestore(abstract(params_like))})
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}") from error
        return TrainState(got["params"], None, **meta["counters"]), meta["user"]

    def wait(self) -> None:
        """Blocks until all is on disk; raises CheckpointError if a save failed."""
        self._last.wait()
        self._best.wait()

    def close(self) -> None:
        """Waits, then frees the threads. Raises CheckpointError if a save failed."""
        try:
            self.wait()
        finally:
            self._last.close()
            self._best.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays (abstract ones stay as they are)."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def describe(tree: Any) -> dict[str, str]:
    """path -> "dtype[shape]" of every leaf: enough to tell another model or optimizer from this one."""
    return {
        jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _same_tree(path: Path, what: str, saved: dict[str, str], wanted: dict[str, str]) -> None:
    if saved == wanted:
        return
    differ = [f"{k}: saved {saved.get(k, 'nothing')}, now {wanted.get(k, 'nothing')}" for k in sorted(saved.keys() | wanted.keys()) if saved.get(k) != wanted.get(k)]
    raise CheckpointError(
        f"checkpoint {path} was written with another {what}: {'; '.join(differ[:4])}"
        f"{f' and {len(differ) - 4} more' if len(differ) > 4 else ''}. Use the config that wrote it, or another workdir."
    )


class _Folder:
    """One Orbax manager, whose steps get a manifest once they are committed."""

    def __init__(self, path: Path, keep: int):
        self.path = path
        self._keep = keep
        self._manager: ocp.CheckpointManager | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def _get(self) -> ocp.CheckpointManager:
        if self._manager is None:  # made at first use: a reader of `best` alone creates no folder
            self._manager = ocp.CheckpointManager(
                self.path, options=ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=True)
            )
        return self._manager

    def save(self, step: int, items: dict[str, Any]) -> None:
        self.wait()
        target = self.path / str(step)
        try:
            if target.exists():
                if self._is_whole(step):
                    raise CheckpointError(f"{target} is already there; use another workdir, or remove it")
                aside = self.path.parent / f"damaged-{step}-{uuid.uuid4().hex[:8]}"
                warnings.warn(f"{target} is unfinished or damaged; moved to {aside}", stacklevel=3)
                os.rename(target, aside)
                if self._manager is not None:
                    self._manager.reload()
            manager = self._get()
            if not manager.save(step, args=ocp.args.Composite(**items), force=True):
                raise CheckpointError(f"Orbax refused to save {target}")
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"saving {target} failed: {type(error).__name__}: {error}") from error
        self._thread = threading.Thread(target=self._finish, args=(manager, target), name=f"checkpoint-{step}")
        self._thread.start()

    def _finish(self, manager: ocp.CheckpointManager, target: Path) -> None:
        try:
            manager.wait_until_finished()
            if jax.process_index() == 0:
                _write_manifest(target)
        except BaseException as error:  # kept for the thread that can act on it
            self._error = CheckpointError(f"saving {target} failed: {type(error).__name__}: {error}")

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def finished(self) -> list[int]:
        """Steps with a manifest, newest first."""
        if not self.path.exists():
            return []
        return sorted((int(p.name) for p in self.path.iterdir() if p.name.isdigit() and (p / MANIFEST).exists()), reverse=True)

    def whole(self) -> Iterator[int]:
        """Finished steps that agree with their manifest, newest first; the others are named in a warning."""
        if self.path.exists():
            for path in self.path.iterdir():
                if path.name.isdigit() and not (path / MANIFEST).exists():
                    warnings.warn(f"checkpoint {path} was not finished; not used", stacklevel=3)
        for step in self.finished():
            try:
                self.verify(step)
            except CheckpointError as error:
                warnings.warn(f"{error}; not used", stacklevel=3)
            else:
                yield step

    def _is_whole(self, step: int) -> bool:
        try:
            self.verify(step)
        except CheckpointError:
            return False
        return True

    def verify(self, step: int) -> None:
        """Raises CheckpointError if a file of the step is missing, new, or differs from the manifest."""
        path = self.path / str(step)
        try:
            wanted = json.loads((path / MANIFEST).read_text())["files"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {path} has no readable {MANIFEST} ({type(error).__name__})") from error
        found = _files(path)
        bad = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if bad:
            raise CheckpointError(f"checkpoint {path} is damaged: {', '.join(bad[:3])}{' ...' if len(bad) > 3 else ''}")

    def restore(self, step: int, items: dict[str, Any]) -> Any:
        return self._get().restore(step, args=ocp.args.Composite(**items))


def _files(path: Path) -> dict[str, list]:
    """Relative name -> [size in bytes, SHA-256 or "" above HASH_LIMIT] of every file of a step but its manifest."""
    result = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name != MANIFEST:
            size = file.stat().st_size
            digest = hashlib.sha256(file.read_bytes()).hexdigest() if size <= HASH_LIMIT else ""
            result[str(file.relative_to(path))] = [size, digest]
    return result


def _write_manifest(path: Path) -> None:
    write_text(path / MANIFEST, json.dumps({"files": _files(path)}))

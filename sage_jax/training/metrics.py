"""Metrics of a run: `metrics.jsonl` (one JSON object a line) and TensorBoard event files, in one folder.

A metric name is a path of lower-case words that carries its unit (`time/rollout_s`, `update/entropy_nats`). A value that is not
finite is written as null in the line, with its name under "nonfinite", and not sent to TensorBoard.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from sage_jax.errors import ConfigError
from sage_jax.report.episodes import write_text

NAME = re.compile(r"[a-z0-9_.@-]+(/[a-z0-9_.@-]+)*")
TIME = re.compile(r"(^|/)time/|^sampler/|(_|^)per_s$|_s$")
RESERVED = ("step", "wall_time_s", "nonfinite")


def is_time_metric(name: str) -> bool:
    """Whether a metric depends on the clock: an interrupted and resumed run may differ from an unbroken one in these alone.

    Those of the sampler do: which requests meet in its slots depends on when worlds answer.
    """
    return bool(TIME.search(name))


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, oldest first; a half-written last line is left off. [] if there is no file.

    Raises ConfigError naming a line that is no object with a `step`.
    """
    path = Path(workdir) / "metrics.jsonl"
    data = path.read_bytes() if path.exists() else b""
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            record = json.loads(line)
            records.append({**record, "step": int(record["step"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path}, line {number}: not metrics with a step ({type(error).__name__}: {error}); the file was damaged, move it away"
            ) from error
    return records


class MetricsWriter:
    """Appends metrics of a step; a context manager.

    Args:
      workdir: folder of the run; made if missing.
      resume_step: the first step that will be written: lines of this and later steps are cut (the file is rewritten
        and renamed), and TensorBoard is told to forget them. 0 for a run from its start.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0):
        self._dir = Path(workdir)
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / "metrics.jsonl"
        kept = [r for r in read_metrics(workdir) if r["step"] < resume_step]
        if path.exists():
            write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._last_step = kept[-1]["step"] if kept else 0
        self._file = path.open("a")
        self._events = _EventFile(self._dir / "tensorboard")
        start = event_pb2.Event(wall_time=time.time(), step=resume_step)
        start.session_log.status = event_pb2.SessionLog.START  # TensorBoard drops what older files say from here on
        self._events.add(start)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes one line and flushes it. Steps may repeat (training and evaluation of one step) but not go back.

        Raises:
          ValueError: a name that is no lower-case path or is reserved, or a step below the last one.
          TypeError: a value that is not one number.
        """
        if step < self._last_step:
            raise ValueError(f"metrics of step {step} after those of step {self._last_step}")
        line: dict[str, Any] = {"step": int(step), "wall_time_s": round(time.time(), 3)}
        bad = []
        for name in sorted(metrics):
            value = _number(name, metrics[name])
            if not math.isfinite(value):
                bad.append(name)
                line[name] = None
            else:
                line[name] = value
        if bad:
            line["nonfinite"] = bad
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        values = [
            summary_pb2.Summary.Value(tag=k, simple_value=v)
            for k, v in line.items()
            if k not in RESERVED and v is not None
        ]
        self._events.add(event_pb2.Event(wall_time=line["wall_time_s"], step=step, summary=summary_pb2.Summary(value=values)))
        self._last_step = int(step)

    def close(self) -> None:
        """Flushes and closes both files; harmless when repeated."""
        if not self._file.closed:
            self._file.close()
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _EventFile:
    """A TensorBoard event file of its own, written in the caller's thread.

    TensorBoard's own writer has a thread, for which `close` may wait two minutes if Ctrl-C came while something was handed to it.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"  # as readers expect
        self._records = RecordWriter((folder / name).open("wb"))
        self.add(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


_NUMBERS = itertools.count()


def _number(name: str, value: Any) -> float | int:
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ValueError(f"{name!r} is no metric name: lower-case words joined by '/', other than {', '.join(RESERVED)}")
    array = np.asarray(value)
    if array.ndim != 0 or array.dtype.kind not in "biuf":
        if array.dtype.name == "bfloat16" and array.ndim == 0:
            return float(array)
        raise TypeError(f"metric {name!r} must be one number, got {type(value).__name__} of shape {array.shape}")
    return int(array) if array.dtype.kind in "biu" else float(array)

"""curves.png from a run's metrics: reward, success, skill use, turns and tokens, entropy, gap. A missing key leaves a gap.

Owns which metric is drawn where (PANELS) and how; `training.metrics` writes and reads the rows, one object a line with a `step`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import io
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot. Keys may be patterns; keys that no row holds are left out. `right` keys get an axis of their own."""

    title: str
    unit: str
    keys: tuple[str, ...]
    right: tuple[str, ...] = ()
    right_unit: str = ""
    share: bool = False  # the axis runs from 0 to 1
    log: bool = False


PANELS = (
    Panel("Reward", "mean reward", ("reward/mean", "reward/outcome_mean", "reward/position_*")),
    Panel("Success", "share of tasks", ("success/mean", "success/position_*", "eval*/tgc", "eval*/sgc"), share=True),
    Panel("Skills", "share of episodes", ("skill/called_share", "skill/paid_share", "skill/defined_share", "eval*/skill_use"), share=True),
    Panel("Turns and tokens", "turns an episode", ("turns/mean", "eval*/turns"), ("tokens/generated_mean",), "generated tokens an episode"),
    Panel("Entropy", "nats a token", ("update/entropy_nats",)),
    Panel("Gap of sampler and trainer", "|log-prob difference|, nats", ("update/gap_mean_nats", "update/gap_p99_nats", "update/gap_max_nats"), log=True),
)
_COLOURS = ("#2563eb", "#db6b1a", "#16916a", "#a23bb8", "#b8902a", "#64748b")


def series(rows: Sequence[dict], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) float [n] of the rows that hold a finite number under `key`, by step; a step's last row wins."""
    found = {}
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            found[row["step"]] = float(value)
    steps = sorted(found)
    return np.array(steps, float), np.array([found[s] for s in steps], float)


def curves_png(rows: Sequence[dict], title: str = "") -> bytes:
    """The figure as PNG bytes, one plot per panel; a panel without data says so."""
    figure = Figure(figsize=(13, 7.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    keys = sorted({k for row in rows for k in row})
    for axis, panel in zip(figure.subplots(2, 3).flat, PANELS):
        _draw(axis, panel, rows, keys)
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, ha="left", weight="bold")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axis, panel: Panel, rows: Sequence[dict], keys: Sequence[str]) -> None:
    axis.set_title(panel.title, loc="left", fontsize=11, weight="bold")
    axis.set_ylabel(panel.unit, fontsize=9)
    axis.set_xlabel("step", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(True, color="#e2e8f0", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    left = _lines(axis, _match(panel.keys, keys), rows, 0)
    drawn = left
    if panel.right and (right_keys := _match(panel.right, keys)):
        twin = axis.twinx()
        twin.spines[["top"]].set_visible(False)
        twin.tick_params(labelsize=8)
        twin.set_ylabel(panel.right_unit, fontsize=9)
        drawn = left + _lines(twin, right_keys, rows, len(left))
    if not drawn:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="#94a3b8")
        return
    if panel.share:
        axis.set_ylim(-0.03, 1.03)
    if panel.log and any((line.get_ydata() > 0).any() for line in left):
        axis.set_yscale("log", nonpositive="mask")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(handles=drawn, fontsize=7.5, framealpha=0.85, edgecolor="none", loc="best")


def _lines(axis, keys: Sequence[str], rows: Sequence[dict], first: int) -> list:
    drawn = []
    for key in keys:
        steps, values = series(rows, key)
        if not len(steps):
            continue
        colour = _COLOURS[(first + len(drawn)) % len(_COLOURS)]
        rare = key.startswith("eval") or len(steps) < 3
        if len(steps) > 25 and not rare:
            axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.25)
            values = _smooth(values, max(3, len(values) // 25))
        style = {"marker": "o", "markersize": 4.5, "linestyle": "--" if key.startswith("eval") else "-"} if rare else {}
        drawn += axis.plot(steps, values, color=colour, linewidth=1.8, label=key, **style)
    return drawn


def _match(patterns: Sequence[str], keys: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(k for p in patterns for k in keys if fnmatch.fnmatchcase(k, p)))


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred moving mean over `width` points, over fewer at the ends."""
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")

"""What a set of episodes amounts to: the figures of the result tables and the paired comparison of two arms.

Shares are in [0, 1] here and per cent in the renderings. An infrastructure error is no answer: such tasks are left
out, counted, and named in the first line of every rendering. Symbols: n scenarios, B bootstrap resamples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from rich.table import Table

from sage_jax.agent.trajectory import Episode
from sage_jax.skills.usage import detector

METRICS = {  # name -> heading, whether it is a share
    "tgc": ("TGC %", True),
    "sgc": ("SGC %", True),
    "turns": ("turns", False),
    "tokens": ("generated tokens", False),
    "skill_use": ("skill use %", True),
    "solved_with_skill": ("solved with skill %", True),
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """Metrics of one arm on one group of tasks, averaged over its runs; NaN where nothing could be measured.

    tgc: tasks completed with every test passed. sgc: scenarios all of whose tasks are. turns, tokens: means a task (tokens that the policy generated).
    skill_use: tasks at position 2 and later, and first ones to which a skill was given, that used a skill of an earlier task or a
    given one; solved_with_skill: those solved too.
    """

    arm: str
    split: str  # "all" or a split
    difficulty: int | None  # None: all
    values: Mapping[str, float]
    spread: Mapping[str, float]  # standard deviation over runs (ddof 1), NaN for one run
    runs: int
    asked: int  # tasks asked for, over all runs
    scored: int
    errors: int  # infrastructure errors among the episodes; tasks never run are asked - scored - errors
    scenarios: int  # complete scenarios behind sgc, over all runs

    @property
    def complete(self) -> bool:
        return self.scored == self.asked

    @property
    def tgc(self) -> float:
        return self.values["tgc"]

    @property
    def sgc(self) -> float:
        return self.values["sgc"]

    @property
    def turns(self) -> float:
        return self.values["turns"]

    @property
    def tokens(self) -> float:
        return self.values["tokens"]

    @property
    def skill_use(self) -> float:
        return self.values["skill_use"]

    @property
    def solved_with_skill(self) -> float:
        return self.values["solved_with_skill"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of (second - first) over paired scenarios, with a percentile bootstrap interval."""

    metric: str
    mean: float
    low: float
    high: float
    scenarios: int  # pairs
    unpaired: int  # scenarios that only one arm measured
    level: float = 0.95


def score(
    runs: Sequence[Sequence[Episode]],
    arm: str = "",
    *,
    asked: int | None = None,
    split: str = "all",
    difficulty: int | None = None,
    tasks_per_scenario: int = 3,
    use: str = "called",
) -> Summary:
    """One table row.

    Args:
      runs: k sampled runs (or one greedy run) over the same tasks.
      asked: tasks that each run should have; the largest number of tasks in a run if None.
      split, difficulty: the group of tasks; a scenario has the difficulty of its hardest task.
      tasks_per_scenario: fewer scored tasks leave a scenario out of sgc.
      use: "called" or "lexical".
    Raises ValueError without runs, or for a task that a run holds twice.
    """
    if not runs:
        raise ValueError(f"no runs of {arm!r}")
    groups = [[e for e in run if split in ("all", e.split)] for run in runs]
    values = [_values(g, difficulty, tasks_per_scenario, use) for g in groups]
    counted = [[e for e in g if difficulty in (None, e.difficulty)] for g in groups]
    expected = max(len(g) for g in counted) if asked is None else asked
    table = {m: np.array([v[m] for v in values], float) for m in METRICS}
    return Summary(
        arm=arm,
        split=split,
        difficulty=difficulty,
        values={m: _mean(x) for m, x in table.items()},
        spread={m: float(np.std(x, ddof=1)) if len(x) > 1 else math.nan for m, x in table.items()},
        runs=len(runs),
        asked=expected * len(runs),
        scored=sum(e.valid for g in counted for e in g),
        errors=sum(not e.valid for g in counted for e in g),
        scenarios=sum(v["_scenarios"] for v in values),
    )


def breakdown(runs: Sequence[Sequence[Episode]], arm: str, split: str, *, asked: int, **options) -> list[Summary]:
    """A row over all episodes and, where they differ in difficulty, one row a level. `split` names what was measured: a split
    or a file of scenarios. Options as in `score`."""
    levels = sorted({e.difficulty for run in runs for e in run})
    rows = [score(runs, arm, asked=asked, **options)]
    rows += [score(runs, arm, difficulty=d, **options) for d in levels if len(levels) > 1]
    return [dataclasses.replace(row, split=split) for row in rows]


def by_scenario(
    runs: Sequence[Sequence[Episode]], metric: str, *, tasks_per_scenario: int = 3, use: str = "called"
) -> dict[str, float]:
    """One figure a scenario, the mean over the runs that measured it; scenarios without any are left out."""
    _check_metric(metric)
    found: dict[str, list[float]] = {}
    for run in runs:
        scenarios: dict[str, list[Episode]] = {}
        for episode in run:
            scenarios.setdefault(episode.scenario_id, []).append(episode)
        for name, episodes in scenarios.items():
            value = _values(episodes, None, tasks_per_scenario, use)[metric]
            if not math.isnan(value):
                found.setdefault(name, []).append(value)
    return {name: float(np.mean(v)) for name, v in sorted(found.items())}


def paired_difference(
    first: Sequence[Sequence[Episode]],
    second: Sequence[Sequence[Episode]],
    metric: str,
    *,
    seed: int,
    resamples: int = 10_000,
    level: float = 0.95,
    tasks_per_scenario: int = 3,
    use: str = "called",
) -> Difference:
    """Second minus first, paired by scenario, with a percentile interval over `resamples` resamplings of scenarios."""
    a = by_scenario(first, metric, tasks_per_scenario=tasks_per_scenario, use=use)
    b = by_scenario(second, metric, tasks_per_scenario=tasks_per_scenario, use=use)
    names = sorted(a.keys() & b.keys())
    unpaired = len(a.keys() ^ b.keys())
    if not names:
        return Difference(metric, math.nan, math.nan, math.nan, 0, unpaired, level)
    deltas = np.array([b[n] - a[n] for n in names])
    low, high = bootstrap_interval(deltas, seed=seed, resamples=resamples, level=level)
    return Difference(metric, float(deltas.mean()), low, high, len(names), unpaired, level)


def bootstrap_interval(
    values: np.ndarray, *, seed: int, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of the mean of `values` float [n]."""
    rng = np.random.default_rng(seed)
    n = len(values)
    means = []
    block = max(1, min(resamples, 4_000_000 // n))  # at most 32 MB of indices at once
    for start in range(0, resamples, block):
        index = rng.integers(0, n, (min(block, resamples - start), n))
        means.append(values[index].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def first_line(rows: Iterable[Summary]) -> str:
    """Says how many tasks are behind the rows, and names every row that rests on fewer tasks than asked."""
    rows = list(rows)
    short = [r for r in rows if not r.complete]
    if not short:
        return f"All tasks scored ({', '.join(f'{label(r)}: {r.scored}' for r in rows)})."
    parts = []
    for r in short:
        lost = r.asked - r.scored - r.errors
        why = [f"{r.errors} infrastructure errors"] * bool(r.errors) + [f"{lost} never run"] * (lost > 0)
        parts.append(f"{label(r)}: {r.scored} of {r.asked} tasks scored ({', '.join(why)})")
    return "INCOMPLETE. " + "; ".join(parts) + "."


def markdown(rows: Sequence[Summary], differences: Sequence[tuple[str, Difference]] = ()) -> str:
    """The table as Markdown; `differences` are (name, difference) lines below it."""
    head = ["", *(h for h, _ in METRICS.values()), "tasks"]
    lines = [first_line(rows), "", f"| {' | '.join(head)} |", "|" + "---|" + "---:|" * (len(head) - 1)]
    lines += [f"| {' | '.join([label(r).replace('|', '/'), *cells(r), tasks(r)])} |" for r in rows]
    if differences:
        lines += ["", *(f"- {name}: {difference_text(d)}" for name, d in differences)]
    return "\n".join(lines) + "\n"


def rich_table(rows: Sequence[Summary], title: str = "") -> Table:
    """The table for a terminal; the caption is `first_line`."""
    table = Table(title=title or None, caption=first_line(rows), caption_justify="left")
    table.add_column("")
    for heading, _ in METRICS.values():
        table.add_column(heading, justify="right")
    table.add_column("tasks", justify="right")
    for r in rows:
        table.add_row(label(r), *cells(r), tasks(r))
    return table


def cells(row: Summary) -> list[str]:
    """The figures of a row as text, in the order of METRICS; a dash where nothing was measured."""
    return [_cell(row.values[m], row.spread[m], share) for m, (_, share) in METRICS.items()]


def tasks(row: Summary) -> str:
    """How many tasks are behind a row, over all its runs."""
    return f"{row.scored}" if row.complete else f"{row.scored} of {row.asked}"


def label(row: Summary) -> str:
    """E.g. "SAGE · test_normal · difficulty 2"."""
    level = f"difficulty {row.difficulty}" if row.difficulty is not None else ""
    return " · ".join(p for p in (row.arm, row.split if row.split != "all" else "", level) if p) or "all"


def difference_text(d: Difference) -> str:
    """E.g. "SGC % +12.5 [+4.2, +20.8] (95 % interval, 48 scenarios)"."""
    heading, share = METRICS[d.metric]
    if not d.scenarios:
        return f"{heading}: no scenario in both"
    f = 100.0 if share else 1.0
    unpaired = f", {d.unpaired} in one arm only" if d.unpaired else ""
    interval = f"[{d.low * f:+.1f}, {d.high * f:+.1f}]"
    return f"{heading} {d.mean * f:+.1f} {interval} ({d.level * 100:g} % interval, {d.scenarios} scenarios{unpaired})"


def _values(episodes: Sequence[Episode], difficulty: int | None, per_scenario: int, use: str) -> dict[str, float]:
    """Metrics of one run; `_scenarios` is the number of complete scenarios."""
    seen = [e.task_id for e in episodes]
    if len(set(seen)) != len(seen):
        raise ValueError(f"a run holds a task more than once: {sorted({t for t in seen if seen.count(t) > 1})}")
    users = _users(episodes, use)
    scenarios: dict[str, list[Episode]] = {}
    hardest: dict[str, int] = {}
    for e in episodes:
        hardest[e.scenario_id] = max(hardest.get(e.scenario_id, 0), e.difficulty)
        if e.valid:
            scenarios.setdefault(e.scenario_id, []).append(e)
    complete = [
        all(e.s for e in group)
        for name, group in scenarios.items()
        if len(group) >= per_scenario and difficulty in (None, hardest[name])
    ]
    scored = [e for e in episodes if e.valid and difficulty in (None, e.difficulty)]
    later = [e for e in scored if e.position >= 2 or e.offered]
    return {
        "tgc": _mean([e.s for e in scored]),
        "sgc": _mean(complete),
        "turns": _mean([len(e.turns) for e in scored]),
        "tokens": _mean([e.generated for e in scored]),
        "skill_use": _mean([e.task_id in users for e in later]),
        "solved_with_skill": _mean([bool(e.s) and e.task_id in users for e in later]),
        "_scenarios": len(complete),
    }


def _users(episodes: Sequence[Episode], use: str) -> set[str]:
    """Task ids of episodes that used a skill of an earlier episode of their rollout, or called one that was given from outside."""
    detect: Callable = detector(use)
    rollouts: dict[str, list[Episode]] = {}
    for e in episodes:
        if e.valid:
            rollouts.setdefault(e.rollout, []).append(e)
    found = set()
    for group in rollouts.values():
        by_position = {e.position: e.task_id for e in group}
        found |= {by_position[u.user] for u in detect(group)}
        own = {s.id for e in group for s in e.kept}
        found |= {e.task_id for e in group if ({s.id for s in e.offered} - own) & set(e.called)}
    return found


def _mean(values) -> float:
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def _cell(value: float, spread: float, share: bool) -> str:
    if math.isnan(value):
        return "–"
    f = 100.0 if share else 1.0
    return f"{value * f:.1f}" + ("" if math.isnan(spread) else f" ± {spread * f:.1f}")


def _check_metric(metric: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"unknown metric {metric!r}; there are {list(METRICS)}")

"""What several runs amount to: arms taken together by name, greedy and sampled apart, differences paired by scenario."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sage_jax.agent.trajectory import Episode
from sage_jax.errors import ConfigError
from sage_jax.report.tables import METRICS, Summary, markdown, paired_difference, score
from sage_jax.training.arms import KINDS, kind_label, read_arm


def compare(arms: Sequence[str], baseline: str, splits: Sequence[str], metrics: Sequence[str]) -> str:
    """The table as Markdown, one block a split.

    Args:
      arms: "NAME=FOLDER" entries, FOLDER being workdir/eval/<arm>; equal names are taken together.
      baseline: the name that others are compared with; "" for the first.

    Raises:
      ConfigError: entries that are none, a folder without measurements, unknown names.
    """
    folders: dict[str, list[Path]] = {}
    for entry in arms:
        name, _, folder = entry.partition("=")
        if not name or not Path(folder).is_dir():
            raise ConfigError(f"--arm={entry!r} must be NAME=FOLDER with a folder such as runs/demo/eval/SAGE")
        folders.setdefault(name, []).append(Path(folder))
    if not folders:
        raise ConfigError("nothing to compare: give --arm=NAME=FOLDER at least once")
    baseline = baseline or next(iter(folders))
    if baseline not in folders:
        raise ConfigError(f"--baseline={baseline!r} is none of the arms {', '.join(folders)}")
    for metric in metrics:
        if metric not in METRICS:
            raise ConfigError(f"metric {metric!r} is unknown; valid: {', '.join(METRICS)}")
    blocks = []
    for split in splits:
        rows, differences = _split(folders, baseline, split, metrics)
        if rows:
            blocks.append(f"**{split}**\n\n{markdown(rows, differences)}")
    if not blocks:
        raise ConfigError(f"no arm has measured {' or '.join(splits)}")
    return "\n".join(blocks)


def _split(folders: dict[str, list[Path]], baseline: str, split: str, metrics: Sequence[str]):
    measured: dict[tuple[str, str], list[list[Episode]]] = {}
    rows: list[Summary] = []
    for name, places in folders.items():
        found = [read_arm(p / split) for p in places if (p / split / "arm.json").exists()]
        for kind in KINDS:
            of_kind = [(arm.asked, arm.kinds[kind]) for arm in found if kind in arm.kinds]
            if of_kind:
                runs = measured[name, kind] = [run for _, some in of_kind for run in some]
                asked = sum(tasks * len(some) for tasks, some in of_kind)  # the folders may have been asked for different tasks
                rows.append(dataclasses.replace(score(runs, kind_label(name, kind, runs)), asked=asked))
    differences = []
    for (name, kind), runs in measured.items():
        if name != baseline and (baseline, kind) in measured:
            for metric in metrics:
                differences.append((f"{name} - {baseline}, {kind}", paired_difference(measured[baseline, kind], runs, metric, seed=0)))
    return rows, differences

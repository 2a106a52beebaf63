"""What `python -m sage_jax.evaluate` does: measure one policy, print its table by split and difficulty.

With `config.eval.reuse=True` it measures what a working skill is worth instead: tasks 2 and 3 of every scenario without any
library, and with the reference function of task 1, and prints both with the paired difference.
"""

from __future__ import annotations

import json
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.entry import write_config
from sage_jax.report.progress import terminal
from sage_jax.report.tables import (
    breakdown,
    difference_text,
    first_line,
    paired_difference,
    rich_table,
    score,
)
from sage_jax.training import checks, setup
from sage_jax.training.arms import Arm, measure
from sage_jax.training.evaluation import outputs_name


def evaluate_command(config: ConfigDict, workdir: Path, *, split: str, policy: str) -> None:
    """Args: `split` and `policy` override the config's where they are not empty."""
    checks.check_episodes(config)
    checks.check_evaluation(config)
    write_config(config, workdir)
    split = split or config.eval.split
    root = setup.data_root(config)
    checks.check_splits(config, root, [split])
    loaded = None
    source = policy or config.model.source
    if source != "scripted":
        loaded = setup.load_policy(config, source=source)
        checks.check_prompts(config, root, split, loaded.tokenizer)
        print(setup.describe(config, loaded))
    name = Path(source).name if "/" in source else source
    with setup.Session(config, root, workdir if config.eval.keep_outputs else None) as session:
        if config.eval.reuse:
            rows = _reuse(config, workdir, root, loaded, name, split, session)
        else:
            rows = _plain(config, workdir, measure(config, workdir, root, loaded, name, split, session))
    value = [{"arm": r.arm, "split": r.split, "difficulty": r.difficulty, "runs": r.runs, **r.values} for r in rows]
    (workdir / "summary.json").write_text(json.dumps(value, indent=1) + "\n")


def _plain(config: ConfigDict, workdir: Path, arm: Arm) -> list:
    rows = breakdown(arm.runs, arm.name, arm.split, asked=arm.asked)
    print(first_line(rows[:1]))
    terminal().print(rich_table(rows))
    unfinished = sorted({e.task_id for run in arm.runs for e in run if e.judgement and e.judgement.success and not e.judgement.completed})
    if unfinished:
        print(f"{len(unfinished)} tasks pass every test without complete_task, so the engine's own report counts them and ours does not:")
        print("  " + " ".join(unfinished))
    if config.eval.keep_outputs:
        kept = outputs_name(f"{arm.name}/{arm.split}", 0 if config.eval.greedy else 1)
        print(f"The engine's own report: cd {workdir} && appworld evaluate {kept} {arm.split}")
    return rows


def _reuse(config: ConfigDict, workdir: Path, root, loaded, name: str, split: str, session: setup.Session) -> list:
    without, given = (_with_library(config, workdir, root, loaded, f"{name}-{kind}", split, kind, session) for kind in ("none", "reference"))
    without.runs[:] = [[e for e in run if e.position > 1] for run in without.runs]
    rows = [
        score(without.runs, "tasks 2 and 3 without a skill", asked=given.asked, tasks_per_scenario=2),
        score(given.runs, "tasks 2 and 3 with task 1's function", asked=given.asked, tasks_per_scenario=2),
    ]
    terminal().print(rich_table(rows, title=f"what a skill is worth on {split}"))
    d = paired_difference(without.runs, given.runs, "tgc", seed=0, tasks_per_scenario=2)
    print(f"with - without: {difference_text(d)}")
    return rows


def _with_library(config: ConfigDict, workdir: Path, root, loaded, name: str, split: str, library: str, session: setup.Session) -> Arm:
    c = config.copy_and_resolve_references()
    c.eval.library = library
    return measure(c, workdir, root, loaded, name, split, session)

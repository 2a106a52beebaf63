"""What `python -m sage_jax.evaluate` does: measure one policy, print its table by split and difficulty.

With `config.eval.reuse=True` it measures what a working skill is worth instead: tasks 2 and 3 of every scenario without any
library, and with the reference function of task 1, and prints both with the paired difference.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.entry import check_workdir, write_config
from sage_jax.report.episodes import write_text
from sage_jax.report.progress import terminal
from sage_jax.report.tables import breakdown, difference_text, first_line, rich_table, score
from sage_jax.training import checks, setup
from sage_jax.training.arms import Arm, measure, paired_by_kind
from sage_jax.training.evaluation import outputs_name
from sage_jax.world.roots import SPLITS


def evaluate_command(config: ConfigDict, workdir: Path, *, split: str, policy: str) -> None:
    """Args: `split` and `policy` override the config's where they are not empty."""
    split, source = split or config.eval.split, policy or config.model.source
    check_workdir(config, workdir)
    checks.check_evaluation(config)
    checks.check_split_names(config, [split])
    if source != "scripted":
        setup.check_policy(config, source=source)
    root = setup.data_root(config)
    checks.check_splits(root, [split])
    loaded = None
    if source == "scripted":
        setup.scripts(root, [])  # raises where there are none
    else:
        loaded = setup.load_policy(config, source=source)
        checks.check_prompts(config, root, split, loaded.tokenizer)
        print(setup.describe(config, loaded))
    name = Path(source).name if "/" in source else source
    with setup.Session(config, root, workdir if config.eval.keep_outputs else None) as session:
        write_config(config, workdir)
        if config.eval.reuse:
            rows = _reuse(config, workdir, root, loaded, name, split, session)
        else:
            rows = _plain(config, workdir, measure(config, workdir, root, loaded, name, split, session))
    finite = [{k: v if math.isfinite(v) else None for k, v in r.values.items()} for r in rows]  # null where nothing was measured
    value = [{"arm": r.arm, "split": r.split, "difficulty": r.difficulty, "runs": r.runs, **values} for r, values in zip(rows, finite)]
    write_text(workdir / "summary.json", json.dumps(value, indent=1, allow_nan=False) + "\n")


def _plain(config: ConfigDict, workdir: Path, arm: Arm) -> list:
    parts = [breakdown(runs, label, arm.split, asked=arm.asked) for label, runs in arm.rows()]
    rows = [row for part in parts for row in part]
    print(first_line([part[0] for part in parts]))
    terminal().print(rich_table(rows))
    unfinished = sorted({e.task_id for run in arm.runs for e in run if e.judgement and e.judgement.success and not e.s})
    if unfinished:
        print(
            f"{len(unfinished)} tasks pass every test without complete_task, or their code ended its own world: the engine's own report "
            f"counts them and ours does not:\n  {' '.join(unfinished)}"
        )
    if config.eval.keep_outputs and arm.split in SPLITS and not config.eval.scenarios and config.eval.library != "reference":
        kept = outputs_name(f"{arm.name}/{arm.split}", arm.indices[0])
        print(f"The engine's own report: cd {shlex.quote(str(workdir))} && APPWORLD_ROOT=. appworld evaluate {kept} {arm.split}")
    return rows


def _reuse(config: ConfigDict, workdir: Path, root, loaded, name: str, split: str, session: setup.Session) -> list:
    without, given = (_with_library(config, workdir, root, loaded, f"{name}-{kind}", split, kind, session) for kind in ("none", "reference"))
    later = [[e for e in run if e.position > 1] for run in without.runs]
    without = dataclasses.replace(without, name="without", runs=later, asked=given.asked)
    given = dataclasses.replace(given, name="with")
    rows = [
        score(runs, f"tasks 2 and 3 {label}", asked=arm.asked, tasks_per_scenario=2) for arm in (without, given) for label, runs in arm.rows()
    ]
    terminal().print(rich_table(rows, title=f"what the function of task 1 is worth on {split}"))
    for label, d in paired_by_kind(without, given, ("tgc",), tasks_per_scenario=2):
        print(f"{label}: {difference_text(d)}")
    return rows


def _with_library(config: ConfigDict, workdir: Path, root, loaded, name: str, split: str, library: str, session: setup.Session) -> Arm:
    c = config.copy_and_resolve_references()
    c.eval.library = library
    return measure(c, workdir, root, loaded, name, split, session)

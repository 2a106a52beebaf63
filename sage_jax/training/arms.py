"""Arms of an experiment: one policy evaluated on one split, its episodes kept on disk, so that nothing is measured twice.

Layout: workdir/eval/<arm>/<split>/run<i>.jsonl, and arm.json, which is written last and says that the arm is complete.
With `keep_outputs` the engine's own files lie in workdir/experiments/outputs/<arm>-<split>-run<i>/tasks/ID.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.agent.chain import Progress
from sage_jax.agent.prompts import rough_tokens
from sage_jax.agent.scripted import ScriptedPolicy
from sage_jax.agent.trajectory import Episode
from sage_jax.errors import ConfigError
from sage_jax.report.episodes import read_episodes, write_episodes
from sage_jax.report.progress import bar
from sage_jax.training import setup
from sage_jax.training.evaluation import Run, evaluate
from sage_jax.world.roots import DataRoot


@dataclasses.dataclass(frozen=True)
class Arm:
    """A measured arm: episodes of each run, and how many tasks each run was to have."""

    name: str
    split: str
    runs: list[list[Episode]]
    asked: int


def measure(
    config: ConfigDict, workdir: Path, root: DataRoot, loaded: setup.Loaded | None, name: str, split: str, session: setup.Session
) -> Arm:
    """Evaluates a policy (None: the scripted one) as `config.eval` says; an arm that is complete on disk is read instead."""
    e = config.eval
    label = Path(split).stem if split.endswith(".txt") else split
    folder = workdir / "eval" / name / label
    if (folder / "arm.json").exists():
        return read_arm(folder)
    if not e.greedy and not e.runs:
        raise ConfigError("eval.greedy=False and eval.runs=0: there is nothing to evaluate")
    started = time.monotonic()
    indices = ([0] if e.greedy else []) + list(range(1, e.runs + 1))
    groups = list(root.scenarios(split).items())[: e.scenarios or None]
    asked = sum(len(ids) - (e.library == "reference") for _, ids in groups)
    engine = setup.sampler(config, loaded) if loaded is not None else None
    try:
        runs = session.run(_run(config, root, loaded, engine, f"{name}/{label}", split, indices, asked, session.pool))
    finally:
        if engine is not None:
            engine.close()
    for index, episodes in zip(indices, runs):
        write_episodes(folder / f"run{index}.jsonl", episodes)
    about = {"arm": name, "split": label, "asked": asked, "runs": indices, "seconds": round(time.monotonic() - started, 1), "library": e.library}
    temporary = folder / "arm.json.tmp"
    temporary.write_text(json.dumps(about) + "\n")
    temporary.replace(folder / "arm.json")
    return Arm(name, label, runs, asked)


def read_arm(folder: Path) -> Arm:
    """An arm from its folder."""
    about = json.loads((folder / "arm.json").read_text())
    runs = [list(read_episodes(folder / f"run{i}.jsonl").episodes) for i in about["runs"]]
    return Arm(about["arm"], about["split"], runs, about["asked"])


async def _run(config, root, loaded, engine, name, split, indices, asked, pool) -> list[list[Episode]]:
    e = config.eval
    groups = list(root.scenarios(split).items())[: e.scenarios or None]
    facts = None
    if loaded is None:
        scripted = ScriptedPolicy(config.collect.modes.to_dict(), reuse=config.collect.reuse, seed=config.seed)
        facts = setup.scripts(root, [t for _, ids in groups for t in ids])
        policies = {i: scripted for i in indices}
    else:
        policies = {i: setup.jax_policy(config, engine, loaded, temperature=e.temperature if i else 0.0) for i in indices}
    count = rough_tokens if loaded is None else (lambda text: len(loaded.tokenizer.encode(text)))
    given = setup.reference_skills(root, split) if e.library == "reference" else None
    with bar(name, asked * len(indices)) as advance:

        def progress(p: Progress) -> None:
            advance(success=bool(p.episode.s))

        return await evaluate(
            root, split, [Run(i, policies[i]) for i in indices], pool, setup.episode_spec(config, keep_outputs=e.keep_outputs),
            seed=config.seed, name=name, library=e.library, given=given, scenarios=e.scenarios, facts=facts, count=count,
            on_progress=progress,
        )

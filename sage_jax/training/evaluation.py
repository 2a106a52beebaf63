"""The evaluation agent: the tasks of every scenario in order, with a library of that scenario alone.

One greedy run and k sampled ones, each with a seed of its own. Returns episodes; what they amount to is computed in
`report.tables`. An exception never completes a task: it is an infrastructure error of that episode, counted and shown.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence

from sage_jax.agent.chain import Progress, Rollout, experiment_name, run_chains
from sage_jax.agent.episode import EpisodeSpec, Worlds
from sage_jax.agent.policy import Policy
from sage_jax.agent.prompts import rough_tokens
from sage_jax.agent.trajectory import Episode
from sage_jax.errors import ConfigError
from sage_jax.skills.record import Skill
from sage_jax.world.roots import DataRoot

LIBRARIES = ("chain", "none", "reference")


@dataclasses.dataclass(frozen=True)
class Run:
    """One pass over a split: 0 is the greedy run by convention, seeds 1..k are sampled ones."""

    index: int
    policy: Policy


def outputs_name(name: str, run: int) -> str:
    """Folder of a run's engine outputs: "<arm>-run<i>_<split>" for the name "<arm>/<split>", in the letters that `appworld pack` takes."""
    arm, _, split = name.rpartition("/")
    return re.sub("[^a-z0-9_-]", "-", experiment_name(f"{arm or name}-run{run}" + (f"_{split}" if arm else "")).lower())


async def evaluate(
    root: DataRoot,
    split: str,
    runs: Sequence[Run],
    worlds: Worlds,
    spec: EpisodeSpec,
    *,
    seed: int,
    name: str,
    library: str = "chain",
    given: Mapping[str, Skill] | None = None,
    scenarios: int = 0,
    facts: Mapping[str, dict] | None = None,
    count: Callable[[str], int] = rough_tokens,
    done: Mapping[tuple[int, str], Sequence[Episode]] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_scenario: Callable[[int, Rollout], None] | None = None,
) -> list[list[Episode]]:
    """Episodes of every run, ordered by (scenario, task).

    Args:
      split: a split's name, or a text file of scenario ids.
      runs: what to run; all runs of all scenarios go side by side.
      library: "chain" offers functions of a scenario's earlier tasks; "none" never offers any; "reference" leaves a
        scenario's first task out and offers `given[scenario]` (a working skill) to the others. To compare with
        "reference", take positions 2 and 3 of "none".
      given: scenario id -> skill, for "reference".
      scenarios: only the first n of the split; 0 for all.
      done: (run index, scenario id) -> its episodes, measured before; they are returned and not run again.
      on_progress, on_scenario: called with every finished episode; with (run index, rollout) of every finished scenario.

    Raises:
      ConfigError: an unknown library kind, or "reference" without skills for every scenario.
    """
    if library not in LIBRARIES:
        raise ConfigError(f"eval.library {library!r} is unknown; valid: {', '.join(LIBRARIES)}")
    groups = list(root.scenarios(split).items())
    groups = groups[:scenarios] if scenarios else groups
    chains, skills = [], {}
    for index, (scenario, task_ids) in enumerate(groups):
        tasks = [root.task(t) for t in task_ids]
        if library == "reference":
            if not given or scenario not in given:
                raise ConfigError(f"eval.library='reference' needs a reference skill of scenario {scenario}; this root has none")
            tasks, skills[index] = tasks[1:], [given[scenario]]
        chains.append(tasks)
    done = done or {}
    finished = 0
    total = sum(len(c) for (scenario, _), c in zip(groups, chains) for run in runs if (run.index, scenario) not in done)

    def progress(p: Progress) -> None:
        nonlocal finished
        finished += 1
        if on_progress is not None:
            on_progress(Progress(finished, total, p.episode))

    jobs = [
        run_chains(
            chains, 1, run.policy, worlds, spec, seed=seed, path=(run.index,), name=f"{name}/run{run.index}",
            experiment=outputs_name(name, run.index), skills=skills,
            keep=library == "chain", facts=facts, count=count, on_progress=progress,
            skip={i for i, (scenario, _) in enumerate(groups) if (run.index, scenario) in done},
            on_rollout=functools.partial(on_scenario, run.index) if on_scenario is not None else None,
        )
        for run in runs
    ]
    results = []
    for run, rollouts in zip(runs, await asyncio.gather(*jobs)):
        by_chain = {r.chain: r.episodes for r in rollouts}
        results.append([e for i, (scenario, _) in enumerate(groups) for e in by_chain.get(i) or done[run.index, scenario]])
    return results

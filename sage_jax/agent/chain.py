"""Chains of episodes: the sequential rollout. A rollout goes through its tasks one after the other with a library of its own.

Rollouts run side by side and none waits for another; what comes back is ordered by (chain, rollout, position).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from sage_jax.agent.early_stop import EarlyStop
from sage_jax.agent.episode import EpisodeSpec, Worlds, run_episode
from sage_jax.agent.policy import Key, Policy
from sage_jax.agent.prompts import rough_tokens
from sage_jax.agent.trajectory import End, Episode
from sage_jax.skills.library import Library
from sage_jax.skills.record import Skill
from sage_jax.world.types import Task


@dataclasses.dataclass
class Rollout:
    """One pass through a chain.

    `episodes` holds one entry a position that was run; after an infrastructure error the later ones are missing and the
    rollout is no sample at any position (`valid` is False).
    """

    chain: int
    index: int
    tasks: tuple[str, ...]
    episodes: list[Episode]
    library: Library

    @property
    def valid(self) -> bool:
        return len(self.episodes) == len(self.tasks) and all(e.valid for e in self.episodes)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Counts for a progress line: called with every finished episode."""

    done: int
    total: int
    episode: Episode


async def run_rollout(
    tasks: Sequence[Task],
    policy: Policy,
    worlds: Worlds,
    spec: EpisodeSpec,
    *,
    key: Key,
    chain: int,
    index: int,
    name: str,
    experiment: str,
    skills: Sequence[Skill] = (),
    keep: bool = True,
    facts: Mapping[str, dict] | None = None,
    count: Callable[[str], int] = rough_tokens,
    early: Sequence[EarlyStop] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> Rollout:
    """Runs the tasks in order; functions of finished positions are offered to later ones.

    Args:
      key: (…, chain, rollout); the position is added here.
      name: of the rollout, e.g. "step3/chain1/rollout0".
      experiment: engine output folder; task ids of a rollout are distinct, so one folder serves them all.
      skills: library at the start (empty in SAGE; a given skill when measuring what reuse is worth).
      keep: False: functions of finished positions are not kept. The plain agent never keeps any.
      facts: task id -> what a scripted policy needs.
      early: one per position, or empty.
    """
    uses_library = spec.prompt.agent == "skill"
    library = Library()
    library.add(skills)
    episodes: list[Episode] = []
    for position, task in enumerate(tasks, start=1):
        episode = await run_episode(
            task, policy, worlds, spec, key=Key(key.seed, (*key.path, position)), rollout=name, position=position,
            experiment=experiment, skills=library.active() if uses_library else (), facts=(facts or {}).get(task.task_id),
            count=count, early=early[position - 1] if early else None,
        )
        episodes.append(episode)
        if on_episode is not None:
            on_episode(episode)
        if episode.end is End.INFRASTRUCTURE_ERROR:
            for later in early[position:]:
                later.ended(name, 0)
            break
        for skill_id in episode.called:
            library.record_use(skill_id, bool(episode.s))
        if uses_library and keep:
            library.add(episode.kept)  # a refused revision must not hide what it revises
    return Rollout(chain=chain, index=index, tasks=tuple(t.task_id for t in tasks), episodes=episodes, library=library)


async def run_chains(
    chains: Sequence[Sequence[Task]],
    group: int,
    policy: Policy,
    worlds: Worlds,
    spec: EpisodeSpec,
    *,
    seed: int,
    path: Sequence[int],
    name: str,
    skills: Mapping[int, Sequence[Skill]] | None = None,
    keep: bool = True,
    facts: Mapping[str, dict] | None = None,
    count: Callable[[str], int] = rough_tokens,
    early_stop: tuple[int, float] | None = None,
    experiment: str | None = None,
    skip: Collection[int] = (),
    on_progress: Callable[[Progress], None] | None = None,
    on_rollout: Callable[[Rollout], None] | None = None,
) -> list[Rollout]:
    """`group` rollouts of every chain, all at once. Returns them ordered by (chain, rollout).

    Args:
      path: first part of the noise's name, e.g. (step,). The rest is (chain, rollout, position, turn).
      skills: chain index -> library at the start.
      keep: False: libraries do not grow.
      early_stop: (turn, share) or None.
      experiment: engine output folder of all rollouts, for runs in which no task occurs twice; None gives each its own.
      skip: indices of chains that are not run; the others keep their noise.
      on_progress, on_rollout: called with every finished episode, and with every finished rollout.

    Raises:
      ValueError: one output folder for a task that occurs twice.
    """
    ids = [t.task_id for tasks in chains for t in tasks] * group
    if experiment is not None and len(set(ids)) != len(ids):
        raise ValueError(f"experiment {experiment!r}: a task occurs twice, so its outputs would overwrite each other")
    total = sum(len(c) for i, c in enumerate(chains) if i not in skip) * group
    done = 0

    def finished(episode: Episode) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(Progress(done, total, episode))

    longest = max((len(c) for c in chains), default=0)
    early = []
    if early_stop is not None:
        early = [EarlyStop(group * sum(len(c) > k for c in chains), *early_stop) for k in range(longest)]
    async def one(job: Coroutine[Any, Any, Rollout]) -> Rollout:
        rollout = await job
        if on_rollout is not None:
            on_rollout(rollout)
        return rollout

    jobs = [
        run_rollout(
            tasks, policy, worlds, spec, key=Key(seed, (*path, c, g)), chain=c, index=g, name=f"{name}/chain{c}/rollout{g}",
            experiment=experiment or experiment_name(f"{name}/chain{c}/rollout{g}"), skills=(skills or {}).get(c, ()), keep=keep, facts=facts, count=count,
            early=early, on_episode=finished,
        )
        for c, tasks in enumerate(chains)
        if c not in skip
        for g in range(group)
    ]
    # One failure must not leave its siblings running behind the caller's back.
    try:
        async with asyncio.TaskGroup() as group_of_tasks:
            running = [group_of_tasks.create_task(one(job)) for job in jobs]
    except BaseExceptionGroup as failures:
        raise _first(failures) from failures
    return [task.result() for task in running]


def _first(failures: BaseExceptionGroup) -> BaseException:
    """The first single exception of a group: what stopped the others."""
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def experiment_name(rollout: str) -> str:
    """A folder name for a rollout's engine outputs: readable, short, without separators."""
    flat = rollout.replace("/", "-")
    return flat if len(flat) <= 80 else f"{flat[:60]}-{hashlib.sha256(flat.encode()).hexdigest()[:12]}"

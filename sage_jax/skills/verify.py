"""The `defines` check: a skill is shown only after a world has defined it.

The skills room sees a world as a `Runner` alone. Nothing model-written runs in this process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from sage_jax.skills.record import Skill
from sage_jax.world.types import InstallVerdict


class Runner(Protocol):
    """What can try to define skills and say of each whether it worked."""

    async def install(self, skills: Sequence[Skill]) -> list[InstallVerdict]: ...


@dataclasses.dataclass(frozen=True)
class Verification:
    """`skills` are all that were given, in order, with `verified` set; `refused` are the verdicts that said no."""

    skills: tuple[Skill, ...]
    refused: tuple[InstallVerdict, ...]

    @property
    def passed(self) -> tuple[Skill, ...]:
        return tuple(s for s in self.skills if s.verified)


async def defines(skills: Sequence[Skill], runner: Runner) -> Verification:
    """Tries to define each skill in the runner.

    Raises ValueError if the runner does not answer with exactly one verdict a skill; whatever the runner itself raises
    (an infrastructure error) passes through, since a crash says nothing about a skill.
    """
    if not skills:
        return Verification((), ())
    verdicts = await runner.install(skills)
    by_id = {v.skill_id: v for v in verdicts}
    if len(verdicts) != len(skills) or set(by_id) != {s.id for s in skills}:
        raise ValueError(f"asked about {[s.id for s in skills]}, got verdicts on {[v.skill_id for v in verdicts]}")
    checked = tuple(dataclasses.replace(s, verified=by_id[s.id].ok) for s in skills)
    return Verification(checked, tuple(v for v in verdicts if not v.ok))

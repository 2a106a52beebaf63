"""Which episode of a rollout used a skill that an earlier one put into the library: u(j, i) of the reward.

Two detectors. `called`: an installed skill of that id was entered from a step and returned (the world says so in the
turn's `skill_calls`). `lexical`, the published reference's rule, for comparison: in some executed step the name occurs
as a substring and `def name` does not. A name that was written again belongs to its reviser: the parent is not paid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from sage_jax.skills.record import Skill


class TurnLike(Protocol):
    code: str | None
    skill_calls: tuple[str, ...]


class EpisodeLike(Protocol):
    """The part of an episode that the detectors read."""

    position: int
    turns: Sequence[TurnLike]
    defined: Sequence[Skill]  # what the episode put into the library, and what the check refused (verified False)


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """Episode `user` used skill `skill_id`, which episode `origin` put into the library. Positions are 1-based."""

    user: int
    origin: int
    skill_id: str


def called(episodes: Sequence[EpisodeLike]) -> list[Use]:
    """Uses by call, over the episodes of one rollout; sorted, one entry a pair and skill."""
    uses = set()
    for j, owner, _ in _before(episodes):
        uses |= {Use(j.position, owner[c], c) for turn in j.turns for c in turn.skill_calls if c in owner}
    return sorted(uses)


def lexical(episodes: Sequence[EpisodeLike]) -> list[Use]:
    """Uses by name, over the episodes of one rollout; sorted, one entry a pair and skill."""
    uses = set()
    for j, owner, current in _before(episodes):
        codes = [t.code for t in j.turns if t.code is not None]
        for name, skill_id in current.items():
            if any(name in code and f"def {name}" not in code for code in codes):
                uses.add(Use(j.position, owner[skill_id], skill_id))
    return sorted(uses)


DETECTORS: dict[str, Callable[[Sequence[EpisodeLike]], list[Use]]] = {"called": called, "lexical": lexical}


def detector(name: str) -> Callable[[Sequence[EpisodeLike]], list[Use]]:
    """Raises ValueError naming the detectors."""
    if name not in DETECTORS:
        raise ValueError(f"unknown skill use detector {name!r}; there are {sorted(DETECTORS)}")
    return DETECTORS[name]


def matrix(episodes: Sequence[EpisodeLike], uses: Sequence[Use]) -> list[list[bool]]:
    """u[j][i] for 0-based places in `episodes` ordered by position: whether episode j used a skill of episode i."""
    place = {p: n for n, p in enumerate(sorted(e.position for e in episodes))}
    u = [[False] * len(place) for _ in place]
    for use in uses:
        u[place[use.user]][place[use.origin]] = True
    return u


def _before(episodes: Sequence[EpisodeLike]):
    """Yields (episode, {id: position of its owner}, {name: id of its present version}) as they stood before it ran.

    The same text written again changes nothing; a body that replaces the present version belongs to who wrote it; one that
    the check refused replaces nothing.
    """
    ordered = sorted(episodes, key=lambda e: e.position)
    positions = [e.position for e in ordered]
    if len(set(positions)) != len(positions):
        raise ValueError(f"episodes of one rollout have different positions, got {positions}")
    owner: dict[str, int] = {}
    current: dict[str, str] = {}
    for episode in ordered:
        yield episode, owner, current
        for skill in episode.defined:
            if skill.verified is not False and current.get(skill.name) != skill.id:
                current[skill.name] = skill.id
                owner[skill.id] = episode.position

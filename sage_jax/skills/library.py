"""The skill library of one rollout: which skills there are, which of them are offered, how often they helped.

In memory; skills one by one have a lossless JSON form. An id names one body for ever; a name has at most one offered version. Not here:
what makes a function a skill (`extract`), how skills are shown (`render`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from sage_jax.skills.record import Origin, Skill


@dataclasses.dataclass(frozen=True)
class AddReport:
    """What `Library.add` did, as the records that the library now holds.

    `added` are new entries, revisions included; `revisions` are those of them that supersede an earlier body of the
    same name; `duplicates` were known already and made no entry; `restored` are known bodies that had been superseded
    and were written again, so that they are offered again.
    """

    added: tuple[Skill, ...] = ()
    duplicates: tuple[Skill, ...] = ()
    revisions: tuple[Skill, ...] = ()
    restored: tuple[Skill, ...] = ()


class Library:
    """Skills by id, in the order in which they were added."""

    def __init__(self, skills: Iterable[Skill] = ()):
        self._skills: dict[str, Skill] = {}
        self._current: dict[str, str] = {}  # name -> id of the version that may be offered
        self.add(skills)

    def __len__(self) -> int:
        return len(self._skills)

    def __iter__(self) -> Iterator[Skill]:
        return iter(self._skills.values())

    def __contains__(self, skill_id: str) -> bool:
        return skill_id in self._skills

    def __getitem__(self, skill_id: str) -> Skill:
        """Also superseded skills. Raises KeyError naming the id."""
        if skill_id not in self._skills:
            raise KeyError(f"no skill {skill_id!r} among {len(self._skills)}; ids are name@digest")
        return self._skills[skill_id]

    def add(self, skills: Iterable[Skill]) -> AddReport:
        """Adds in the given order. A known body makes no entry; a new body of a known name becomes its next version."""
        added, duplicates, revisions, restored = [], [], [], []
        for skill in skills:
            current = self._current.get(skill.name)
            if skill.id in self._skills:
                if current != skill.id:
                    self._current[skill.name] = skill.id
                    restored.append(self._skills[skill.id])
                duplicates.append(self._skills[skill.id])
                continue
            if current is not None:
                version = 1 + max(s.version for s in self._skills.values() if s.name == skill.name)
                skill = dataclasses.replace(skill, version=version, parents=(current,))
                revisions.append(skill)
            self._skills[skill.id] = skill
            self._current[skill.name] = skill.id
            added.append(skill)
        return AddReport(tuple(added), tuple(duplicates), tuple(revisions), tuple(restored))

    def active(self) -> list[Skill]:
        """Skills that may be offered, oldest entry first: not superseded, not withdrawn, not refused by the check."""
        return [
            s
            for s in self._skills.values()
            if self._current[s.name] == s.id and not s.withdrawn and s.verified is not False
        ]

    def record_use(self, skill_id: str, success: bool) -> Skill:
        """Counts one episode that called the skill, and whether that episode succeeded."""
        skill = self[skill_id]
        self._skills[skill_id] = dataclasses.replace(skill, uses=skill.uses + 1, successes=skill.successes + bool(success))
        return self._skills[skill_id]


def skill_to_json(skill: Skill) -> dict:
    """All fields as JSON values."""
    return dataclasses.asdict(skill)


def skill_from_json(value: dict) -> Skill:
    """The inverse of `skill_to_json`, also after a trip through JSON text. Unknown fields raise TypeError."""
    fields = dict(value)
    fields["origin"] = Origin(**fields["origin"])
    for name in ("imports", "constants", "helpers", "parents"):
        fields[name] = tuple(fields[name])
    return Skill(**fields)

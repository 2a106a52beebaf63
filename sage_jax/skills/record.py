"""A skill is a record, not only a string. Executable text is rendered from it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a skill was written."""

    task_id: str
    turn: int
    rollout: str  # e.g. "step12/chain3/rollout1", or "collect/..."
    position: int  # 1-based place in the chain


@dataclasses.dataclass(frozen=True)
class Skill:
    """One reusable top-level function with all that it needs to be defined in an empty namespace.

    `source` is the exact slice of the response (decorators included, comments kept). `imports`, `constants` and
    `helpers` are exact slices too, in an order in which they can be executed before `source`.
    """

    id: str  # stable: name + digest of the normalised tree, e.g. "top_song@1f3a9c2b"
    name: str
    source: str
    imports: tuple[str, ...]
    constants: tuple[str, ...]
    helpers: tuple[str, ...]
    signature: str  # "top_song(playlist: str) -> str"
    docstring: str
    origin: Origin
    version: int = 1
    parents: tuple[str, ...] = ()  # ids of earlier skills of the same name that this one revises
    verified: bool | None = None  # result of the `defines` check; None before it
    uses: int = 0
    successes: int = 0
    created: float = 0.0  # seconds since the epoch
    withdrawn: bool = False

    @property
    def code(self) -> str:
        """Executable text: imports, constants, helpers, the function."""
        return "\n".join([*self.imports, *self.constants, *self.helpers, self.source])

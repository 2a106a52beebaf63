"""The values that cross the border of the room `world`. Plain data: no engine object, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """The person whom the agent works for, as the task states it."""

    first_name: str
    last_name: str
    email: str
    phone_number: str


@dataclasses.dataclass(frozen=True)
class Task:
    """What may be known of a task outside the judge: nothing here comes from its ground truth but the difficulty."""

    task_id: str  # <7 hex digits>_<1|2|3>
    scenario_id: str  # the part before "_"
    split: str
    instruction: str
    supervisor: Supervisor
    app_descriptions: dict[str, str]  # allowed apps, name -> one line
    difficulty: int  # 1, 2, 3; 0 where the root does not say


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one `execute` gave."""

    text: str  # the observation as the engine worded it, cut by the worker's output limit only
    failed: bool  # the engine refused the code, it raised, or it hit a limit; a flag, never read from the text
    completed: bool  # complete_task has been accepted in this world
    skill_calls: tuple[str, ...]  # ids of installed skills that were entered in this step and returned, in order
    dropped: int  # characters of output that the worker did not keep
    seconds: float  # measured by the parent's clock
    limit: str | None = None  # the limit that was hit: "time", "memory", "exit", ...
    world_lost: bool = False  # the code ended its own worker: no further step is possible


@dataclasses.dataclass(frozen=True)
class InstallVerdict:
    """Whether a skill was defined in the world and may be shown."""

    skill_id: str
    ok: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The evaluator's report on one finished world."""

    passed: int
    total: int
    success: bool  # every test passed and at least one ran; says nothing about completion
    completed: bool
    passes: tuple[str, ...]  # requirement texts
    failures: tuple[str, ...]


class World(Protocol):
    """One open AppWorld world. Every method is a coroutine with its own time limit."""

    task_id: str

    async def install(self, skills: Sequence) -> list[InstallVerdict]: ...

    async def execute(self, code: str) -> StepResult: ...

    async def completed(self) -> bool: ...

    async def evaluate(self) -> Judgement: ...

    async def fork(self) -> World: ...

    async def record_lm_calls(self, calls: Sequence[dict]) -> None: ...

    async def close(self) -> None: ...

"""A world whose calls go elsewhere: the methods of `types.World` as named calls with plain values. Shared by `remote` and `ray_pool`."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Self

from sage_jax.world.types import InstallVerdict, Judgement, StepResult


class CalledWorld(abc.ABC):
    """One open world (`World` of `types`); each method as in `pool.PoolWorld`. One call at a time."""

    def __init__(self, task_id: str):
        self.task_id = task_id
        self._closed = False

    @abc.abstractmethod
    async def _send(self, operation: str, arguments: dict[str, Any]) -> Any:
        """The value of a call; raises what it raised there."""

    @abc.abstractmethod
    def _copied(self, name: str) -> Self:
        """The world that a fork made under this name."""

    async def _call(self, operation: str, **arguments: Any) -> Any:
        if self._closed:
            raise RuntimeError(f"the world of task {self.task_id} is closed")
        return await self._send(operation, arguments)

    async def install(self, skills: Sequence) -> list[InstallVerdict]:
        texts = [{"id": s.id, "name": s.name, "code": s.code} for s in skills]
        return [InstallVerdict(**v) for v in await self._call("install", skills=texts)] if texts else []

    async def execute(self, code: str) -> StepResult:
        """`seconds` are those of the other side."""
        value = await self._call("execute", code=code)
        return StepResult(**{**value, "skill_calls": tuple(value["skill_calls"])})

    async def completed(self) -> bool:
        return bool(await self._call("completed"))

    async def evaluate(self) -> Judgement:
        value = await self._call("evaluate")
        return Judgement(**{**value, "passes": tuple(value["passes"]), "failures": tuple(value["failures"])})

    async def fork(self) -> Self:
        return self._copied(await self._call("fork"))

    async def record_lm_calls(self, calls: Sequence[dict]) -> None:
        await self._call("record_lm_calls", calls=list(calls))

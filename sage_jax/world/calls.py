"""Worlds whose calls go elsewhere: the methods of `types.World` as named calls with plain values, from both sides.

`CalledWorld` makes the calls (`remote`, `ray_pool`), `OpenWorlds` answers them (`service`, the actor of `ray_pool`).
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from sage_jax import errors
from sage_jax.errors import ConfigError, InfrastructureError, SageError, WorkerDied
from sage_jax.world.roots import DataRoot, tasks_digest
from sage_jax.world.types import InstallVerdict, Judgement, StepResult

if TYPE_CHECKING:
    from sage_jax.world.pool import PoolWorld, WorldPool

OPERATIONS = ("open", "execute", "install", "completed", "evaluate", "fork", "record_lm_calls", "close")


def about(pool: WorldPool, root: DataRoot) -> dict[str, Any]:
    """What a caller elsewhere must know of a pool before it opens worlds: {max_open, tasks, layers} as plain values."""
    layers = {name: [layer.on, layer.reason] for name, layer in pool.layers.items()}
    return {"max_open": pool.max_open, "tasks": tasks_digest(root), "layers": layers}


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


@dataclasses.dataclass(frozen=True)
class _Skill:
    id: str
    name: str
    code: str


class OpenWorlds:
    """The worlds that one caller has opened in `pool`, by name."""

    def __init__(self, pool: WorldPool):
        self._pool = pool
        self._worlds: dict[str, PoolWorld] = {}

    def __len__(self) -> int:
        return len(self._worlds)

    async def answer(self, operation: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """{"value": ...} or {"error": [type, message]}: `value_of` turns it back. Never raises."""
        try:
            return {"value": await self._do(operation, name, arguments)}
        except asyncio.CancelledError:
            return {"error": ["WorkerDied", "the server was stopped"]}
        except SageError as error:
            return {"error": [type(error).__name__, str(error)]}
        except Exception as error:  # a fault of ours must reach the caller as one, and never as an agent's doing
            return {"error": ["InfrastructureError", f"{type(error).__name__}: {error}"]}

    async def _do(self, operation: str, name: str, arguments: dict[str, Any]) -> Any:
        if operation not in OPERATIONS:
            raise ConfigError(f"operation {operation!r} is unknown; there are {', '.join(OPERATIONS)}")
        if operation == "open":
            return self._keep(await self._pool.open(str(arguments["task_id"]), experiment=str(arguments["experiment"]), keep=bool(arguments["keep"])))
        world = self._worlds.get(name)
        if world is None:
            if operation == "close":
                return None  # closed before, or with its lease
            raise WorkerDied(f"world {name} is not here: it was closed, its lease ran out, or the server was started anew")
        if operation == "close":
            del self._worlds[name]
            return await world.close()
        if operation == "fork":
            return self._keep(await world.fork())
        if operation == "install":
            verdicts = await world.install([_Skill(**{k: str(s[k]) for k in ("id", "name", "code")}) for s in arguments["skills"]])
            return [dataclasses.asdict(v) for v in verdicts]
        if operation == "execute":
            return dataclasses.asdict(await world.execute(str(arguments["code"])))
        if operation == "record_lm_calls":
            return await world.record_lm_calls([dict(call) for call in arguments["calls"]])
        if operation == "evaluate":
            return dataclasses.asdict(await world.evaluate())
        return await world.completed()

    def _keep(self, world: PoolWorld) -> str:
        name = uuid.uuid4().hex
        self._worlds[name] = world
        return name

    async def close(self) -> None:
        """Closes all of them."""
        worlds, self._worlds = list(self._worlds.values()), {}
        await asyncio.gather(*(world.close() for world in worlds))


def value_of(answer: dict[str, Any]) -> Any:
    """The value, or raises the error that the answer carries."""
    if "error" in answer:
        name, message = answer["error"]
        kind = getattr(errors, name, None)
        raise (kind if isinstance(kind, type) and issubclass(kind, SageError) else InfrastructureError)(message)
    return answer["value"]

"""Worlds on the machines of a Ray cluster that already runs: the interface of `pool.WorldPool`, one pool a node.

    pip install -e ".[ray]"     --config.world.remote=ray://HEAD:10001, or "ray" for the cluster that this process belongs to

Each node gets an actor that owns a `WorldPool` over the data root at the same path there (for a mini world: built on that node). A world is opened
where most places are free. An actor that is lost is started anew by Ray; its worlds raise WorkerDied, so that their episodes
run again. Only plain values cross.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from sage_jax.errors import ConfigError, InfrastructureError, SageError, WorkerDied, WorldOpenError
from sage_jax.world.calls import CalledWorld, OpenWorlds, about, value_of
from sage_jax.world.isolation import Layer
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.roots import open_root, tasks_digest

_DOWN_S = 30.0


def _import_ray():
    try:
        import ray
    except ImportError as error:
        raise ConfigError('world.remote names a Ray cluster, and Ray is not installed: pip install -e ".[ray]"') from error
    return ray


class _Host:
    """The actor of one node: a pool that starts with the first call."""

    def __init__(self, root: str, limits: dict[str, Any], outputs: str | None, max_open: int, allow_unisolated: bool):
        self._made = {"limits": Limits(**limits), "outputs": Path(outputs) if outputs else None, "max_open": max_open, "allow_unisolated": allow_unisolated}
        self._root = Path(root)
        self._pool: WorldPool | None = None
        self._worlds: OpenWorlds | None = None
        self._starting = asyncio.Lock()

    async def do(self, operation: str, world: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """As `OpenWorlds.answer`, with two more operations: "about" and "stop"."""
        try:
            async with self._starting:
                if self._pool is None:
                    pool = WorldPool(self._root, **self._made)
                    await pool.start()
                    self._pool, self._worlds = pool, OpenWorlds(pool)
            if operation == "stop":
                pool, self._pool = self._pool, None
                return {"value": await pool.close()}
            if operation == "about":
                return {"value": about(self._pool, open_root(self._root))}
        except SageError as error:
            return {"error": [type(error).__name__, str(error)]}
        return await self._worlds.answer(operation, world, arguments)


class RayPool:
    """See the module's text.

    Args:
      address: of the cluster, as `ray.init` takes it; "auto" for the one that this process belongs to.
      root, limits, outputs, max_open, allow_unisolated: as for `WorldPool`, of each node.
    """

    def __init__(self, address: str, root: Path, *, limits: Limits, outputs: Path | None, max_open: int, allow_unisolated: bool = False):
        self._ray, self._address = _import_ray(), address
        self._made = (str(root), dataclasses.asdict(limits), str(outputs) if outputs else None, max_open, allow_unisolated)
        self._hosts: list[Any] = []
        self._open: list[int] = []
        self._places: list[int] = []
        self._down: dict[int, float] = {}  # node -> until when nothing is opened there
        self._discarding: set[asyncio.Task] = set()
        self._free = asyncio.Condition()
        self._worlds: set[RayWorld] = set()
        self._patience_s = limits.start_s
        self.layers: dict[str, Layer] = {}

    async def __aenter__(self) -> RayPool:
        await self.start()
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def start(self) -> None:
        """Connects and starts an actor on every node.

        Raises:
          ConfigError, WorldOpenError: no cluster there, a pool that cannot start, or a node with other tasks.
        """
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        ray = self._ray
        if not ray.is_initialized():
            try:
                ray.init(address=self._address, logging_level="ERROR", log_to_driver=False)
            except (ConnectionError, RuntimeError) as error:
                raise ConfigError(f"no Ray cluster at {self._address!r}: {error}") from error
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4096)(_Host)
        for node in sorted(n["NodeID"] for n in ray.nodes() if n["Alive"]):
            self._hosts.append(remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*self._made))
        abouts = await asyncio.gather(*(self._call(n, "about", "") for n in range(len(self._hosts))))
        tasks = tasks_digest(open_root(self._made[0]))
        if other := [n for n, a in enumerate(abouts) if a["tasks"] != tasks]:
            raise ConfigError(f"nodes {other} of the Ray cluster hold another data root at {self._made[0]}; use the same root, seed and size there")
        self._places = [int(a["max_open"]) for a in abouts]
        self._open = [0] * len(self._hosts)
        self.max_open = sum(self._places)
        # A layer is on if it is on everywhere.
        for name, (on, reason) in abouts[0]["layers"].items():
            off = [a["layers"][name][1] for a in abouts if not a["layers"][name][0]]
            self.layers[name] = Layer(on and not off, off[0] if off else reason)

    async def close(self) -> None:
        """Closes every world and ends the actors. Harmless when done twice."""
        await asyncio.gather(*(w.close() for w in list(self._worlds)), *self._discarding)
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(host.do.remote("stop", "", {}), 30)
            self._ray.kill(host)

    async def open(self, task_id: str, *, experiment: str, keep: bool) -> RayWorld:
        """As `WorldPool.open`; kept outputs lie on the node that had the world."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            host = await self._take()
            opening = asyncio.ensure_future(self._call(host, "open", "", task_id=task_id, experiment=experiment, keep=keep))
            try:
                name = await asyncio.shield(opening)
                break
            except asyncio.CancelledError:
                task = asyncio.create_task(self._discard(host, opening))
                self._discarding.add(task)
                task.add_done_callback(self._discarding.discard)
                raise
            except WorkerDied as error:
                self._down[host] = asyncio.get_running_loop().time() + _DOWN_S  # Ray starts its actor anew; meanwhile others are asked
                await self._release(host)
                if asyncio.get_running_loop().time() > deadline:
                    raise WorldOpenError(f"node {host} of the Ray cluster: {error}") from error
                await asyncio.sleep(0.5)
            except BaseException:
                await self._release(host)
                raise
        self._down.pop(host, None)
        world = RayWorld(self, host, name, task_id, copy=False)
        self._worlds.add(world)
        return world

    async def _take(self) -> int:
        """A place on the node where most are free; one that was down a moment ago only where there is no other."""
        now = asyncio.get_running_loop().time()
        async with self._free:
            await self._free.wait_for(lambda: any(o < p for o, p in zip(self._open, self._places)))
            free = [n for n in range(len(self._places)) if self._open[n] < self._places[n]]
            host = max(free, key=lambda n: (self._down.get(n, 0.0) < now, self._places[n] - self._open[n], -n))
            self._open[host] += 1
        return host

    async def _discard(self, host: int, opening: asyncio.Future) -> None:
        """Closes a world that nobody waits for any more, as soon as it is open."""
        with contextlib.suppress(SageError):
            await self._call(host, "close", await opening)
        await self._release(host)

    async def _release(self, host: int) -> None:
        async with self._free:
            self._open[host] -= 1
            self._free.notify_all()

    async def _call(self, host: int, operation: str, world: str, **arguments: Any) -> Any:
        running = self._hosts[host].do.remote(operation, world, arguments)
        try:
            reply = await running
        except asyncio.CancelledError:
            self._ray.cancel(running)
            raise
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(f"node {host} of the Ray cluster: {type(error).__name__}: {str(error)[:300]}") from error
        return value_of(reply)


class RayWorld(CalledWorld):
    """One world on a node."""

    def __init__(self, pool: RayPool, host: int, name: str, task_id: str, *, copy: bool):
        super().__init__(task_id)
        self._pool, self._host, self._name, self._copy = pool, host, name, copy

    async def _send(self, operation: str, arguments: dict[str, Any]) -> Any:
        return await self._pool._call(self._host, operation, self._name, **arguments)

    def _copied(self, name: str) -> RayWorld:
        copy = RayWorld(self._pool, self._host, name, self.task_id, copy=True)
        self._pool._worlds.add(copy)
        return copy

    async def close(self) -> None:
        """As `PoolWorld.close`; harmless when the node is gone."""
        if self._closed:
            return
        self._closed = True
        self._pool._worlds.discard(self)
        try:
            await self._pool._call(self._host, "close", self._name)
        except InfrastructureError:
            pass  # gone with its actor
        finally:
            if not self._copy:
                await self._pool._release(self._host)

"""The executor pool: AppWorld worlds in processes of their own, opened and driven from the trainer's event loop.

    async with WorldPool(root, limits=Limits(), outputs=None, max_open=8) as pool:
        world = await pool.open("4ec8de5_1", experiment="demo", keep=False)
        step = await world.execute("print(apis.supervisor.show_profile())")
        judgement = await world.evaluate()
        await world.close()

Whose fault: what the agent's code does to its own process inside `execute` (exit, signal, memory, time) is a failed
step, and `world_lost` where no further step is possible. Everything else that goes wrong raises an
InfrastructureError, and the pool stays usable: a lost fork server is replaced at the next opening.

The agent's code runs in a process of its own beside the one that holds the world (`worker`, `shell`), behind the layers of
`isolation`; `pool.layers` says which are on. Without the file-system layer a pool does not start unless told so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from sage_jax.errors import ConfigError, JudgeError, WorkerDied, WorkerTimeout, WorldOpenError
from sage_jax.world import protocol
from sage_jax.world.admission import available_mb, cores, worlds_that_fit
from sage_jax.world.isolation import SWITCHABLE, Layer, refuse_unisolated
from sage_jax.world.outputs import Outputs, Place
from sage_jax.world.server import Child, ChildDied, ChildTimeout, Copy, ForkServer
from sage_jax.world.types import InstallVerdict, Judgement, StepResult
from sage_jax.world.watch import describe_status

_MEMORY_PATIENCE = 10  # times `open_s` that an opening waits for memory


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one world may take. Seconds are real time, measured in the trainer."""

    start_s: float = 600.0  # warming a fork server
    open_s: float = 60.0
    execute_s: float = 60.0  # after this the code is interrupted; the step failed, the world lives on
    grace_s: float = 5.0  # after this much more it is killed, and the world is lost
    install_s: float = 20.0  # each skill
    evaluate_s: float = 120.0
    close_s: float = 10.0
    memory_mb: int = 1024  # MiB of memory of the code and all its processes, on top of what the warm server had
    disk_mb: int = 64  # MiB of files in the world's own folder
    processes: int = 16  # of the code, itself included
    requests: int = 10_000  # API calls of one step, however made; the engine's own limit is lower and friendlier
    output_chars: int = 100_000  # of one step; head and tail are kept
    open_retries: int = 3
    judge_retries: int = 1
    free_mb: int = 1024  # a world is opened only while this much memory of the machine is available, or when none is open
    recycle: int = 20_000  # worlds and evaluations after which a fork server gives way to a new one, in the background


class WorldPool:
    """See the module's text.

    Args:
      root: the folder that holds `data/`.
      limits: see Limits.
      outputs: folder for the worlds opened with `keep=True`; None: a temporary one, removed at close.
      max_open: worlds open at once; further openings wait in order. 0: 16 a core, as far as memory holds them.
      max_copies: copies (`PoolWorld.fork`) open at once; 0: as many as worlds.
      allow_unisolated: start also where the file-system layer cannot be had: the code can then read the ground truth.
      layers_off: layers of isolation to do without (tests).
    """

    def __init__(
        self, root: Path, *, limits: Limits, outputs: Path | None, max_open: int, max_copies: int = 0, allow_unisolated: bool = False,
        layers_off: Sequence[str] = (),
    ):
        if max_open < 0:
            raise ConfigError(f"max_open={max_open} must not be negative; 0 chooses by cores and memory")
        if unknown := set(layers_off) - set(SWITCHABLE):
            raise ConfigError(f"layers_off: {', '.join(sorted(unknown))} cannot be switched off; {', '.join(SWITCHABLE)} can")
        max_open = max_open or worlds_that_fit()
        self.limits = limits
        self.max_open = max_open
        self._root, self._kept = Path(root), outputs
        self._allow_unisolated, self._layers_off = allow_unisolated, tuple(layers_off)
        self._outputs: Outputs | None = None
        self._server: ForkServer | None = None
        self._retired: list[ForkServer] = []
        self._worlds: set[PoolWorld] = set()
        self._slots = asyncio.Semaphore(max_open)
        self._copy_slots = asyncio.Semaphore(max_copies or max_open)
        self._judges = asyncio.Semaphore(max(1, min(max_open, cores())))
        self._restarting = asyncio.Lock()
        self._admission = asyncio.Lock()
        self._closed = False
        self.server_starts = 0  # more than one: a fork server was lost

    async def __aenter__(self) -> WorldPool:
        await self.start()
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    @property
    def outputs(self) -> Path:
        """The folder that holds what is kept: an engine root."""
        return self._outputs.kept

    @property
    def server_pid(self) -> int:
        """Process of the fork server."""
        return self._server.pid

    @property
    def layers(self) -> dict[str, Layer]:
        """Layers of isolation by name: whether each is on, and why not."""
        return dict(self._server.layers)

    async def start(self) -> None:
        """Starts the fork server.

        Raises:
          DataRootError, ConfigError: the folders are not usable, or the file-system layer is missing.
          WorldOpenError: the server does not come up.
        """
        if self._outputs is not None:
            raise RuntimeError("the pool was started before")
        self._outputs = Outputs(self._root, self._kept)
        try:
            await self._live_server()
            refuse_unisolated(self.layers, "this machine", self._allow_unisolated)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends every world and the server, removes temporary files. Harmless when done twice."""
        self._closed = True
        await asyncio.gather(*(world.close() for world in list(self._worlds)))
        async with self._restarting:  # whoever is starting one is waited for, and nobody starts another
            servers, self._server, self._retired = [*self._retired, self._server], None, []
        for server in servers:
            if server is not None:
                await server.close(self.limits.close_s)
        if self._outputs is not None:
            await asyncio.to_thread(self._outputs.remove)

    async def open(self, task_id: str, *, experiment: str, keep: bool) -> PoolWorld:
        """Opens a world; waits while `max_open` are open.

        Args:
          keep: leave the engine's files in `outputs/experiments/outputs/<experiment>/tasks/<task_id>`; with False,
            `experiment` is not used and nothing is left.

        Raises:
          ConfigError: unknown task, or the kept folder is in use.
          WorldOpenError: it failed `open_retries` times more than once.
        """
        if self._outputs is None:
            raise RuntimeError("the pool is not started: await pool.start(), or use 'async with'")
        await self._slots.acquire()
        try:
            await self._memory()
            if self._closed:
                raise RuntimeError("the pool is closed")
            place = self._outputs.take(task_id, experiment, keep)
            try:
                child = await self._open_child(place)
            except BaseException:
                await asyncio.to_thread(self._outputs.give_back, place)
                raise
        except BaseException:
            self._slots.release()
            raise
        world = PoolWorld(self, place, child)
        self._worlds.add(world)
        return world

    async def _memory(self) -> None:
        async with self._admission:  # in order, and each sees what the one before it took
            deadline = time.monotonic() + _MEMORY_PATIENCE * self.limits.open_s
            while self._worlds and not self._closed and (free := available_mb()) < self.limits.free_mb:
                if time.monotonic() > deadline:
                    raise WorldOpenError(
                        f"only {free} MiB of memory were available for {_MEMORY_PATIENCE * self.limits.open_s:g} s, and a world is opened with "
                        f"{self.limits.free_mb} MiB; {len(self._worlds)} are open: lower max_open or give the machine more memory"
                    )
                await asyncio.sleep(0.1)

    async def _open_child(self, place: Place) -> Child:
        limits = self.limits
        spec = {
            **dataclasses.asdict(place), "folder": str(place.agent_folder), "output_chars": limits.output_chars, "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20, "processes": limits.processes, "max_requests": limits.requests,
        }
        frame_bytes = 12 * limits.output_chars + (1 << 20)  # an escape of JSON takes up to 12 bytes
        reason = ""
        for _ in range(limits.open_retries + 1):
            child = None
            try:
                server = await self._live_server()
                child = await server.spawn("world", spec, limits.memory_mb << 20, frame_bytes)
                reply = await child.call(None, limits.open_s)
                if "error" not in reply:
                    return child
                reason = reply["error"]
            except (ChildDied, ChildTimeout, protocol.FrameError, WorldOpenError) as error:
                reason = str(error)
            except BaseException:
                if child is not None:
                    await child.end(limits.close_s)
                raise
            if child is not None:
                await child.end(limits.close_s)
        raise WorldOpenError(f"task {place.task_id} could not be opened in {limits.open_retries + 1} tries; the last: {reason}")

    async def _live_server(self) -> ForkServer:
        async with self._restarting:
            if self._closed:
                raise RuntimeError("the pool is closed")
            for old in [s for s in self._retired if s.idle]:
                self._retired.remove(old)
                await old.close(self.limits.close_s)
            worn = self._server is not None and not self._server.lost and self._server.spawned >= self.limits.recycle
            if worn:
                self._retired.append(self._server)
            if self._server is None or self._server.lost or worn:
                if self._server is not None and not worn:
                    await self._server.close(self.limits.close_s)
                self._server = ForkServer(self._outputs, self._layers_off)
                self.server_starts += 1
                await self._server.start(self.limits.start_s)
            return self._server

    async def _judge(self, place: Place) -> Judgement:
        limits = self.limits
        reason = ""
        for _ in range(limits.judge_retries + 1):
            async with self._judges:
                try:
                    server = await self._live_server()
                    child = await server.spawn("judge", dataclasses.asdict(place), limits.memory_mb << 20, 1 << 26)
                except WorldOpenError as error:
                    reason = str(error)
                    continue
                try:
                    reply = await child.call(None, limits.evaluate_s)
                except (ChildDied, ChildTimeout, protocol.FrameError) as error:
                    reason = str(error)
                    continue
                finally:
                    await child.end(limits.close_s)
            if "error" not in reply:
                return Judgement(**{**reply, "passes": tuple(reply["passes"]), "failures": tuple(reply["failures"])})
            reason = reply["error"]
        raise JudgeError(f"task {place.task_id} could not be scored: {reason}")

    async def _release(self, world: PoolWorld) -> None:
        self._worlds.discard(world)
        await asyncio.to_thread(self._outputs.give_back, world.place)
        (self._copy_slots if world.place.copy else self._slots).release()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


class PoolWorld:
    """One open world (`World` of `types`). One call at a time."""

    def __init__(self, pool: WorldPool, place: Place, child: Child | Copy, original: PoolWorld | None = None):
        self.task_id = place.task_id
        self.place = place
        self._pool, self._child, self._original = pool, child, original
        self._copies: set[PoolWorld] = set()
        self._lost = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process of the world."""
        return self._child.pid

    async def install(self, skills: Sequence) -> list[InstallVerdict]:
        """Defines skills in the world's namespace, in order; each has `.id`, `.name` and `.code`.

        Raises:
          WorkerDied, WorkerTimeout
        """
        limits = self._pool.limits
        seconds = limits.install_s
        texts = [{"id": skill.id, "name": skill.name, "code": skill.code} for skill in skills]
        if not texts:
            return []
        whole = seconds * len(texts) + 2 * limits.grace_s
        reply = await self._call("install", whole, skills=texts, seconds=seconds, grace=limits.grace_s)
        if "ended" in reply:
            self._lost = True
            raise WorkerDied(f"install in the world of task {self.task_id}: {reply['ended']}")
        return [InstallVerdict(skill.id, not reason, reason) for skill, reason in zip(skills, reply["reasons"])]

    async def execute(self, code: str) -> StepResult:
        """Runs one block of code. A step that ends the world is a result, not an exception.

        `skill_calls` names each skill once, in the order of their first return.

        Raises:
          WorkerDied: the world was gone before, or the fork server was lost with it.
        """
        limits = self._pool.limits
        start = time.perf_counter()
        reply = await self._call("execute", limits.execute_s + 2 * limits.grace_s, code=code, seconds=limits.execute_s, grace=limits.grace_s)
        self._lost = bool(reply["lost"])
        if reply["outside"]:
            raise WorkerDied(f"world of task {self.task_id}: {reply['outside']}")
        if self.place.keep:
            await self._call("save", limits.evaluate_s)
        return StepResult(
            text=reply["text"],
            failed=reply["failed"],
            completed=reply["completed"],
            skill_calls=tuple(reply["skill_calls"]),
            dropped=reply["dropped"],
            seconds=time.perf_counter() - start,
            limit=reply["limit"],
            world_lost=self._lost,
        )

    async def completed(self) -> bool:
        """Whether complete_task has been accepted."""
        return (await self._call("completed", self._pool.limits.evaluate_s))["completed"]

    async def evaluate(self) -> Judgement:
        """Saves the state and has it scored in another process. A world whose code has ended itself is scored as it was left.

        Raises:
          WorkerDied, WorkerTimeout, JudgeError
        """
        await self._call("save", self._pool.limits.evaluate_s)
        return await self._pool._judge(self.place)

    async def fork(self) -> PoolWorld:
        """A copy of the world as it is now, copy-on-write: to try things without consequence.

        What is done in the copy changes neither this world nor what is scored of it, and the other way round. It has the
        variables, the skills and the files of this one; threads that the code has started are not in it. Outputs are not kept.
        A copy is closed like any world; the processes of this world stay until its copies are closed. At most
        `max_copies` are open in a pool; further ones wait.

        Raises:
          WorkerDied, WorkerTimeout: this world is lost.
          WorldOpenError: it could not be copied, and lives on.
        """
        self._check_open("execute")
        pool = self._pool
        await pool._copy_slots.acquire()
        ours, theirs = socket.socketpair()
        copy: Copy | None = None
        place = pool._outputs.take_copy(self.place)
        try:
            spec = {"experiment": place.experiment, "folder": str(place.agent_folder), "keep": False}
            with theirs:
                reply = await self._call("fork", pool.limits.open_s, _descriptor=theirs.fileno(), spec=spec, grace=pool.limits.grace_s)
            if "ended" in reply:
                self._lost = True
                raise WorkerDied(f"fork of the world of task {self.task_id}: {reply['ended']}")
            if "refused" in reply:
                raise WorldOpenError(f"fork of the world of task {self.task_id}: {reply['refused']}")
            copy = Copy(reply["pid"], self._child.frame_bytes)
            await copy.connect(ours)
            started = await copy.call(None, pool.limits.open_s)
            if "error" in started:
                raise WorldOpenError(f"fork of the world of task {self.task_id}: {started['error']}")
        except BaseException as error:
            if copy is not None:
                await copy.end(pool.limits.close_s)
            ours.close()
            pool._copy_slots.release()
            await asyncio.to_thread(pool._outputs.give_back, place)
            if isinstance(error, ChildDied | ChildTimeout):  # of the copy alone
                raise WorldOpenError(f"fork of the world of task {self.task_id}: {error}") from error
            raise
        world = PoolWorld(pool, place, copy, self)
        self._copies.add(world)
        pool._worlds.add(world)
        return world

    async def record_lm_calls(self, calls: Sequence[dict]) -> None:
        """Writes the calls of the language model beside the engine's own logs, one JSON object a line; nothing without `keep`."""
        if self.place.keep:
            text = "".join(json.dumps(call) + "\n" for call in calls)
            await asyncio.to_thread(_write, self.place.folder / "logs" / "lm_calls.jsonl", text)

    async def close(self) -> None:
        """Ends the processes and frees the place; while copies are open, they stay. Harmless when done twice."""
        if self._closed:
            return
        self._closed = True
        await self._end()

    async def _end(self) -> None:
        if self._copies or not self._closed:
            return  # the last copy does it
        try:
            await self._child.end(self._pool.limits.close_s)
        finally:
            await self._pool._release(self)
            original = self._original
            if original is not None and self in original._copies:
                original._copies.remove(self)
                await original._end()

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise RuntimeError(f"the world of task {self.task_id} is closed")
        if self._lost and operation in ("execute", "install"):
            raise WorkerDied(f"the world of task {self.task_id} was lost in an earlier step")
        if self._child.ended.done():
            raise WorkerDied(f"world of task {self.task_id}: {describe_status(self._child.ended.result())}")

    async def _call(self, operation: str, limit_s: float, /, _descriptor: int | None = None, **arguments) -> dict:
        self._check_open(operation)
        try:
            return await self._child.call({"op": operation, **arguments}, limit_s, _descriptor)
        except ChildTimeout as error:
            self._lost = True
            self._child.kill()
            raise WorkerTimeout(f"{operation} in the world of task {self.task_id}: {error}") from error
        except ChildDied as error:
            self._lost = True
            raise WorkerDied(f"{operation} in the world of task {self.task_id}: {error}") from error
        except protocol.FrameError as error:
            self._lost = True
            self._child.kill()
            raise WorkerDied(f"{operation} in the world of task {self.task_id}: {error}") from error

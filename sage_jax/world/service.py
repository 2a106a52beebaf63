"""A pool behind HTTP: what `python -m sage_jax.world.serve` runs, and `remote.RemotePool` talks to.

One address, POST /call, takes {client, seq, done, op, world, args}. A call is named by (client, seq): posting it again, after a lost
connection or to go on waiting, never runs it again but gives its result, or {"pending": true} after some seconds. So the client may
repeat every request, and nothing runs twice. `done` is the lowest number that the client still waits for; results below it are forgotten.
Worlds belong to a client; when it has not been heard of for `lease_s` they are closed. Every answer names the server's
`boot`: after a restart the worlds of before are gone, and calls to them say so.

A reply is {"value": ...} or {"error": [type, message]} with a type of `errors`. Requests without the token get 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import time
import uuid
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sage_jax.errors import ConfigError, SageError, WorkerDied
from sage_jax.world.pool import PoolWorld, WorldPool
from sage_jax.world.roots import DataRoot

POLL_S = 20.0  # how long an answer may take before it says "pending"
OPERATIONS = ("execute", "install", "completed", "evaluate", "fork", "record_lm_calls", "close")


@dataclasses.dataclass
class _Client:
    seen: float
    calls: dict[int, asyncio.Task] = dataclasses.field(default_factory=dict)
    worlds: dict[str, PoolWorld] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Skill:
    id: str
    name: str
    code: str


class Service:
    """The application `app`, over a pool that it starts and closes.

    Args:
      own: False for a pool that somebody else starts and closes, in the same loop.
      token: what a client must send as `Authorization: Bearer <token>`.
      lease_s: seconds after which a silent client's worlds are closed.
    """

    def __init__(self, pool: WorldPool, root: DataRoot, token: str, lease_s: float, *, own: bool = True):
        if not token:
            raise ConfigError("an empty token would let everybody run code here; give one")
        self._pool, self._root, self._token, self.lease_s = pool, root, token, lease_s
        self._own = own
        self.boot = uuid.uuid4().hex
        self._clients: dict[str, _Client] = {}
        self._number = 0
        routes = [Route("/about", self._about), Route("/call", self._call, methods=["POST"]), Route("/ping", self._ping, methods=["POST"])]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette):
        if self._own:
            await self._pool.start()
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            for client in self._clients.values():
                for call in client.calls.values():
                    call.cancel()
                await asyncio.gather(*(world.close() for world in client.worlds.values()))
            if self._own:
                await self._pool.close()

    def _refused(self, request: Request) -> JSONResponse | None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        return JSONResponse({"error": ["ConfigError", "wrong or missing token"]}, status_code=401)

    async def _about(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        layers = {name: [layer.on, layer.reason] for name, layer in self._pool.layers.items()}
        return JSONResponse({"boot": self.boot, "tasks": tasks_digest(self._root), "kind": self._root.kind, "layers": layers, "lease_s": self.lease_s, "max_open": self._pool.max_open})

    async def _ping(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        self._client(str((await request.json())["client"]))
        return JSONResponse({"boot": self.boot})

    def _client(self, name: str) -> _Client:
        client = self._clients.setdefault(name, _Client(seen=0.0))
        client.seen = time.monotonic()
        return client

    async def _call(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        try:
            body = await request.json()
            client, seq, done = self._client(str(body["client"])), int(body["seq"]), int(body["done"])
            operation, world, arguments = str(body["op"]), str(body.get("world") or ""), dict(body.get("args") or {})
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": ["ConfigError", f"not a call: {type(error).__name__}: {error}"]}, status_code=400)
        for old in [n for n in client.calls if n < done]:
            if client.calls[old].done():
                del client.calls[old]
        call = client.calls.get(seq)
        if call is None:
            call = client.calls[seq] = asyncio.create_task(self._run(client, operation, world, arguments))
        await asyncio.wait({call}, timeout=POLL_S)
        client.seen = time.monotonic()
        if not call.done():
            return JSONResponse({"boot": self.boot, "pending": True})
        return JSONResponse({"boot": self.boot, **call.result()})

    async def _run(self, client: _Client, operation: str, world: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": await self._do(client, operation, world, arguments)}
        except asyncio.CancelledError:
            return {"error": ["WorkerDied", "the server was stopped"]}
        except SageError as error:
            return {"error": [type(error).__name__, str(error)]}
        except Exception as error:  # a fault of ours must reach the client as one, and never as an agent's doing
            return {"error": ["InfrastructureError", f"{type(error).__name__}: {error}"]}

    async def _do(self, client: _Client, operation: str, name: str, arguments: dict[str, Any]) -> Any:
        if operation == "open":
            world = await self._pool.open(str(arguments["task_id"]), experiment=str(arguments["experiment"]), keep=bool(arguments["keep"]))
            return self._keep(client, world)
        if operation not in OPERATIONS:
            raise ConfigError(f"operation {operation!r} is unknown; there are open, {', '.join(OPERATIONS)}")
        world = client.worlds.get(name)
        if world is None:
            if operation == "close":
                return None  # closed before, or with its lease
            raise WorkerDied(f"world {name} is not here: it was closed, its lease ran out, or the server was started anew")
        if operation == "close":
            del client.worlds[name]
            await world.close()
            return None
        if operation == "fork":
            return self._keep(client, await world.fork())
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

    def _keep(self, client: _Client, world: PoolWorld) -> str:
        self._number += 1
        name = f"{self.boot[:8]}-{self._number}"
        client.worlds[name] = world
        return name

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for name, client in list(self._clients.items()):
                if time.monotonic() - client.seen > self.lease_s:
                    del self._clients[name]
                    for call in client.calls.values():
                        call.cancel()
                    for world in client.worlds.values():
                        await world.close()


def tasks_digest(root: DataRoot) -> str:
    """Names the tasks of a root, to tell whether two machines mean the same ones."""
    text = repr([(split, root.task_ids(split)) for split in root.splits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

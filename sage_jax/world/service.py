"""A pool behind HTTP: what `python -m sage_jax.world.serve` runs, and `remote.RemotePool` talks to.

One address, POST /call, takes {client, seq, done, op, world, args}. A call is named by (client, seq): posting it again, after a lost
connection or to go on waiting, never runs it again but gives its result, or {"pending": true} after some seconds. So the client may
repeat every request, and nothing runs twice. `done` is the lowest number that the client still waits for; results below it are forgotten.
Worlds belong to a client; when it has not been heard of for `lease_s` they are closed. Every answer names the server's
`boot`: after a restart the worlds of before are gone, and calls to them say so. POST /cancel {client, seq} ends a call that nobody waits
for any more, and closes the world that it opened.

A reply is {"value": ...} or {"error": [type, message]} with a type of `errors`. Requests without the token get 401.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import time
import uuid

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from sage_jax.errors import ConfigError
from sage_jax.world.calls import OpenWorlds, about
from sage_jax.world.pool import WorldPool
from sage_jax.world.roots import DataRoot

POLL_S = 20.0  # how long an answer may take before it says "pending"


@dataclasses.dataclass
class _Client:
    seen: float
    worlds: OpenWorlds
    done: int = 0  # calls with lower numbers are over: one that arrives now is a late duplicate
    calls: dict[int, asyncio.Task] = dataclasses.field(default_factory=dict)

    async def close(self) -> None:
        for call in self.calls.values():
            call.cancel()
        await self.worlds.close()


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
        routes = [Route("/about", self._about), Route("/call", self._call, methods=["POST"]), Route("/ping", self._ping, methods=["POST"])]
        routes.append(Route("/cancel", self._cancel, methods=["POST"]))
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
                await client.close()
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
        return JSONResponse({"boot": self.boot, "kind": self._root.kind, "lease_s": self.lease_s, **about(self._pool, self._root)})

    async def _ping(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        self._client(str((await request.json())["client"]))
        return JSONResponse({"boot": self.boot})

    def _client(self, name: str) -> _Client:
        client = self._clients.setdefault(name, _Client(seen=0.0, worlds=OpenWorlds(self._pool)))
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
        client.done = max(client.done, done)
        for old in [n for n in client.calls if n < client.done]:
            if client.calls[old].done():
                del client.calls[old]
        call = client.calls.get(seq)
        if call is None:
            over = seq < client.done
            call = asyncio.create_task(_over(seq) if over else client.worlds.answer(operation, world, arguments))
            if not over:
                client.calls[seq] = call
        await asyncio.wait({call}, timeout=POLL_S)
        client.seen = time.monotonic()
        if not call.done():
            return JSONResponse({"boot": self.boot, "pending": True})
        return JSONResponse({"boot": self.boot, **(await _over(seq) if call.cancelled() else call.result())})

    async def _cancel(self, request: Request) -> JSONResponse:
        if refused := self._refused(request):
            return refused
        try:
            body = await request.json()
            client, seq, operation = self._client(str(body["client"])), int(body["seq"]), str(body["op"])
        except (KeyError, TypeError, ValueError) as error:
            return JSONResponse({"error": ["ConfigError", f"not a call: {type(error).__name__}: {error}"]}, status_code=400)
        call = client.calls.get(seq)
        if call is None:  # it was lost on its way, or comes later
            client.calls[seq] = asyncio.create_task(_over(seq))
            return JSONResponse({"boot": self.boot})
        call.cancel()
        await asyncio.wait({call})
        if operation in ("open", "fork") and not call.cancelled() and "value" in call.result():
            await client.worlds.answer("close", call.result()["value"], {})
        return JSONResponse({"boot": self.boot})

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.lease_s / 4))
            for name, client in list(self._clients.items()):
                if time.monotonic() - client.seen > self.lease_s:
                    del self._clients[name]
                    await client.close()


async def _over(seq: int) -> dict:
    return {"error": ["InfrastructureError", f"call {seq} is over: nobody waits for it"]}

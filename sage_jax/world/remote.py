"""A pool that lives elsewhere: the interface of `pool.WorldPool` over HTTP (see `service` for the protocol).

Every request is repeated until it is answered, for `patience_s`; because the server knows each by its number, nothing runs twice. After
that, or when the server was restarted, the call raises an infrastructure error and the episode is run again: none is lost
silently and none is scored wrongly. Opening waits for a restarted server, since nothing of it has been done.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import uuid
from typing import Any

import httpx

from sage_jax.errors import ConfigError, InfrastructureError, WorkerDied, WorldOpenError
from sage_jax.world.calls import CalledWorld, value_of
from sage_jax.world.isolation import Layer, refuse_unisolated
from sage_jax.world.roots import DataRoot, tasks_digest
from sage_jax.world.service import POLL_S

_PAUSE_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # between tries


class RemotePool:
    """A pool served by `python -m sage_jax.world.serve`.

    Args:
      url: e.g. "http://10.0.0.5:8600"; https with a certificate of your own needs `verify`.
      token: the server's.
      root: this machine's root; the server's must hold the same tasks.
      allow_unisolated: use also a server whose machine has no file-system layer: the code can then read the ground truth there.
      patience_s: how long an unreachable server is waited for.
      verify: a file with certificates to trust, or True.
    """

    def __init__(self, url: str, token: str, *, root: DataRoot | None, allow_unisolated: bool = False, patience_s: float = 120.0, verify: str | bool = True):
        if not token:
            raise ConfigError("world.remote needs the server's token: put it into the environment variable SAGE_WORLDS_TOKEN")
        self._url, self._token, self._root, self._patience_s, self._verify = url.rstrip("/"), token, root, patience_s, verify
        self._allow_unisolated = allow_unisolated
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._waiting: set[int] = set()
        self._cancelled: dict[int, str] = {}  # number -> operation of calls that were cancelled here, and not yet there
        self._cancelling: set[asyncio.Task] = set()
        self._worlds: set[RemoteWorld] = set()
        self._http: httpx.AsyncClient | None = None
        self._pinging: asyncio.Task | None = None
        self.layers: dict[str, Layer] = {}

    async def __aenter__(self) -> RemotePool:
        await self.start()
        return self

    async def __aexit__(self, *error) -> None:
        await self.close()

    async def start(self) -> None:
        """Connects.

        Raises:
          ConfigError: wrong token, a server with other tasks, or one without the file-system layer.
          WorldOpenError: nobody answers.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=self._url, headers={"Authorization": f"Bearer {self._token}"}, timeout=httpx.Timeout(POLL_S + 20.0, connect=10.0), limits=limits, verify=self._verify,
        )  # fmt: skip
        deadline = time.monotonic() + self._patience_s
        try:
            about = await self._request("GET", "/about", None, deadline)
            if self._root is not None and about["tasks"] != tasks_digest(self._root):
                raise ConfigError(f"{self._url} serves another data root ({about['kind']}, tasks {about['tasks']}); use the same root, seed and size there")
            self.layers = {name: Layer(*value) for name, value in about["layers"].items()}
            refuse_unisolated(self.layers, f"the machine of {self._url}", self._allow_unisolated)
        except BaseException:
            await self._http.aclose()
            raise
        self.max_open = int(about["max_open"])
        self._pinging = asyncio.create_task(self._ping(about["lease_s"] / 4))

    async def close(self) -> None:
        """Closes every world and the connection. Harmless when done twice."""
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
        if self._http is not None:
            self._patience_s = min(self._patience_s, 5.0)
            await asyncio.gather(*(world.close() for world in list(self._worlds)), self._tell_cancelled())
            await self._http.aclose()
            self._http = None

    async def open(self, task_id: str, *, experiment: str, keep: bool) -> RemoteWorld:
        """As `WorldPool.open`; kept outputs lie on the server's machine."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                name = await self._call("open", "", task_id=task_id, experiment=experiment, keep=keep)
                break
            except _Restarted:
                if time.monotonic() > deadline:
                    raise WorldOpenError(f"{self._url} is started anew again and again") from None
        world = RemoteWorld(self, name, task_id)
        self._worlds.add(world)
        return world

    async def _ping(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self._http.post("/ping", json={"client": self._client})
            except httpx.HTTPError:
                continue  # calls notice by themselves, and wait

    async def _call(self, operation: str, world: str, **arguments: Any) -> Any:
        number = next(self._numbers)
        self._waiting.add(number)
        deadline = time.monotonic() + self._patience_s
        boot = None
        try:
            while True:
                body = {"client": self._client, "seq": number, "done": min(self._waiting), "op": operation, "world": world, "args": arguments}
                reply = await self._request("POST", "/call", body, deadline)
                deadline = time.monotonic() + self._patience_s  # it answers: patience is for silence
                if boot is not None and reply["boot"] != boot:
                    raise _Restarted(f"{self._url} was started anew while {operation} ran")
                boot = reply["boot"]
                if not reply.get("pending"):
                    break
        except asyncio.CancelledError:
            self._cancelled[number] = operation
            task = asyncio.create_task(self._tell_cancelled())
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)
            raise
        except BaseException:
            self._waiting.discard(number)
            raise
        self._waiting.discard(number)
        return value_of(reply)

    async def _tell_cancelled(self) -> None:
        """Has the server end what was cancelled here. One try, and one more at close; if both fail, the lease ends it."""
        for number, operation in list(self._cancelled.items()):
            with contextlib.suppress(httpx.HTTPError):
                response = await self._http.post("/cancel", json={"client": self._client, "seq": number, "op": operation})
                if response.status_code == 200:
                    self._cancelled.pop(number, None)
                    self._waiting.discard(number)

    async def _request(self, method: str, path: str, body: dict | None, deadline: float) -> dict[str, Any]:
        for pause in itertools.chain(_PAUSE_S, itertools.repeat(_PAUSE_S[-1])):
            try:
                response = await self._http.request(method, path, json=body)
                value = response.json()
            except (httpx.HTTPError, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    return value
                if response.status_code == 401:
                    raise ConfigError(f"{self._url} refuses the token; put the server's into SAGE_WORLDS_TOKEN")
                if response.status_code == 400:
                    raise InfrastructureError(f"{self._url}: {response.text[:500]}")
                problem = f"status {response.status_code}"
            if time.monotonic() + pause > deadline:
                raise WorkerDied(f"{self._url} did not answer for {self._patience_s:g} s ({problem})")
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


class _Restarted(WorkerDied):
    """The server that ran the call is no more."""


class RemoteWorld(CalledWorld):
    """One world on the server."""

    def __init__(self, pool: RemotePool, name: str, task_id: str):
        super().__init__(task_id)
        self._pool, self._name = pool, name

    async def _send(self, operation: str, arguments: dict[str, Any]) -> Any:
        return await self._pool._call(operation, self._name, **arguments)

    def _copied(self, name: str) -> RemoteWorld:
        copy = RemoteWorld(self._pool, name, self.task_id)
        self._pool._worlds.add(copy)
        return copy

    async def close(self) -> None:
        """Closes it; a server that cannot be reached closes it by itself when the lease runs out."""
        if self._closed:
            return
        self._closed = True
        self._pool._worlds.discard(self)
        try:
            await self._pool._call("close", self._name)
        except InfrastructureError:
            return

"""A pool behind HTTP gives what a local one gives, over lost connections, restarts and vanished clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket

import httpx
import pytest
import uvicorn
from contract import LIMITS, running, transcript

from sage_jax.errors import ConfigError, WorkerDied
from sage_jax.world import service as service_module
from sage_jax.world.isolation import Layer
from sage_jax.world.pool import WorldPool
from sage_jax.world.remote import RemotePool
from sage_jax.world.roots import DataRoot
from sage_jax.world.serve import token_of
from sage_jax.world.service import Service

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module", autouse=True)
def shared(mini_root):
    with running(mini_root, LIMITS) as _SHARED[:]:
        yield


_SHARED: list = []


@contextlib.asynccontextmanager
async def serving(root, port=0, lease_s=30.0, **options):
    """(url, service) of a server in this loop."""
    service = Service(_SHARED[1], root, TOKEN, lease_s, own=False)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(service.app, log_level="error", timeout_graceful_shutdown=1, **options))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        assert not running.done(), "the server did not come up"
        await asyncio.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", service
    finally:
        server.should_exit = True
        await running
        listening.close()


class Flaky(httpx.AsyncHTTPTransport):
    """Loses every second request on its way there, or its answer on the way back."""

    def __init__(self):
        super().__init__()
        self.draw, self.lost = random.Random(0), 0

    async def handle_async_request(self, request):
        fate = self.draw.random()
        if fate < 0.25:
            self.lost += 1
            raise httpx.ConnectError("lost on the way there")
        response = await super().handle_async_request(request)
        if fate < 0.5:
            await response.aread()
            self.lost += 1
            raise httpx.ReadError("lost on the way back")
        return response


def test_remote_equals_local_over_a_bad_line(mini_root, monkeypatch):
    monkeypatch.setattr(service_module, "POLL_S", 0.2)  # long calls are asked about again and again
    tasks = mini_root.task_ids("dev")

    async def whole():
        wanted = await transcript(_SHARED[1], mini_root)
        async with serving(mini_root) as (url, service):
            remote = RemotePool(url, TOKEN, root=mini_root)
            await remote.start()
            flaky = Flaky()
            await remote._http.aclose()
            remote._http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, transport=flaky)
            got = await transcript(remote, mini_root)
            world = await remote.open(tasks[0], experiment="e", keep=False)
            await world.execute("n = 0")
            counts = [(await world.execute("n += 1\nprint(n)")).text for _ in range(20)]
            slow = await world.execute("__import__('select').select([], [], [], 1.0)\nprint(n)")
            await remote.close()
            held = sum(len(c.worlds) for c in service._clients.values())
            return wanted, got, counts, slow, flaky.lost, held, remote.layers

    wanted, got, counts, slow, lost, held, layers = _SHARED[0].run_until_complete(whole())
    assert got == wanted
    assert counts == [f"{n}\n" for n in range(1, 21)], "nothing ran twice, nothing was left out"
    assert slow.text == "20\n" and not slow.failed
    assert lost > 20 and not held and layers["landlock"].on


def test_a_restarted_server_is_an_infrastructure_error(mini_root):
    task_id = mini_root.task_ids("dev")[0]

    async def whole():
        async with serving(mini_root) as (url, _):
            remote = RemotePool(url, TOKEN, root=mini_root, patience_s=20.0)
            await remote.start()
            world = await remote.open(task_id, experiment="e", keep=False)
            await world.execute("x = 1")
        port = int(url.rsplit(":", 1)[1])
        opening = asyncio.create_task(remote.open(task_id, experiment="e", keep=False))
        await asyncio.sleep(0.5)
        assert not opening.done(), "an opening waits for the server"
        async with serving(mini_root, port):
            with pytest.raises(WorkerDied, match="started anew"):
                await world.execute("print(x)")
            again = await opening
            assert (await again.execute("print(2)")).text == "2\n"
            await world.close()
            await remote.close()

    _SHARED[0].run_until_complete(whole())


def test_nobody_there(mini_root):
    async def whole():
        with pytest.raises(WorkerDied, match=r"did not answer for 0\.3 s"):
            await RemotePool("http://127.0.0.1:9", TOKEN, root=None, patience_s=0.3).start()

    _SHARED[0].run_until_complete(whole())


def test_worlds_of_a_vanished_client_are_closed(mini_root):
    async def whole():
        async with serving(mini_root, lease_s=1.0) as (url, service):
            remote = RemotePool(url, TOKEN, root=mini_root)
            await remote.start()
            kept = await remote.open(mini_root.task_ids("dev")[0], experiment="e", keep=False)
            await asyncio.sleep(2.5)
            assert (await kept.execute("print(1)")).text == "1\n", "a client that lives keeps its worlds"
            remote._pinging.cancel()
            for _ in range(100):
                await asyncio.sleep(0.1)
                if not service._pool._worlds:
                    break
            assert not service._pool._worlds and not service._clients
            with pytest.raises(WorkerDied, match="lease"):
                await kept.execute("print(1)")
            await remote._http.aclose()

    _SHARED[0].run_until_complete(whole())


def test_what_is_cancelled_ends_on_the_server(mini_root):
    task_id = mini_root.task_ids("dev")[0]

    async def whole():
        async with serving(mini_root) as (url, service):
            remote = RemotePool(url, TOKEN, root=mini_root)
            await remote.start()
            world = await remote.open(task_id, experiment="e", keep=False)
            running = asyncio.create_task(world.execute("while True: pass"))
            openings = [asyncio.create_task(remote.open(task_id, experiment="e", keep=False)) for _ in range(6)]  # more than there are places
            await asyncio.sleep(0.1)  # some are open, some are being opened, some wait
            for task in (running, *openings):
                task.cancel()
            stopped, *opened = await asyncio.gather(running, *openings, return_exceptions=True)
            assert isinstance(stopped, asyncio.CancelledError) and isinstance(opened[-1], asyncio.CancelledError)
            for one in opened:
                if not isinstance(one, asyncio.CancelledError):
                    await one.close()
            with pytest.raises(WorkerDied):
                for _ in range(100):
                    await world.execute("print(1)")
                    await asyncio.sleep(0.05)
            await world.close()
            for _ in range(200):
                if not service._pool._worlds and not remote._cancelled:
                    break
                await asyncio.sleep(0.05)
            assert not service._pool._worlds and service._pool._slots._value == 4, "every place is free again"
            assert not remote._cancelled and not remote._waiting
            # A call that was sent twice and comes late is not run: nobody waits for it.
            again = await remote.open(task_id, experiment="e", keep=False)
            await again.execute("x = 1")
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                late = {"client": remote._client, "seq": 1, "done": 1, "op": "open", "world": "", "args": {"task_id": task_id, "experiment": "e", "keep": False}}
                assert "is over" in (await client.post("/call", json=late)).json()["error"][1]
                # A cancellation that overtakes its call.
                assert (await client.post("/cancel", json={"client": remote._client, "seq": 10**6, "op": "open"})).status_code == 200
                assert "is over" in (await client.post("/call", json={**late, "seq": 10**6})).json()["error"][1]
                assert (await client.post("/cancel", json={})).status_code == 400
            assert len(service._pool._worlds) == 1
            await remote.close()

    _SHARED[0].run_until_complete(whole())


def test_a_server_without_isolation_is_refused(mini_root, monkeypatch):
    monkeypatch.setattr(WorldPool, "layers", {"landlock": Layer(False, "an old kernel")})

    async def whole():
        async with serving(mini_root) as (url, _):
            with pytest.raises(ConfigError, match=r"an old kernel.*world\.allow_unisolated=True"):
                await RemotePool(url, TOKEN, root=mini_root).start()
            async with RemotePool(url, TOKEN, root=mini_root, allow_unisolated=True) as remote:
                assert not remote.layers["landlock"].on

    _SHARED[0].run_until_complete(whole())


def test_token_and_root_are_checked(mini_root, tmp_path):
    other = DataRoot(tmp_path, "miniworld")
    (tmp_path / "data" / "datasets").mkdir(parents=True)
    (tmp_path / "data" / "datasets" / "dev.txt").write_text("abc1234_1\n")

    async def whole():
        async with serving(mini_root) as (url, _):
            with pytest.raises(ConfigError, match="refuses the token"):
                await RemotePool(url, "wrong", root=mini_root).start()
            with pytest.raises(ConfigError, match="another data root"):
                await RemotePool(url, TOKEN, root=other).start()
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.post("/call", json={})).status_code == 401
                assert (await client.post("/call", content=b"x", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 400

    _SHARED[0].run_until_complete(whole())
    with pytest.raises(ConfigError, match="SAGE_WORLDS_TOKEN"):
        RemotePool("http://x", "", root=None)


def test_token_file(tmp_path):
    path = tmp_path / "deep" / "token"
    token = token_of(path)
    assert len(token) > 30 and token_of(path) == token and path.stat().st_mode & 0o777 == 0o600
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        token_of(path)
    os.chmod(path, 0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        token_of(path)

"""Nothing stays behind: not of a trainer that is killed or stopped with open worlds, not of a dead trainer's folders; a server for real."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sage_jax.world import leftovers
from sage_jax.world.remote import RemotePool

TRAINER = """
import asyncio, signal, sys
from pathlib import Path
from sage_jax.world.pool import Limits, WorldPool

LEAVE = "posix = __import__('posix')\\nif posix.fork() == 0:\\n    posix.setsid()\\n    while True: __import__('select').select([], [], [], 1)"

async def whole():
    async with WorldPool(Path(sys.argv[1]), limits=Limits(), outputs=None, max_open=2) as pool:
        world = await pool.open(sys.argv[2], experiment="e", keep=False)
        await world.execute(LEAVE)
        print(pool._outputs.scratch, flush=True)
        running = asyncio.ensure_future(world.execute("while True: pass"))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
        await running

asyncio.run(whole())
"""


def start(root):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(root.path), root.task_ids("dev")[0]], stdout=subprocess.PIPE, text=True, env=environment)
    scratch = Path(trainer.stdout.readline().strip())
    assert scratch.name.startswith("sage-worlds-"), "it did not come up"
    assert len(processes(scratch)) >= 4, "the server, two of the world, one that its code left"
    return trainer, scratch


def processes(scratch):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if scratch.name.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def wait_until_gone(scratch, also_folder=True):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (processes(scratch) or (also_folder and scratch.exists())):
        time.sleep(0.05)
    assert not processes(scratch)
    assert not also_folder or not scratch.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_trainer_leaves_nothing(mini_root, number):
    trainer, scratch = start(mini_root)
    trainer.send_signal(number)
    trainer.wait(60)
    wait_until_gone(scratch)


@pytest.mark.slow
def test_what_a_trainer_and_its_server_left_is_removed_by_the_next(mini_root):
    trainer, scratch = start(mini_root)
    server = min(p for p in processes(scratch) if b"forkserver" in Path(f"/proc/{p}/cmdline").read_bytes())
    trainer.send_signal(signal.SIGSTOP)  # so that it cannot clean up after the server
    os.kill(server, signal.SIGKILL)
    trainer.kill()
    trainer.wait(60)
    assert scratch.exists() and processes(scratch), "what the agent's code forked dies with nobody"
    leftovers.remove_stale(scratch.parent)
    wait_until_gone(scratch)


def test_only_folders_of_dead_trainers_are_removed(tmp_path):
    own = leftovers.scratch_prefix()
    namespace, pid, started = own.removeprefix("sage-worlds-").rstrip("-").split("-")
    kept = [tmp_path / name for name in (f"{own}a", f"sage-worlds-{int(namespace) + 1}-{pid}-{started}-a", "sage-worlds-old", f"sage-worlds-{namespace}-x-1-a")]
    stale = [tmp_path / name for name in (f"sage-worlds-{namespace}-{pid}-{int(started) + 1}-a", f"sage-worlds-{namespace}-4194305-1-a")]
    for folder in kept + stale:
        (folder / "view").mkdir(parents=True)
    leftovers.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_user_ids_of_servers_do_not_overlap():
    ranges = sorted(leftovers.first_uid(pid) for pid in range(1, 300_000, 7))
    assert all(b - a >= 10_000 for a, b in itertools.pairwise(ranges)) and ranges[-1] + 10_000 < 2**32 - 2


@pytest.mark.slow
def test_a_served_pool_as_a_process(mini_root, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = tmp_path / "token"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-m", "sage_jax.world.serve", f"--port={port}", f"--token_file={token}", f"--root={mini_root.path}", "--max_open=2"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    async def whole():
        async with RemotePool(f"http://127.0.0.1:{port}", token.read_text().strip(), root=mini_root, patience_s=120.0) as pool:
            world = await pool.open(mini_root.task_ids("dev")[0], experiment="e", keep=False)
            text = (await world.execute("print(1 + 1)")).text
            server.send_signal(signal.SIGTERM)  # with a world open
            await asyncio.to_thread(server.wait, 60)
            return pool.max_open, text

    try:
        assert f"serving 2 worlds of {mini_root.path}" in server.stdout.readline()
        assert asyncio.run(whole()) == (2, "2\n")
    finally:
        server.kill()
    assert not [p for p in Path("/dev/shm").glob("sage-worlds-*") if f"-{server.pid}-" in p.name]

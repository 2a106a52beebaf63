"""How much is opened: processors and memory of the machine and of its control groups, waiting for memory, recycling."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import pytest

from sage_jax.errors import ConfigError, WorldOpenError
from sage_jax.world import admission, pool
from sage_jax.world.pool import Limits, WorldPool

LIMITS = Limits(output_chars=2000, memory_mb=400)


def own_group(folder: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            group = folder / line[3:].strip("/")
            group.mkdir(parents=True, exist_ok=True)
            return group
    pytest.skip("no cgroup v2 on this machine")


def test_control_groups_bound_memory_and_processors(tmp_path):
    assert admission.available_mb(tmp_path) > 0 and admission.cores(tmp_path) == len(os.sched_getaffinity(0))
    group = own_group(tmp_path)
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert admission.cores(tmp_path) == len(os.sched_getaffinity(0))
    (group / "memory.max").write_text(f"{300 << 20}\n")
    (group / "memory.current").write_text(f"{280 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {30 << 20}\n")
    (group / "cpu.max").write_text("50000 100000\n")
    assert admission.available_mb(tmp_path) == 50
    assert admission.cores(tmp_path) == 1


def test_worlds_that_fit(mini_root, monkeypatch):
    monkeypatch.setattr(admission, "cores", lambda: 3)
    monkeypatch.setattr(admission, "available_mb", lambda: 1 << 20)
    assert WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=0).max_open == 48
    monkeypatch.setattr(admission, "available_mb", lambda: 2560)
    assert WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=0).max_open == 10
    with pytest.raises(ConfigError, match="must not be negative"):
        WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=-1)
    with pytest.raises(ConfigError, match="session cannot be switched off; limits, uid"):
        WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=1, layers_off=["session"])


@pytest.mark.slow
def test_waiting_and_recycling(mini_root, monkeypatch):
    """One pool for all of it: a start takes seconds."""
    task_id = mini_root.task_ids("train")[0]

    async def opened(one):
        return await one.open(task_id, experiment="e", keep=False)

    async def waits(coroutine):
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0.5)
        assert not task.done()
        return task

    async def whole():
        free = 10**6
        monkeypatch.setattr(pool, "available_mb", lambda: free)
        async with WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=3, max_copies=1) as one:
            # Memory: with none open the first one is let in, the next one waits.
            free = 100
            first = await opened(one)
            task = await waits(opened(one))
            free = 10**6
            second = await task
            free = 100
            one.limits = dataclasses.replace(LIMITS, open_s=0.02)
            with pytest.raises(WorldOpenError, match=r"only 100 MiB .* for 0\.2 s, and a world is opened with 1024 MiB; 2 are open"):
                await opened(one)
            one.limits, free = LIMITS, 10**6
            await second.close()

            # Copies wait for copies.
            copy = await first.fork()
            task = await waits(first.fork())
            await copy.close()
            await (await task).close()

            # A worn server gives way; its worlds live on, and it ends when they are closed.
            one.limits = dataclasses.replace(LIMITS, recycle=2)
            old = one.server_pid
            third = await opened(one)
            assert one.server_starts == 2 and one.server_pid != old
            assert (await first.execute("print(1)")).text == "1\n" and (await third.execute("print(3)")).text == "3\n"
            assert os.path.exists(f"/proc/{old}")
            await first.close()
            await third.close()
            one.limits = LIMITS
            await (await opened(one)).close()
            assert not os.path.exists(f"/proc/{old}") and not one._retired

            # While a pool closes, no server is started.
            world = await opened(one)
            starts = one.server_starts
            os.kill(one.server_pid, signal.SIGKILL)
            closing = asyncio.ensure_future(one.close())
            await asyncio.sleep(0)
            for late in (opened(one), one._judge(world.place)):
                with pytest.raises(RuntimeError, match="the pool is closed"):
                    await late
            await closing
            assert one.server_starts == starts

    asyncio.run(whole())

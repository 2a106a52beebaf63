"""The pool on a local Ray cluster gives what a local pool gives."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from contract import LIMITS, transcript

from sage_jax.errors import ConfigError, WorkerDied
from sage_jax.world import ray_pool
from sage_jax.world.pool import WorldPool


@pytest.mark.slow
def test_ray_equals_local(mini_root, monkeypatch):
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install -e ".[ray]"')
    tasks = mini_root.task_ids("dev")

    async def whole():
        async with WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=4) as local:
            wanted = await transcript(local, mini_root)
        async with ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=2) as pool:
            assert pool.max_open == 2 and pool.layers["landlock"].on
            got = await transcript(pool, mini_root)
            world = await pool.open(tasks[0], experiment="e", keep=False)
            await world.execute("x = 1")
            # The actor is killed: its worlds are infrastructure errors, and openings go on in the new one.
            pid = int(await pool._hosts[0].__ray_call__.remote(lambda self: os.getpid()))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                for _ in range(50):
                    await world.execute("print(x)")
                    await asyncio.sleep(0.1)
            await world.close()
            again = await pool.open(tasks[0], experiment="e", keep=False)
            assert (await again.execute("print(3)")).text == "3\n"
            await again.close()
            await cancelled(pool, tasks[0])
        # Another root at the node's path: refused, and the actors of the failed start are gone.
        monkeypatch.setattr(ray_pool, "tasks_digest", lambda root: "others")
        pool = ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=2)
        with pytest.raises(ConfigError, match=r"nodes \[0\] .* another data root"):
            await pool.start()
        assert not pool._hosts
        return wanted, got

    async def cancelled(pool, task_id):
        """Openings that nobody waits for any more give their places back, whether they had begun or not."""
        openings = [asyncio.create_task(pool.open(task_id, experiment="e", keep=False)) for _ in range(4)]
        await asyncio.sleep(0.02)
        for task in openings:
            task.cancel()
        await asyncio.gather(*openings, return_exceptions=True)
        for _ in range(200):
            await asyncio.sleep(0.05)
            if pool._open == [0]:
                break
        assert pool._open == [0] and not pool._discarding
        both = await asyncio.gather(*(pool.open(task_id, experiment="e", keep=False) for _ in range(2)))
        await asyncio.gather(*(w.close() for w in both))

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        wanted, got = asyncio.run(whole())
    finally:
        ray.shutdown()
    assert got == wanted


def test_a_node_that_was_down_comes_last():
    pool = object.__new__(ray_pool.RayPool)

    async def whole():
        pool._free, pool._places, pool._open = asyncio.Condition(), [4, 4], [0, 2]
        now = asyncio.get_running_loop().time()
        pool._down = {0: now + 60}
        order = [await pool._take() for _ in range(3)]  # the other one, and the lost one only when that is full
        pool._down = {0: now - 1}
        return order, await pool._take()

    assert asyncio.run(whole()) == ([1, 1, 0], 0)


def test_without_ray_the_message_says_what_to_install(mini_root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[ray\]"'):
        ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=1)

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
def test_ray_equals_local(mini_root):
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
            return wanted, got

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        wanted, got = asyncio.run(whole())
    finally:
        ray.shutdown()
    assert got == wanted


def test_without_ray_the_message_says_what_to_install(mini_root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[ray\]"'):
        ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=1)

"""The pool on a local Ray cluster gives what a local pool gives."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from sage_jax.errors import ConfigError, WorkerDied
from sage_jax.world import ray_pool
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool

LIMITS = Limits(output_chars=2000)


async def episode(pool, root, task_id):
    world = await pool.open(task_id, experiment="e", keep=False)
    reference = load_reference(root.path, task_id)
    texts = [(await world.execute(code)).text for code in (reference.lookup, reference.function_solution)]
    judgement = await world.evaluate()
    await world.close()
    return texts, judgement


@pytest.mark.slow
def test_ray_equals_local(mini_root):
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install -e ".[ray]"')
    tasks = mini_root.task_ids("dev")

    async def whole():
        async with WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=4) as local:
            wanted = [await episode(local, mini_root, t) for t in tasks]
        async with ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=2) as pool:
            assert pool.max_open == 2 and pool.layers["landlock"].on
            got = await asyncio.gather(*(episode(pool, mini_root, t) for t in tasks))
            world = await pool.open(tasks[0], experiment="e", keep=False)
            await world.execute("x = 1")
            copy = await world.fork()
            assert (await copy.execute("x += 1\nprint(x)")).text == "2\n"
            await copy.close()
            assert (await world.execute("print(x)")).text == "1\n"
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
    assert got == wanted and all(j.success for _, j in got)


def test_without_ray_the_message_says_what_to_install(mini_root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[ray\]"'):
        ray_pool.RayPool("auto", mini_root.path, limits=LIMITS, outputs=None, max_open=1)

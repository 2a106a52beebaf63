"""What every pool does, whatever way its calls go: `transcript` is the same for a local one, one behind HTTP and one on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from sage_jax.errors import ConfigError, WorkerDied
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool

LIMITS = Limits(output_chars=2000, memory_mb=400, execute_s=4.0, grace_s=1.5)
CODES = (
    "print('hi')",
    "x = 1",
    "1 / 0",
    "def f(:",
    "import subprocess",
    "print('a' * 5000)",
    "print('\\ud800', '\\u00e9\\U0001F600', 'x\\0y')",
    "y = []\nwhile True: y.append(bytearray(10 ** 7))",
    "y = None\nprint(x)",
    "while True: pass",
    "print(x)",
    "print(double(4))",
    "__import__('posix')._exit(3)",
)


@dataclasses.dataclass(frozen=True)
class Skill:
    id: str
    name: str
    code: str


SKILLS = (Skill("double@1", "double", "def double(n):\n    return 2 * n"), Skill("bad@1", "bad", "def bad(:"))


@contextlib.contextmanager
def running(root, limits):
    """(loop, pool) for all tests of a file: a start takes seconds."""
    loop = asyncio.new_event_loop()
    pool = WorldPool(root.path, limits=limits, outputs=None, max_open=4)
    loop.run_until_complete(pool.start())
    yield loop, pool
    loop.run_until_complete(pool.close())
    loop.close()


async def transcript(pool, root) -> list:
    """Everything that a caller can see of some worlds of `pool`, as plain values; asserts what has one right value."""
    tasks = root.task_ids("dev")
    seen: list = [list(await asyncio.gather(*(_solved(pool, root, t) for t in tasks)))]
    assert all(judgement["success"] for _, judgement in seen[0])

    world = await pool.open(tasks[0], experiment="e", keep=False)
    seen.append([dataclasses.asdict(v) for v in await world.install(SKILLS)])
    steps = [await world.execute(code) for code in CODES]
    assert [s.limit for s in steps if s.limit] == ["memory", "time", "exit"] and steps[-1].world_lost
    assert steps[-2].skill_calls == ("double@1",) and steps[5].dropped > 0
    seen.append([_plain(s) for s in steps])
    with pytest.raises(WorkerDied):
        await world.execute("print(1)")
    seen.append(dataclasses.asdict(await world.evaluate()))
    await world.close()
    await world.close()
    with pytest.raises(RuntimeError, match="closed"):
        await world.execute("print(1)")

    world = await pool.open(tasks[0], experiment="e", keep=False)
    await world.execute("x = 1")
    copy = await world.fork()
    assert (await copy.execute("x += 1\nprint(x)")).text == "2\n"
    await copy.execute(load_reference(root.path, tasks[0]).function_solution)
    assert await copy.completed() and (await copy.evaluate()).success
    await copy.close()
    assert (await world.execute("print(x)")).text == "1\n"
    assert not await world.completed() and not (await world.evaluate()).success
    await world.record_lm_calls([{"input": {}, "output": {}}])
    await world.close()
    for wrong in ("nope_1", "../x"):
        with pytest.raises(ConfigError):
            await pool.open(wrong, experiment="e", keep=False)
    return seen


async def _solved(pool, root, task_id):
    world = await pool.open(task_id, experiment="e", keep=False)
    reference = load_reference(root.path, task_id)
    steps = [await world.execute(code) for code in (reference.lookup, reference.function_solution)]
    judgement = await world.evaluate()
    await world.close()
    return [_plain(s) for s in steps], dataclasses.asdict(judgement)


def _plain(step) -> dict:
    return {k: v for k, v in dataclasses.asdict(step).items() if k != "seconds"}

"""Many episodes at once, undisturbed and under random kills: same results as one by one, nothing hangs, nothing leaks.

The figures of the long forms (`soak`) are printed; each has a short form in the slow tier.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import time
from pathlib import Path

import pytest

from sage_jax.errors import InfrastructureError
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.watch import descendants

LIMITS = Limits(output_chars=3000)


def script(root, number):
    """(task id, blocks, whether they solve it): a random episode, the same for the same number."""
    draw = random.Random(number)
    tasks = [t for split in root.splits for t in root.task_ids(split)]
    task_id, other = draw.sample(tasks, 2)
    reference = load_reference(root.path, task_id)
    blocks = [reference.lookup] if draw.random() < 0.5 else []
    blocks += draw.sample(
        ["x = 1\nprint(x)", "1 / 0", "import random\nprint(random.random())", "print(apis.supervisor.show_profile())", load_reference(root.path, other).lookup],
        draw.randrange(3),
    )
    solves = draw.random() < 0.5
    if solves:
        blocks.append(draw.choice([reference.inline_solution, reference.function_solution]))
    elif draw.random() < 0.5:
        blocks.append("apis.supervisor.complete_task(status='fail')")
    return task_id, blocks, solves


async def episode(pool, root, number):
    """(observations, judgement) of one try."""
    task_id, blocks, _ = script(root, number)
    world = await pool.open(task_id, experiment="e", keep=False)
    try:
        texts = [(await world.execute(code)).text for code in blocks]
        return texts, await world.evaluate()
    finally:
        await world.close()


def isolation(root, episodes, side_by_side):
    async def whole():
        async with WorldPool(root.path, limits=LIMITS, outputs=None, max_open=side_by_side) as pool:
            alone = [await episode(pool, root, n) for n in range(episodes)]
            together = await asyncio.gather(*(episode(pool, root, n) for n in range(episodes)))
        return alone, together

    alone, together = asyncio.run(whole())
    assert [script(root, n)[2] for n in range(episodes)] == [j.success for _, j in alone]
    different = [n for n in range(episodes) if alone[n] != together[n]]
    assert not different, f"episode {different[0]}: {alone[different[0]]} and {together[different[0]]}"


@pytest.mark.slow
def test_side_by_side_equals_one_by_one(mini_root):
    isolation(mini_root, 40, 16)


@pytest.mark.soak
def test_500_side_by_side_equal_one_by_one(mini_root):
    isolation(mini_root, 500, 32)


def chaos(root, episodes, side_by_side, every_s):
    """Runs episodes while processes are killed at random; returns figures."""
    draw = random.Random(0)
    figures = {"kills of worlds": 0, "kills of code": 0, "kills of judges": 0, "kills of servers": 0, "tries that failed": 0}

    async def whole():
        async with WorldPool(root.path, limits=LIMITS, outputs=None, max_open=side_by_side) as pool:
            waiting, done = iter(range(episodes)), []

            async def worker():
                for number in waiting:
                    for _ in range(50):
                        try:
                            _, judgement = await asyncio.wait_for(episode(pool, root, number), 300)
                            break
                        except InfrastructureError:
                            figures["tries that failed"] += 1
                    else:
                        raise AssertionError(f"episode {number} never came through")
                    assert judgement.success == script(root, number)[2], f"episode {number} was scored wrongly: {judgement}"
                    done.append(number)

            async def killer():
                while True:
                    await asyncio.sleep(draw.expovariate(1 / every_s))
                    if sum(n for what, n in figures.items() if what.startswith("kills")) > 2 * len(done) + side_by_side:
                        continue  # a busy machine gets on too
                    worlds = children(pool.server_pid)
                    fate = draw.random()
                    if fate < 0.04:
                        victim, what = pool.server_pid, "kills of servers"
                    elif not worlds:
                        continue
                    else:
                        victim, what = draw.choice(worlds), "kills of worlds"
                        below = children(victim)
                        if not below:
                            what = "kills of judges"  # or of a world that is being opened
                        elif fate < 0.5:
                            victim, what = below[0], "kills of code"
                    try:
                        os.kill(victim, signal.SIGKILL)
                        figures[what] += 1
                    except ProcessLookupError:
                        continue

            # Caches fill in the first episodes: what is held is compared from then on.
            warm = min(episodes // 5, 200)
            first = [next(waiting) for _ in range(warm)]
            await asyncio.gather(*(episode(pool, root, n) for n in first))
            gc.collect()
            before = resident(), len(os.listdir("/proc/self/fd")), len(descendants(pool.server_pid))
            killing = asyncio.create_task(killer())
            started = time.monotonic()
            await asyncio.gather(*(worker() for _ in range(side_by_side)))
            figures["seconds"] = round(time.monotonic() - started, 1)
            killing.cancel()
            for _ in range(100):
                await asyncio.sleep(0.05)
                if not children(pool.server_pid):
                    break
            gc.collect()
            after = resident(), len(os.listdir("/proc/self/fd")), len(descendants(pool.server_pid))
            figures["servers started"] = pool.server_starts
            scratch = pool._outputs.scratch
            left = [p.name for p in (scratch / "agents").iterdir()] + list((scratch / "view" / "experiments" / "outputs").iterdir())
            assert not left, f"folders left behind: {left}"
            return before, after, scratch

    before, after, scratch = asyncio.run(whole())
    assert not scratch.exists()
    figures |= {"resident MiB before and after": (before[0] >> 20, after[0] >> 20), "descriptors": (before[1], after[1])}
    assert after[0] - before[0] < 64 << 20, figures
    assert after[1] <= before[1] + 4, figures
    assert after[2] <= 1, figures  # the fork server
    print(figures)
    return figures


def children(pid):
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_random_kills(mini_root):
    figures = chaos(mini_root, 60, 8, 0.4)
    assert figures["kills of worlds"] and figures["kills of code"]


@pytest.mark.soak
def test_5000_episodes_under_random_kills(mini_root):
    figures = chaos(mini_root, 5000, 16, 0.5)
    assert figures["kills of servers"] and figures["kills of judges"]

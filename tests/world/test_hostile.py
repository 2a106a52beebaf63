"""Hostile and broken programs, run for real: none scores, none sees a secret, none outlives its episode, and the pool stays healthy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from pathlib import Path

import pytest

from sage_jax.errors import WorkerDied
from sage_jax.world.leftovers import first_uid
from sage_jax.world.miniworld import generate
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.roots import DataRoot
from tests.world.hostile import programs

LIMITS = Limits(execute_s=2.0, grace_s=1.0, memory_mb=300, disk_mb=32, output_chars=2000, requests=2000)
EASY = 21  # of the default tier; the rest runs in the slow one


def alive(uid: int) -> list[str]:
    """Processes of a world's user, with their states."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "status").read_text()
            except OSError:
                continue
            if int(re.search(r"^Uid:\s+(\d+)", status, re.M)[1]) == uid:
                found.append(status[:80])
    return found


def planted(root, folder) -> tuple[DataRoot, str, list[str]]:
    """A copy of the root with a canary in the ground truth of a task; the task; what no program may see."""
    shutil.copytree(root.path, folder, ignore=shutil.ignore_patterns("__pycache__"))
    task = root.task_ids("train")[0]
    truth = folder / "data" / "tasks" / task / "ground_truth"
    canaries = [f"canary-{secrets.token_hex(12)}" for _ in range(4)]
    private = json.loads((truth / "private_data.json").read_text())
    (truth / "private_data.json").write_text(json.dumps({**private, "canary": canaries[0]}))
    (truth / "canary.txt").write_text(canaries[1])
    with open(truth / "evaluation.py", "a") as file:
        file.write(f"\nCANARY = {canaries[2]!r}\n")
    seen = [line.strip() for f in ("evaluation.py", "references.json") for line in (truth / f).read_text().splitlines() if len(line.strip()) > 30]
    ours = Path(generate.__file__).read_text().splitlines()
    return DataRoot(folder, root.kind), task, canaries + seen + [line.strip() for line in ours if len(line.strip()) > 50]


def run(root, folder, chosen):
    """[(program, step, judgement, what was wrong afterwards)]"""
    root, task, hidden = planted(root, folder)
    neighbour, outside = f"canary-{secrets.token_hex(12)}", f"canary-{secrets.token_hex(12)}"
    hidden += [neighbour, outside]
    os.environ["SAGE_TEST_SECRET"] = outside

    async def whole():
        async with WorldPool(root.path, limits=LIMITS, outputs=None, max_open=4) as pool:
            assert all(layer.on for name, layer in pool.layers.items() if name != "uid" or os.geteuid() == 0), pool.layers
            corpus = [p for p in programs(str(pool._outputs.view), str(pool._outputs.data), task, os.getpid(), pool.server_pid) if chosen(p)]
            first = first_uid(pool.server_pid) + 1
            other = await pool.open(task, experiment="x", keep=False)
            await other.execute(f"mine = {neighbour!r}\nwith __import__('io').FileIO('mine', 'w') as f: f.write(mine.encode())")
            assert (await other.execute("print(mine)")).text == neighbour + "\n"

            async def one(program):
                world = await pool.open(task, experiment="x", keep=False)
                wrong, step, text, judgement = [], None, "", None
                try:
                    step = await world.execute(program.code)
                    text = step.text
                    if not step.world_lost:
                        text += (await world.execute("1")).text  # whatever it left must not break the channel
                    judgement = await world.evaluate()
                except WorkerDied as error:
                    wrong.append(f"an infrastructure error: {error}")
                # The place is freed with the close: whoever takes it next has the same user id.
                await world._child.end(10)
                for _ in range(40):
                    if not (left := alive(first + world.place.slot) if os.geteuid() == 0 else []):
                        break
                    await asyncio.sleep(0.05)
                await world.close()
                wrong += [f"it saw {s[:60]!r}" for s in hidden if s in text]
                wrong += [f"left behind: {p}" for p in left]
                healthy = await pool.open(task, experiment="x", keep=False)
                if (await healthy.execute("print(1 + 1)")).text != "2\n":
                    wrong.append("the pool is not healthy")
                await healthy.close()
                return program, step, judgement, wrong

            results = await asyncio.gather(*map(one, corpus))
            # The judge scores what is right, and nothing of the others' reached this world.
            assert (await other.execute("print(mine)")).text == neighbour + "\n"
            await other.execute(load_reference(root.path, task).function_solution)
            assert (await other.evaluate()).success
            await other.close()
            assert pool.server_starts == 1, "the fork server was lost"
        return results

    try:
        return asyncio.run(whole())
    finally:
        del os.environ["SAGE_TEST_SECRET"]


def faults(results):
    for program, step, judgement, wrong in results:
        yield from (f"{program.name}: {w}" for w in wrong)
        if step is None:
            continue
        limits = (program.limit,) if isinstance(program.limit, str) else program.limit
        shown = f"{program.name}: failed={step.failed} lost={step.world_lost} limit={step.limit} {step.text[-300:]!r}"
        if program.want == "failed" and not (step.failed and not step.world_lost):
            yield f"{shown}, wanted a failed step"
        if program.want == "fine" and step.failed:
            yield f"{shown}, wanted it to run"
        if program.want == "lost" and not step.world_lost:
            yield f"{shown}, wanted the world to be lost"
        if any(limits) and (step.limit or "") not in limits:
            yield f"{shown}, wanted the limit {limits}"
        if program.text and not re.search(program.text, step.text):
            yield f"{shown}, wanted {program.text!r} in the text"
        if judgement.success or (judgement.completed and "alias" not in program.name and "thread" not in program.name):
            yield f"{program.name}: it was scored {judgement}"


def test_some_hostile_programs(mini_root, tmp_path):
    """Those that need no time: the rest is in the slow tier."""
    names = {
        "exit", "kill itself", "kill the engine's side", "answer by its path", "our sources", "environment", "socket", "run a program",
        "completed in the own database", "administration of the bank", "forged reply", "patched builtins", "real-time signal", "kill by a child's end",
        "kill by a descriptor's owner", "kill by a timer", "forged number", "forged odd text", "forged long text", "deep frame", "answer by walking",
    }  # fmt: skip
    results = run(mini_root, tmp_path / "root", lambda p: p.name in names)
    assert len(results) == EASY == len(names)
    assert not list(faults(results)), "\n".join(faults(results))


@pytest.mark.slow
def test_hostile_programs(mini_root, tmp_path):
    results = run(mini_root, tmp_path / "root", lambda p: True)
    assert len(results) >= 80
    assert not list(faults(results)), "\n".join(faults(results))

"""Kept outputs are in the official layout, and the engine's own report on them agrees with ours."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from sage_jax.errors import ConfigError, JudgeError
from sage_jax.world import outputs
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool


def test_engine_reports_what_the_judge_said(mini_root, tmp_path):
    task_ids = mini_root.task_ids("dev")

    async def whole():
        judgements = {}
        async with WorldPool(mini_root.path, limits=Limits(), outputs=tmp_path, max_open=2) as pool:
            for place, task_id in enumerate(task_ids):
                world = await pool.open(task_id, experiment="ours/greedy", keep=True)
                code = load_reference(mini_root.path, task_id).function_solution if place % 2 == 0 else "print(1)"
                await world.execute(code)
                judgements[task_id] = await world.evaluate()
                await world.close()
        return judgements

    judgements = asyncio.run(whole())
    assert not list(mini_root.path.rglob("*.pyc")), "judging leaves the data root as it was built"
    assert any(j.success for j in judgements.values()) and not all(j.success for j in judgements.values())
    folder = tmp_path / "experiments" / "outputs" / "ours/greedy" / "tasks" / task_ids[0]
    for file in ("dbs/supervisor.jsonl", "logs/api_calls.jsonl", "logs/environment_io.md", "evaluation/report.md"):
        assert (folder / file).is_file(), file

    environment = {**os.environ, "APPWORLD_ROOT": str(tmp_path)}
    run = [sys.executable, "-m", "appworld.cli", "evaluate", "ours/greedy", "dev"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "experiments/outputs/ours/greedy/evaluations/dev.json").read_text())
    for task_id, judgement in judgements.items():
        theirs = report["individual"][task_id]
        assert (theirs["success"], len(theirs["passes"]), theirs["num_tests"]) == (
            judgement.success,
            judgement.passed,
            judgement.total,
        )


def test_judge_that_cannot_score(mini_root):
    async def whole():
        async with WorldPool(mini_root.path, limits=Limits(judge_retries=0), outputs=None, max_open=2) as pool:
            task_id = mini_root.task_ids("train")[0]
            world = await pool.open(task_id, experiment="e", keep=False)
            await world.evaluate()
            (world.place.folder / "dbs" / "supervisor.jsonl").write_text("not a state\n")
            with pytest.raises(JudgeError, match=task_id):
                await pool._judge(world.place)
            again = await world.evaluate()
            await world.close()
            return again

    assert asyncio.run(whole()).total > 0


def test_outputs_of_another_root_are_refused(mini_root, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(outputs, "_scratch_parent", lambda: str(scratch))

    async def start():
        async with WorldPool(mini_root.path, limits=Limits(), outputs=tmp_path, max_open=1):
            pass

    with pytest.raises(ConfigError, match="not to the data root"):
        asyncio.run(start())
    assert not list(scratch.iterdir())

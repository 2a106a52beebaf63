"""Killed runs go on as if nothing had happened: every metric but times equals that of an unbroken run."""

import fnmatch
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import sage_demo
from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.report.curves import PANELS
from sage_jax.training import setup
from sage_jax.training.metrics import is_time_metric, read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3


def command(workdir, root):
    return [
        sys.executable, "-m", "sage_jax.train", f"--config={ROOT}/configs/sage_demo.py", f"--workdir={workdir}", f"--config.world.path={root}",
        "--config.run.start=False", "--config.eval.runs=0", "--config.eval.scenarios=1", "--config.run.splits=('dev',)", "--config.eval.every=2",
        f"--config.rl.steps={STEPS}", "--config.rl.scenarios_per_step=2", "--config.rl.group=2", "--config.world.max_open=4",
        "--config.sampler.slots=4", "--config.rl.rows=4",
    ]  # fmt: skip


def run(workdir, root, kill_when=None):
    """Runs to the end, or until `kill_when(workdir)` says that it is to be killed. Returns its output."""
    log = workdir.parent / f"{workdir.name}.log"
    with log.open("ab") as out:
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command(workdir, root), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        deadline = time.monotonic() + 400
        while process.poll() is None:
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            if kill_when is not None and kill_when(workdir):
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                return log.read_text()
            time.sleep(0.05)
    text = log.read_text()
    assert kill_when is None, f"it ended before it was to be killed:\n{text[-3000:]}"
    assert process.returncode == 0, text[-3000:]
    return text


def metrics(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not is_time_metric(k)} for row in rows]


def lines(workdir):
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_a_killed_run_gives_the_metrics_of_an_unbroken_one(mini_root, tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(unbroken, mini_root.path)
    started = {}

    def inside_step_two(workdir):
        if lines(workdir) < 1:
            return False
        started.setdefault("at", time.monotonic())
        return time.monotonic() - started["at"] > 1.0  # the checkpoint of step 1 is there, step 2 has begun

    run(broken, mini_root.path, inside_step_two)
    run(broken, mini_root.path, lambda w: lines(w) >= 2)  # as soon as step 2 is written: around the boundary
    text = run(broken, mini_root.path)
    want, got = metrics(unbroken), metrics(broken)
    assert len(want) == STEPS
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a == b, f"step {step}: {[(k, a.get(k), b.get(k)) for k in a if a.get(k) != b.get(k)]}"
    assert any(row["update/grad_norm"] > 0 for row in want), "nothing was learned, so nothing was tested"
    assert all(row["sampler/retraces"] == 0 and row["sampler/sampled_tokens"] > 0 for w in (unbroken, broken) for row in read_metrics(w))
    assert "evaluate SAGE on dev" in text and all("eval_dev/sgc" in want[i] for i in (1, STEPS - 1)) and "eval_dev/sgc" not in want[0]
    missing = [p for panel in PANELS for p in (*panel.keys, *panel.right) if not any(fnmatch.fnmatchcase(k, p) for k in want[-1])]
    assert not missing, f"the curves draw what nothing writes: {missing}"

    before = (broken / "policy" / "model.safetensors").read_bytes()
    assert before == (unbroken / "policy" / "model.safetensors").read_bytes()
    assert (broken / "report.html").stat().st_size > 10_000

    config = sage_demo.get_config()
    final = setup.load_policy(config, source=str(broken / "policy"))
    for which in ("last", str(STEPS)):
        kept = setup.load_policy(config, source=str(broken / "checkpoints" / which))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), kept.params, final.params)
    best, of_unbroken = (setup.load_policy(config, source=str(w / "checkpoints" / "best")) for w in (broken, unbroken))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), best.params, of_unbroken.params)
    assert best.identity.endswith(("step 2", f"step {STEPS}")) and best.identity.split()[-1] == of_unbroken.identity.split()[-1]
    with pytest.raises(CheckpointError, match="no whole checkpoint '77'"):
        setup.load_policy(config, source=str(broken / "checkpoints" / "77"))
    with pytest.raises(ConfigError, match=r"is no run of sage_jax.train"):
        setup.load_policy(config, source=str(tmp_path / "checkpoints" / "last"))


@pytest.mark.soak
def test_a_series_of_kills(mini_root, tmp_path):
    """Killed at random times until it is through: the metrics are those of an unbroken run."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    run(unbroken, mini_root.path)
    draw = random.Random(0)
    kills = 0
    while lines(broken) < STEPS or not (broken / "report.html").exists():
        assert kills < 60, "it does not come through"
        lifetime = time.monotonic() + draw.uniform(8, 40)
        done = {}

        def late(workdir, limit=lifetime, done=done):
            done["finished"] = (workdir / "report.html").exists()
            return done["finished"] or time.monotonic() > limit

        run(broken, mini_root.path, late)
        kills += not done["finished"]
    assert kills >= 3
    assert metrics(unbroken) == metrics(broken)
    assert (unbroken / "policy" / "model.safetensors").read_bytes() == (broken / "policy" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume(mini_root, tmp_path):
    workdir = tmp_path / "run"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(workdir, mini_root.path), cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
        )
        deadline = time.monotonic() + 300
        while lines(workdir) < 1:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.wait(60)
    text = log.read_text()
    assert process.returncode == 130, text[-3000:]
    assert "python -m sage_jax.train --config=" in text and "Traceback" not in text
    left = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, text=True).stdout
    assert not left, "processes of the run are still there"

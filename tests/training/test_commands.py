"""Collect, evaluate and their agreement with the engine's own report, on the real engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import evaluate as evaluate_config
from configs import sft_tiny
from sage_jax.errors import ConfigError
from sage_jax.sft.dataset import read_dataset
from sage_jax.training import collecting
from sage_jax.training.evaluate_command import evaluate_command

ROOT = Path(__file__).resolve().parents[2]


def config_for(module, root, arg="runlocal"):
    config = module.get_config(arg)
    config.world.path = str(root.path)
    config.world.max_open = 4
    return config


def test_collect_writes_only_what_the_judge_passed(mini_root, tmp_path, capsys):
    config = config_for(sft_tiny, mini_root)
    config.collect.split = "dev"
    config.collect.modes.function = 3.0
    config.collect.vocab_size = 400
    path = collecting.collect(config, tmp_path)
    records = read_dataset(path)
    about = json.loads((tmp_path / "collect.json").read_text())
    assert len(records) == about["kept"] == about["episodes"] > 0
    modes = {r["meta"]["mode"] for r in records}
    assert "call" in modes, f"no later task called the function of an earlier one: {about['counts']}"
    for r in records:
        roles = [m["role"] for m in r["messages"]]
        assert roles[0] == "system" and roles[-1] == "assistant"
        failed = [m for m in r["messages"] if m["role"] == "assistant" and m.get("train") is False]
        assert len(failed) == r["meta"]["mode"].startswith("repair")
    assert (tmp_path / "tokenizer" / "tokenizer.json").exists()
    before = path.stat().st_mtime_ns
    collecting.collect(config, tmp_path)
    assert path.stat().st_mtime_ns == before and "used again" in capsys.readouterr().out


def test_our_table_is_the_engines_report(mini_root, tmp_path, capsys):
    """`appworld evaluate` on the folder that an evaluation leaves gives the same TGC and SGC."""
    config = config_for(evaluate_config, mini_root)
    config.collect.modes = {"inline": 1.0}
    config.eval.scenarios = 0
    evaluate_command(config, tmp_path, split="dev", policy="scripted")
    (row, *_) = json.loads((tmp_path / "summary.json").read_text())
    assert row["tgc"] == 1.0 and row["sgc"] == 1.0
    (experiment,) = [p.name for p in (tmp_path / "experiments" / "outputs").iterdir()]
    run = [sys.executable, "-m", "appworld.cli", "evaluate", experiment, "dev"]
    done = subprocess.run(run, cwd=tmp_path, env={**os.environ, "APPWORLD_ROOT": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "experiments/outputs" / experiment / "evaluations" / "dev.json").read_text())
    ours = [100 * row["tgc"], 100 * row["sgc"]]
    assert [report["aggregate"][k] for k in ("task_goal_completion", "scenario_goal_completion")] == pytest.approx(ours, abs=0.06)


def test_wrong_requests_name_the_choices(mini_root, tmp_path):
    config = config_for(evaluate_config, mini_root)
    with pytest.raises(ConfigError, match="neither 'bundled', 'random', a Hugging Face folder"):
        evaluate_command(config, tmp_path, split="dev", policy="/no/such/folder")
    config.eval.library = "chains"
    with pytest.raises(ConfigError, match="chain, none, reference"):
        evaluate_command(config, tmp_path / "b", split="dev", policy="scripted")

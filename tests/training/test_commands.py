"""Collect, evaluate and their agreement with the engine's own report, on the real engine."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs import evaluate as evaluate_config
from configs import sft_tiny
from sage_jax.agent.trajectory import End
from sage_jax.errors import ConfigError, SageError
from sage_jax.sft.dataset import read_dataset
from sage_jax.training import arms, collecting, setup
from sage_jax.training.comparison import compare
from sage_jax.training.evaluate_command import evaluate_command
from sage_jax.training.evaluation import evaluate
from sage_jax.world.roots import MARKER, open_root

ROOT = Path(__file__).resolve().parents[2]


def config_for(module, root, arg="runlocal"):
    config = module.get_config(arg)
    config.world.path = str(root.path)
    config.world.max_open = 4
    return config


@pytest.fixture(scope="module")
def session(mini_root):
    """One pool for the tests that keep no outputs: its start takes seconds."""
    with setup.Session(config_for(evaluate_config, mini_root), mini_root, None) as session:
        yield session


@pytest.fixture
def shared(session, monkeypatch):
    monkeypatch.setattr(setup, "Session", lambda config, root, outputs: contextlib.nullcontext(session))


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


def test_our_table_is_the_engines_report(mini_root, tmp_path, monkeypatch):
    """`appworld evaluate` on the folder that an evaluation leaves gives the same TGC and SGC, and `appworld pack` takes it."""
    config = config_for(evaluate_config, mini_root)
    config.collect.modes = {"inline": 1.0}
    config.eval.scenarios = 0
    tasks = mini_root.task_ids("test_normal")
    failing = {tasks[0], tasks[1], tasks[5]}  # two tasks of one scenario, one of another
    whole = setup.scripts

    def scripts(root, task_ids):
        facts = whole(root, task_ids)
        return {t: {"script": dataclasses.replace(f["script"], inline="answer = 0") if t in failing else f["script"]} for t, f in facts.items()}

    monkeypatch.setattr(setup, "scripts", scripts)
    evaluate_command(config, tmp_path, split="test_normal", policy="scripted")
    (row, *_) = json.loads((tmp_path / "summary.json").read_text())
    assert row["tgc"] == pytest.approx(1 - 3 / len(tasks)) and row["sgc"] == pytest.approx(1 - 2 / (len(tasks) / 3))
    (experiment,) = [p.name for p in (tmp_path / "experiments" / "outputs").iterdir()]
    run = [sys.executable, "-m", "appworld.cli", "evaluate", experiment, "test_normal"]
    done = subprocess.run(run, cwd=tmp_path, env={**os.environ, "APPWORLD_ROOT": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "experiments/outputs" / experiment / "evaluations" / "test_normal.json").read_text())
    assert experiment == "scripted-run0_test_normal"
    folder = tmp_path / "experiments/outputs" / experiment
    calls = [json.loads(line) for line in (folder / "tasks" / tasks[0] / "logs" / "lm_calls.jsonl").read_text().splitlines()]
    assert calls[0]["input"]["messages"][-1]["role"] == "user" and "```python" in calls[0]["output"]["message"]["content"]
    ours = [100 * row["tgc"], 100 * row["sgc"]]
    assert [report["aggregate"][k] for k in ("task_goal_completion", "scenario_goal_completion")] == pytest.approx(ours, abs=0.06)
    pack = [sys.executable, "-m", "appworld.cli", "pack", experiment, "test_normal", "SAGE", "skills", "tiny", "0.9 M parameters", "https://example.org"]
    done = subprocess.run(pack, cwd=tmp_path, env={**os.environ, "APPWORLD_ROOT": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (folder / "leaderboard.bundle").stat().st_size > 1000, done.stderr[-2000:]


@pytest.mark.slow
def test_a_root_laid_out_as_the_official_one(mini_root, tmp_path):
    """Without our marker and references: a model is evaluated on scenarios chosen by difficulty, by the same code."""
    path = tmp_path / "root"
    shutil.copytree(mini_root.path, path)
    (path / MARKER).unlink()
    for file in path.glob("data/tasks/*/ground_truth/references.json"):
        file.unlink()
    root = open_root(path)
    assert root.kind == "official"
    levels = sorted({root.task(t).difficulty for t in root.task_ids("train")})
    split = f"train@{levels[0]}"
    config = config_for(evaluate_config, root)
    config.world.kind = "official"
    config.model.source = "random"
    config.eval.scenarios = 1
    config.eval.keep_outputs = True
    config.sampler.max_new_tokens = 8
    evaluate_command(config, tmp_path / "run", split=split, policy="random")
    (row, *_) = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert row["split"] == split and row["tgc"] == 0.0
    (experiment,) = (tmp_path / "run" / "experiments" / "outputs").iterdir()
    assert sorted(p.name for p in (experiment / "tasks").iterdir()) == sorted(next(iter(root.scenarios(split).values())))
    with pytest.raises(SageError, match=r"official|reference"):
        evaluate_command(config, tmp_path / "scripted", split="train", policy="scripted")


def test_wrong_requests_name_the_choices(mini_root, tmp_path):
    config = config_for(evaluate_config, mini_root)
    with pytest.raises(ConfigError, match="neither 'bundled', 'random', a Hugging Face folder"):
        evaluate_command(config, tmp_path, split="dev", policy="/no/such/folder")
    with pytest.raises(SageError, match="no split 'devel'"):
        evaluate_command(config, tmp_path, split="devel", policy="bundled")
    assert not list(tmp_path.iterdir()), "a corrected command works in the same folder"
    config.eval.library = "chains"
    with pytest.raises(ConfigError, match="chain, none, reference"):
        evaluate_command(config, tmp_path / "b", split="dev", policy="scripted")


def test_a_file_of_scenarios_is_a_split(mini_root, tmp_path, capsys, shared):
    config = config_for(evaluate_config, mini_root)
    config.eval.keep_outputs = False
    scenario, ids = next(iter(mini_root.scenarios("train").items()))
    (tmp_path / "mine.txt").write_text(f"{scenario}\n")
    evaluate_command(config, tmp_path / "run", split=str(tmp_path / "mine.txt"), policy="scripted")
    (row, *_) = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (row["split"], row["tgc"], row["sgc"]) == ("mine", 1.0, 1.0)
    assert "INCOMPLETE" not in capsys.readouterr().out
    (tmp_path / "mine.txt").write_text(f"{ids[0]}\n")
    with pytest.raises(ConfigError, match=r"another measurement.*tasks"):
        evaluate_command(config, tmp_path / "run", split=str(tmp_path / "mine.txt"), policy="scripted")
    evaluate_command(config, tmp_path / "one", split=str(tmp_path / "mine.txt"), policy="scripted")
    (row,) = json.loads((tmp_path / "one" / "summary.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert (row["tgc"], row["sgc"], row["skill_use"]) == (1.0, None, None), "a single task says nothing of scenarios and of skills"


def test_another_policy_is_not_given_the_first_ones_numbers(mini_root, tmp_path, shared):
    config = config_for(evaluate_config, mini_root)
    config.eval.keep_outputs = False
    evaluate_command(config, tmp_path, split="dev", policy="scripted")
    about = json.loads((tmp_path / "eval" / "scripted" / "dev" / "arm.json").read_text())
    assert about["identity"]["root"] == mini_root.path.name, "another root's tasks are others, whatever their ids"
    (tmp_path / "eval" / "scripted").rename(tmp_path / "eval" / "bundled")
    with pytest.raises(ConfigError, match=r"another measurement.*policy.*another --workdir"):
        evaluate_command(config, tmp_path, split="dev", policy="bundled")


def test_a_stopped_evaluation_goes_on_and_a_failed_one_is_not_kept(mini_root, tmp_path, monkeypatch, shared):
    config = config_for(evaluate_config, mini_root)
    config.eval.scenarios = 2
    config.eval.keep_outputs = False
    folder = tmp_path / "eval" / "scripted" / "train"
    asked = []

    async def stopping(*args, on_scenario, done, **options):
        asked.append(dict(done))
        runs = await evaluate(*args, on_scenario=on_scenario, done=done, **options)
        if len(asked) == 1:
            lines = (folder / "part0.jsonl").read_text().splitlines(keepends=True)
            (folder / "part0.jsonl").write_text("".join(lines[:4]) + lines[4][:50])  # killed while it wrote the second scenario
            raise KeyboardInterrupt
        if len(asked) == 2:
            runs[0][0].end = End.INFRASTRUCTURE_ERROR
        return runs

    monkeypatch.setattr(arms, "evaluate", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate_command(config, tmp_path, split="train", policy="scripted")
    evaluate_command(config, tmp_path, split="train", policy="scripted")
    assert len(asked[0]) == 0 and [len(e) for e in asked[1].values()] == [3], "half a scenario is none"
    lines = (folder / "part0.jsonl").read_text().splitlines()
    assert len({json.loads(line)["task_id"] for line in lines}) == len(lines) == 6, "what was done again stands there once"
    assert not (folder / "arm.json").exists(), "an arm with an infrastructure error is not complete"
    evaluate_command(config, tmp_path, split="train", policy="scripted")
    assert (folder / "arm.json").exists() and not list(folder.glob("part*"))
    assert len(arms.read_arm(folder).runs[0]) == 6
    evaluate_command(config, tmp_path, split="train", policy="scripted")
    assert len(asked) == 3, "a complete arm is read"


def test_what_a_working_skill_is_worth(mini_root, tmp_path, capsys, shared):
    config = config_for(evaluate_config, mini_root)
    config.eval.update(reuse=True, runs=1, keep_outputs=False, scenarios=1)
    config.collect.modes = {"inline": 1.0}
    evaluate_command(config, tmp_path, split="train", policy="scripted")
    rows = json.loads((tmp_path / "summary.json").read_text())
    labels = [f"tasks 2 and 3 {which}, {kind}" for which in ("without", "with") for kind in ("greedy", "sampled (1 run)")]
    assert [(r["arm"], r["runs"], r["skill_use"], r["sgc"]) for r in rows] == [(label, 1, float(i > 1), 1.0) for i, label in enumerate(labels)]
    assert "with - without, greedy: TGC % +0.0" in capsys.readouterr().out
    tables = [[e.position for e in arms.read_arm(tmp_path / "eval" / f"scripted-{kind}" / "train").runs[0]] for kind in ("none", "reference")]
    assert tables == [[1, 2, 3], [1, 2]]


def test_arms_of_several_runs_are_compared(mini_root, tmp_path, shared):
    config = config_for(evaluate_config, mini_root)
    config.eval.runs = 1
    config.eval.keep_outputs = False
    for n in (1, 2):
        evaluate_command(config, tmp_path / str(n), split="dev", policy="scripted")
    text = compare([f"one={tmp_path}/1/eval/scripted", f"two={tmp_path}/1/eval/scripted", f"two={tmp_path}/2/eval/scripted"], "", ["dev", "train"], ["sgc"])
    assert "**dev**" in text and "**train**" not in text
    tasks = len(mini_root.task_ids("dev"))
    assert f"one, greedy: {tasks}, one, sampled (1 run): {tasks}, two, greedy: {2 * tasks}, two, sampled (2 runs): {2 * tasks}" in text
    assert "two - one, greedy: SGC % +0.0 [+0.0, +0.0]" in text and "two - one, sampled: SGC %" in text
    for given, baseline, message in (
        ([], "", "nothing to compare"), ([f"a={tmp_path}/3"], "", "NAME=FOLDER"), ([f"a={tmp_path}"], "b", "none of the arms"), ([f"a={tmp_path}"], "", "no arm has measured"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            compare(given, baseline, ["dev"], ["sgc"])

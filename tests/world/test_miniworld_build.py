"""Building: same bytes, half-built roots, two builders at once, and checks that fail when they should."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax.errors import DataRootError
from sage_jax.world.miniworld import build as building
from sage_jax.world.miniworld.build import build, is_complete, root_name
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.roots import MARKER, SMOKE_SCENARIOS, open_root

REPOSITORY = Path(__file__).resolve().parents[2]


def _files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A cache with a world of 4 scenarios, without checks."""
    cache = tmp_path_factory.mktemp("tiny")
    return cache, build(4, seed=5, cache=cache, check=False, quiet=True)


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tiny, tmp_path):
    again = build(4, seed=5, cache=tmp_path, check=False, processes=1, quiet=True)
    first, second = _files(tiny[1]), _files(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_a_finished_root_is_reused(tiny):
    cache, root = tiny
    before = (root / MARKER).stat().st_mtime_ns
    assert build(4, seed=5, cache=cache, check=False, quiet=True) == root
    assert (root / MARKER).stat().st_mtime_ns == before
    assert not list(cache.glob("*.partial-*"))


def test_a_half_built_root_is_built_again(tiny, tmp_path):
    cache = tmp_path / "cache"
    name = tiny[1].name
    (cache / name / "data" / "tasks").mkdir(parents=True)  # no marker: a build that was broken off
    (cache / f"{name}.partial-123" / "data").mkdir(parents=True)
    assert not is_complete(cache / name)
    root = build(4, seed=5, cache=cache, check=False, quiet=True)
    assert is_complete(root) and open_root(root).splits
    assert not list(cache.glob("*.partial-*"))


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    code = (f"from sage_jax.world.miniworld.build import build; "
            f"print(build(4, seed=6, cache={str(tmp_path)!r}, check=False, processes=1, quiet=True))")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [p.communicate(timeout=300)[0].strip() for p in both]
    assert [p.returncode for p in both] == [0, 0]
    assert outputs[0] == outputs[1] and is_complete(Path(outputs[0]))
    assert not list(tmp_path.glob("*.partial-*"))


def test_the_key_covers_seed_size_and_code(monkeypatch):
    names = {root_name(12, 0), root_name(12, 1), root_name(24, 0)}
    monkeypatch.setattr(building, "code_version", lambda: "other")
    assert len(names | {root_name(12, 0)}) == 4


def test_a_task_that_fails_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    """A worker that reports an error stops the build; the cache holds no root afterwards."""
    monkeypatch.setattr(building, "_ORDER", ["no_such_app"])
    with pytest.raises(DataRootError, match="no_such_app"):
        build(4, seed=7, cache=tmp_path, check=False, processes=1, quiet=True)
    assert not is_complete(tmp_path / (root_name(4, 7) + "-unchecked"))


def test_a_path_that_the_engine_misreads_is_refused(tmp_path):
    with pytest.raises(DataRootError, match="SAGE_CACHE"):
        build(4, seed=0, cache=tmp_path / "memory")


def test_building_does_not_import_the_engine_or_jax():
    code = ("import sys, sage_jax.world.miniworld.build, sage_jax.world.roots\n"
            "assert not {'appworld', 'jax', 'pydantic'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


def test_the_marker_says_what_was_built(mini_root):
    marker = json.loads((mini_root.path / MARKER).read_text())
    assert not marker["checked"] and marker["scenarios"] == SMOKE_SCENARIOS and marker["tasks"] == 3 * SMOKE_SCENARIOS


@pytest.mark.slow
def test_every_task_of_the_smoke_world_passes_its_checks(mini_root, tmp_path):
    root = build(SMOKE_SCENARIOS, seed=0, cache=tmp_path, quiet=True)
    assert json.loads((root / MARKER).read_text())["checked"]
    checked, unchecked = _files(root), _files(mini_root.path)
    assert checked.keys() == unchecked.keys()
    assert [name for name in checked if name != MARKER and checked[name] != unchecked[name]] == []  # checks leave no trace


_CHECK = """
import os, sys
os.environ["APPWORLD_ROOT"] = sys.argv[1]
import dataclasses
from sage_jax.world.miniworld.build import people_of
from sage_jax.world.miniworld.check import CheckError, check_scenario, short_questions, wrong_reference
from sage_jax.world.miniworld.generate import make_plan
from sage_jax.world.miniworld.tasks import plan_tasks
groups = {}
for task in plan_tasks(make_plan(0, people_of(12)), 12):
    groups.setdefault(task.scenario_id, []).append(task)
name, tasks = next((n, g) for n, g in groups.items() if g[0].family.kind == "question")
try:
    if sys.argv[2] == "wrong function":
        family = dataclasses.replace(tasks[0].family, function=tasks[0].family.function.replace("return ", "return 7 or "))
        check_scenario([dataclasses.replace(tasks[0], family=family)], wrong_reference(short_questions(groups), tasks[0]))
    elif sys.argv[2] == "other's reference passes":
        check_scenario(tasks[:1], tasks[0].reference)
    elif sys.argv[2] == "no-op":
        check_scenario([dataclasses.replace(tasks[0], draw=next(
            t.draw for g in groups.values() for t in g if t.family.kind == "change"))], tasks[0].reference)
except CheckError as error:
    print("CHECK", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault, said", [
    ("wrong function", "does not pass"), ("other's reference passes", "passes"), ("no-op", "doing nothing fails")])
def test_checks_name_task_and_requirement(mini_root, tmp_path, fault, said):
    (tmp_path / "data").symlink_to(mini_root.path / "data")
    done = subprocess.run([sys.executable, "-c", _CHECK, str(tmp_path), fault], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 0, done.stderr[-3000:]
    line = done.stdout[done.stdout.index("CHECK") :]
    assert said in line and "task " in line and any(t in line for s in mini_root.splits for t in mini_root.task_ids(s))


def test_ground_truth_is_complete(mini_root):
    for split in mini_root.splits:
        for task_id in mini_root.task_ids(split):
            folder = mini_root.path / "data" / "tasks" / task_id / "ground_truth"
            tests = json.loads((folder / "test_data.json").read_text())
            labels = {t["label"] for t in tests}
            assert labels == {"no_op_fail", "no_op_pass"}
            reference = load_reference(mini_root.path, task_id)
            answer = json.loads((folder / "answer.json").read_text())
            assert (answer is None) == (reference.kind == "change")


def test_references_are_only_ours(mini_root, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(mini_root.path, root)
    task_id = mini_root.task_ids("dev")[0]
    (root / "data" / "tasks" / task_id / "ground_truth" / "references.json").unlink()
    with pytest.raises(DataRootError, match="mini world"):
        load_reference(root, task_id)

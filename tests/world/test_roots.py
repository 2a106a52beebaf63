"""Data roots: what they say about tasks, and how wrong ones are refused."""

import json
import shutil
import subprocess
import sys

import pytest

from sage_jax.errors import ConfigError, DataRootError
from sage_jax.world import roots
from sage_jax.world.roots import MARKER, open_root, resolve_root


def test_splits_and_scenarios(mini_root):
    assert mini_root.kind == "miniworld"
    assert mini_root.splits == ("train", "dev", "test_normal", "test_challenge")
    assert sum(len(mini_root.scenarios(s)) for s in mini_root.splits) == 12
    for split in mini_root.splits:
        ids = mini_root.task_ids(split)
        assert all(len(v) == 3 for v in mini_root.scenarios(split).values())
        assert ids == tuple((mini_root.path / "data" / "datasets" / f"{split}.txt").read_text().split())


def test_task_holds_what_an_agent_may_know(mini_root):
    task_id = mini_root.task_ids("test_normal")[0]
    task = mini_root.task(task_id)
    assert task.scenario_id + "_1" == task_id and task.split == "test_normal"
    assert task.difficulty in (1, 2, 3)
    assert task.instruction and task.supervisor.email.endswith("@gmail.com")
    assert {"supervisor", "api_docs", "spotify"} <= set(task.app_descriptions)
    assert "admin" not in task.app_descriptions
    assert all(text and "\n" not in text for text in task.app_descriptions.values())


def test_app_descriptions_are_the_engines():
    """Compared in another process: this one stays without the engine."""
    code = "import json; from appworld.apps import APP_TO_DESCRIPTION; print(json.dumps(APP_TO_DESCRIPTION))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert roots.engine_app_descriptions() == json.loads(done.stdout.splitlines()[-1])
    assert "appworld" not in sys.modules


def test_a_file_of_ids_stands_for_a_split(mini_root, tmp_path):
    scenario, ids = next(iter(mini_root.scenarios("train").items()))
    other = mini_root.task_ids("dev")[1]
    file = tmp_path / "ids.txt"
    file.write_text(f"{scenario}\n\n{other}\n")
    assert mini_root.scenarios(str(file)) == {scenario: ids, other[:-2]: (other,)}
    file.write_text("0000000\n")
    with pytest.raises(DataRootError, match="0000000"):
        mini_root.scenarios(str(file))


def test_difficulties_choose_whole_scenarios(mini_root, tmp_path):
    whole = mini_root.scenarios("train")
    hardest = {s: max(mini_root.task(t).difficulty for t in ids) for s, ids in whole.items()}
    for levels in ("1", "2,3", "1,2,3"):
        wanted = {s: ids for s, ids in whole.items() if str(hardest[s]) in levels}
        assert mini_root.scenarios(f"train@{levels}") == wanted
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(whole))
    assert mini_root.scenarios(f"{file}@1,2,3") == whole
    for wrong in ("train@", "train@4", "train@1,", "train@easy"):
        with pytest.raises(ConfigError, match="after @ stand difficulties"):
            mini_root.scenarios(wrong)
    silent = open_root(_copy(mini_root, tmp_path / "root"))
    (silent.path / "data" / "tasks" / mini_root.task_ids("train")[4] / "ground_truth" / "metadata.json").write_text("{}")
    with pytest.raises(DataRootError, match=mini_root.task_ids("train")[4]):
        silent.scenarios("train@1")
    assert silent.scenarios("train") == whole


def test_unknown_names(mini_root):
    with pytest.raises(DataRootError, match="test_normal"):
        mini_root.scenarios("test")
    with pytest.raises(DataRootError, match="no task"):
        mini_root.task("abc_1")
    with pytest.raises(ConfigError, match="miniworld, official"):
        resolve_root("real")


def test_missing_roots_say_how_to_get_one(tmp_path, monkeypatch):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(DataRootError, match="appworld download data"):
            open_root(path)
    monkeypatch.delenv("APPWORLD_ROOT", raising=False)
    with pytest.raises(DataRootError, match="APPWORLD_ROOT"):
        resolve_root("official")


def _copy(mini_root, path):
    shutil.copytree(mini_root.path, path)
    return path


def test_half_a_root_is_refused(mini_root, tmp_path):
    path = _copy(mini_root, tmp_path / "root")
    (path / MARKER).unlink()
    with pytest.raises(DataRootError, match="half-built"):
        open_root(path)
    shutil.rmtree(path / "data" / "tasks" / mini_root.task_ids("dev")[0])
    (path / MARKER).write_text("{}")
    with pytest.raises(DataRootError, match=mini_root.task_ids("dev")[0]):
        open_root(path)
    shutil.rmtree(path / "data" / "base_dbs")
    with pytest.raises(DataRootError, match="base_dbs"):
        open_root(path)


def test_kinds_are_not_mixed_up(mini_root, tmp_path, monkeypatch):
    monkeypatch.setenv("APPWORLD_ROOT", str(mini_root.path))
    with pytest.raises(DataRootError, match="mini world"):
        resolve_root("official")
    assert resolve_root("miniworld", mini_root.path) == mini_root
    # A root without our marker and references is an official one.
    path = _copy(mini_root, tmp_path / "root")
    (path / MARKER).unlink()
    for file in path.glob("data/tasks/*/ground_truth/references.json"):
        file.unlink()
    assert resolve_root("official", path).kind == "official"
    with pytest.raises(DataRootError, match="official"):
        resolve_root("miniworld", path)


def test_cache_home(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert roots.cache_home() == tmp_path / "a"
    monkeypatch.delenv("SAGE_CACHE")
    assert roots.cache_home() == tmp_path / "b" / "sage_jax"

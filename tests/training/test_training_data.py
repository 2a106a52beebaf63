"""Scenario order and chain draws: deterministic, resumable, each at most once a step."""

import itertools
import json
import subprocess
import sys

import pytest

from configs import sage_demo
from sage_jax.errors import ConfigError
from sage_jax.training import chains
from sage_jax.training.data import draw_chain, scenario_iterator

IDS = [f"s{i}" for i in range(10)]


def test_similar_tasks_make_a_chain(mini_root):
    config = sage_demo.get_config()
    config.chain.source = "similarity"
    config.chain.length = 4
    draw = chains.source(config, mini_root)
    groups = mini_root.scenarios("train")
    tasks = {t: mini_root.task(t) for ids in groups.values() for t in ids}
    firsts = set()
    for step, scenario in itertools.product(range(3), list(groups)[:4]):
        first, *rest = draw(step, scenario)
        assert first.scenario_id == scenario and [t.task_id for t in draw(step, scenario)] == [t.task_id for t in (first, *rest)]
        near = {t: chains.jaccard(*(chains.word_bigrams(x.instruction) for x in (first, task))) for t, task in tasks.items() if t != first.task_id}
        assert [near[t.task_id] for t in rest] == sorted(near.values(), reverse=True)[:3]
        assert len({t.task_id for t in (first, *rest)}) == 4
        firsts.add(first.task_id)
    assert len(firsts) > 4, "the first task is drawn anew each step"
    assert chains.word_bigrams("Give me, give ME!") == {("give", "me"), ("me", "give")}
    config.chain.length = 99
    with pytest.raises(ConfigError, match=r"chain.length=99 is more than the \d+ tasks of split train"):
        chains.source(config, mini_root)


def test_epochs_differ_and_hold_each_scenario_once():
    it = scenario_iterator(IDS, 5, seed=3)
    epochs = [next(it) + next(it) for _ in range(3)]
    assert all(sorted(e) == IDS for e in epochs) and len({tuple(e) for e in epochs}) == 3
    assert isinstance(epochs[0][0], str)


def test_never_twice_a_step_also_across_epochs():
    it = scenario_iterator(IDS, 4, seed=0)
    for _ in range(40):
        batch = next(it)
        assert len(set(batch)) == 4


def test_resumed_order_equals_unbroken_order_also_in_a_new_process():
    it = scenario_iterator(IDS, 5, seed=7)
    first = [next(it) for _ in range(2)]
    state = it.get_state()
    rest = [next(it) for _ in range(4)]
    again = scenario_iterator(IDS, 5, seed=7)
    again.set_state(state)
    assert [next(again) for _ in range(4)] == rest and rest[:2] != first
    code = (
        "import json, sys; from sage_jax.training.data import scenario_iterator\n"
        f"it = scenario_iterator({IDS!r}, 5, seed=7); it.set_state(json.loads(sys.argv[1])); print(json.dumps([next(it) for _ in range(4)]))"
    )
    text = json.dumps(state if isinstance(state, dict) else json.loads(state))
    out = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(out.stdout) == rest


def test_impossible_batches_raise():
    with pytest.raises(ConfigError, match="11 of 10"):
        scenario_iterator(IDS, 11, seed=0)
    with pytest.raises(ConfigError, match="distinct"):
        scenario_iterator(["a", "a"], 1, seed=0)


def test_chain_draw_is_a_function_of_seed_step_and_scenario():
    tasks = ["x_1", "x_2", "x_3"]
    assert draw_chain(0, 1, "x", tasks, 2) == draw_chain(0, 1, "x", tasks[::-1], 2)
    assert draw_chain(0, 4, "abc1234", tasks, 3) == ["x_2", "x_3", "x_1"]  # pinned: no version may change it
    draws = {tuple(draw_chain(s, t, n, tasks, 2)) for s in range(3) for t in range(10) for n in ("x", "y")}
    assert len(draws) == 6 and all(len(set(d)) == 2 for d in draws)


def test_chain_draw_is_uniform_over_orders():
    counts = {}
    for step in range(1200):
        chain = tuple(draw_chain(5, step, "x", ["a", "b", "c"], 2))
        counts[chain] = counts.get(chain, 0) + 1
    assert len(counts) == 6 and min(counts.values()) > 150 and max(counts.values()) < 250


def test_chain_longer_than_the_scenario_raises():
    with pytest.raises(ConfigError, match="has 3 tasks"):
        draw_chain(0, 0, "x", ["a", "b", "c"], 4)
    with pytest.raises(ConfigError, match="twice"):
        draw_chain(0, 0, "x", ["a", "a"], 1)

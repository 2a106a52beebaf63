"""Families of the apps beside Spotify: their texts, their draws, and that challenges combine what train shows."""

import ast
import builtins
import importlib
import random
import re

import pytest

from sage_jax.world.miniworld.content import NOW
from sage_jax.world.miniworld.families.mail import thread_ids
from sage_jax.world.miniworld.families.splitwise import balances
from sage_jax.world.miniworld.family import Draw
from sage_jax.world.miniworld.generate import make_plan
from sage_jax.world.miniworld.tasks import TASKS

MODULES = ("venmo", "phone", "notes", "todos", "mail", "files", "splitwise", "combos")
FAMILIES = [f for m in MODULES for f in importlib.import_module(f"sage_jax.world.miniworld.families.{m}").FAMILIES]
NORMAL = [f for f in FAMILIES if f.role == "normal"]
CHALLENGE = [f for f in FAMILIES if f.role == "challenge"]
every = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@pytest.fixture(scope="module")
def plan():
    return make_plan(3)


@pytest.fixture(scope="module")
def same_plan():
    return make_plan(3)


def _draws(family, plan, pool, tries=60) -> list[Draw]:
    rng = random.Random(0)
    people = plan.pool(pool)
    return [d for d in (family.draw(rng, plan, rng.choice(people)) for _ in range(tries)) if d is not None]


def test_enough_families_over_enough_apps():
    assert len(NORMAL) >= 10 and len(CHALLENGE) >= 6
    assert {f.apps[0] for f in NORMAL} >= {"venmo", "phone", "simple_note", "todoist", "gmail", "file_system", "splitwise"}
    assert {f.difficulty for f in NORMAL} == {1, 2, 3} and {f.kind for f in NORMAL} == {"question", "change"}
    names = [f.name for f in FAMILIES]
    assert len(set(names)) == len(names)


@every
def test_phrasings_quote_every_parameter_verbatim(family, plan):
    assert len(family.phrasings) >= 3 and len(set(family.phrasings)) == len(family.phrasings)
    values = _draws(family, plan, "train")[0].values
    for phrasing in family.phrasings:
        assert len(phrasing.split()) <= 30
        for name, value in values.items():
            assert ("'{" + name + "}'" if isinstance(value, str) else "{" + name + "}") in phrasing
    for k in range(3):
        text = family.instruction(k, values)
        assert all((repr(v) if isinstance(v, str) else str(v)) in text for v in values.values())


@every
def test_functions_are_short_and_self_contained(family):
    tree = ast.parse(family.function)
    assert len(family.function.splitlines()) <= 12
    assert max(map(len, family.function.splitlines())) <= 120
    assert not any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(tree))
    (function,) = tree.body
    assert ast.get_docstring(function) and "\n" not in ast.get_docstring(function)
    assert all(a.annotation is not None for a in function.args.args) and 1 <= len(function.args.args) <= 2
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    stored |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in n.args}
    loaded = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert loaded - stored - set(dir(builtins)) <= {"apis"}


@every
def test_apps_are_those_that_the_function_logs_into(family):
    assert tuple(re.findall(r"apis\.(\w+)\.login\(", family.function)) == family.apps
    assert family.api in {f"{a}.{n}" for a, n in re.findall(r"apis\.(\w+)\.(\w+)\(", family.function)}


@every
@pytest.mark.parametrize("pool", ["train", "dev", "test"])
def test_every_pool_has_three_different_tasks(family, plan, pool):
    draws = _draws(family, plan, pool)
    assert len({str(d.values) for d in draws}) >= TASKS
    for draw in draws:
        assert tuple(draw.values) == family.parameters
        assert (draw.answer is None) == (family.kind == "change") == bool(draw.changes)
    if family.kind == "question":
        assert len({str(d.answer) for d in draws}) >= TASKS, "frozen arguments must not pass"


@every
def test_draws_depend_on_the_seed_only(family, plan, same_plan):
    assert [repr(d) for d in _draws(family, plan, "train", 10)] == [repr(d) for d in _draws(family, same_plan, "train", 10)]


@pytest.mark.parametrize("family", CHALLENGE, ids=lambda f: f.name)
def test_challenges_combine_what_train_shows(family):
    def parts(f):
        return set(re.findall(r"apis\.\w+\.\w+", f.function)) | {"call " + n for n in re.findall(r"\b(max|min|sum|len)\(", f.function)}

    known = set().union(*(parts(f) for f in NORMAL))
    assert parts(family) <= known
    body = family.function.split("\n", 2)[2]
    assert body not in {f.function.split("\n", 2)[2] for f in NORMAL}, "train shows this very function"


def test_nothing_happens_after_now(plan):
    moments = [t.created for t in (*plan.transactions, *plan.messages, *plan.mails)]
    assert max(moments) < NOW


def test_balances_are_antisymmetric(plan):
    for person in plan.people:
        for other, amount in balances(plan, person).items():
            assert balances(plan, plan.person(other)).get(person.id, 0) == -amount


def test_thread_ids_follow_the_order_of_writing(plan):
    rows = sorted(row for person in plan.people for row in thread_ids(plan, person).values())
    assert rows == list(range(1, sum(1 + len(m.recipient_ids) for m in plan.mails) + 1))

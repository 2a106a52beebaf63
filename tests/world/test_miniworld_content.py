"""Content, families and task plans of the mini world, without the engine."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sage_jax.world.miniworld import words
from sage_jax.world.miniworld.families import all_families, families_of
from sage_jax.world.miniworld.family import Draw, Family, skill_source
from sage_jax.world.miniworld.generate import FULL_PEOPLE, MIN_PEOPLE, make_plan
from sage_jax.world.miniworld.tasks import plan_tasks, split_sizes


@pytest.fixture(scope="module")
def plan():
    return make_plan(0, FULL_PEOPLE)


@pytest.fixture(scope="module")
def tasks(plan):
    return plan_tasks(plan, 180)


@pytest.mark.parametrize("people", [MIN_PEOPLE, FULL_PEOPLE])
def test_enough_content(people):
    plan = make_plan(1, people)
    assert len(plan.people) >= 12
    assert len(plan.songs) >= 200
    assert len(plan.playlists) >= 60 and len(plan.albums) >= 60
    assert sum(map(len, (plan.notes, plan.contacts, plan.messages, plan.todos, plan.mails, plan.files, plan.expenses))) > 500
    assert all(p.passwords.keys() >= {"spotify", "venmo", "phone"} for p in plan.people)
    assert len(plan.transactions) + len(plan.requests) >= 400


def test_plan_depends_on_seed_only():
    assert make_plan(3, MIN_PEOPLE) == make_plan(3, MIN_PEOPLE)
    assert make_plan(3, MIN_PEOPLE).songs != make_plan(4, MIN_PEOPLE).songs


def test_plans_do_not_depend_on_the_order_of_sets():
    """Processes of a build hash strings differently; they must still draw the same tasks."""
    code = ("import hashlib\n"
            "from sage_jax.world.miniworld.generate import make_plan\n"
            "from sage_jax.world.miniworld.tasks import plan_tasks\n"
            "tasks = plan_tasks(make_plan(0, 28), 24)\n"
            "print(hashlib.sha256(repr([(t.task_id, t.person, t.draw, t.instruction) for t in tasks]).encode()).hexdigest())")
    digests = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                              ).stdout for seed in "123"}
    assert len(digests) == 1 and len(digests.pop()) == 65


def test_titles_are_unique_and_short(plan):
    titles = [x.title for x in (*plan.songs, *plan.albums, *plan.playlists, *plan.notes, *plan.todos)]
    assert len(set(titles)) == len(titles)
    assert max(map(len, titles)) <= words.MAX_TITLE
    assert all(t.isascii() for t in titles)


def test_ids_are_positions(plan):
    for rows in (plan.people, plan.songs, plan.playlists, plan.transactions, plan.requests, plan.notes, plan.mails, plan.files,
                 plan.expenses, plan.todos):
        assert [r.id for r in rows] == list(range(1, len(rows) + 1))


def test_own_collections_fit_one_page(plan):
    for p in plan.people:
        for rows in (plan.playlists_of(p), plan.library_songs[p.id], plan.library_albums[p.id], plan.liked_songs[p.id],
                     plan.notes_of(p), plan.contacts_of(p), plan.projects_of(p)):
            assert 0 < len(rows) <= 20


def test_pools_are_disjoint_and_large_enough():
    for people in (MIN_PEOPLE, FULL_PEOPLE):
        plan = make_plan(0, people)
        sizes = [len(plan.pool(p)) for p in ("train", "dev", "test")]
        assert sum(sizes) == people and min(sizes) >= 3


def test_too_few_people_is_refused():
    with pytest.raises(ValueError, match="28 to"):
        make_plan(0, 5)


def test_split_sizes():
    assert split_sizes(180) == {"train": 96, "dev": 12, "test_normal": 48, "test_challenge": 24}
    for n in (4, 12, 31, 720):
        sizes = split_sizes(n)
        assert sum(sizes.values()) == n and min(sizes.values()) >= 1
    with pytest.raises(ValueError, match="at least 4"):
        split_sizes(3)


def test_families_cover_what_is_promised():
    normal, challenge = families_of("normal"), families_of("challenge")
    assert {f.kind for f in normal} == {"question", "change"}
    assert {f.difficulty for f in normal} == {1, 2, 3}
    assert {f.name for f in normal}.isdisjoint(f.name for f in challenge)
    assert all(len(f.phrasings) >= 3 for f in all_families())
    assert len({f.apps[0] for f in all_families()}) >= 6
    assert len(normal) >= 16 and len(challenge) >= 8


@pytest.mark.parametrize("family", all_families(), ids=lambda f: f.name)
def test_functions_are_short_and_self_contained(family):
    (node,) = ast.parse(family.function).body
    assert ast.get_docstring(node)
    assert all(a.annotation is not None for a in node.args.args) and node.returns is not None
    assert len(family.function.splitlines()) <= 13
    assert not any(isinstance(n, (ast.Import, ast.ImportFrom, ast.Try)) for n in ast.walk(node))
    assert all(f"{{{p}}}" in phrasing for p in family.parameters for phrasing in family.phrasings)


def test_tasks_of_a_scenario_differ(tasks):
    groups = {}
    for t in tasks:
        groups.setdefault(t.scenario_id, []).append(t)
    assert len(groups) == 180
    for group in groups.values():
        assert [t.task_id[-2:] for t in group] == ["_1", "_2", "_3"]
        assert len({t.family.name for t in group}) == 1
        assert len({t.person.id for t in group}) == 3
        assert len({str(t.draw.values) for t in group}) == 3


def test_test_people_and_challenge_families_are_unseen(tasks):
    by_split = {s: [t for t in tasks if t.split == s] for s in ("train", "dev", "test_normal", "test_challenge")}
    train_people = {t.person.id for t in by_split["train"]}
    train_families = {t.family.name for t in by_split["train"]}
    for split in ("dev", "test_normal", "test_challenge"):
        assert train_people.isdisjoint(t.person.id for t in by_split[split])
    assert {t.family.name for t in by_split["test_normal"]} <= train_families
    assert {t.family.name for t in by_split["dev"]} <= train_families
    assert train_families.isdisjoint(t.family.name for t in by_split["test_challenge"])


@pytest.mark.parametrize("scenarios", [12, 45])
def test_small_worlds_test_what_train_shows(scenarios):
    tasks = plan_tasks(make_plan(0, MIN_PEOPLE if scenarios <= 24 else FULL_PEOPLE), scenarios)
    train = {t.family.name for t in tasks if t.split == "train"}
    assert {t.family.name for t in tasks if t.split in ("dev", "test_normal")} <= train


def test_large_train_does_not_run_out(plan):
    assert len(plan_tasks(plan, 720)) == 2160


def test_instructions_quote_the_arguments_and_are_short(tasks):
    for t in tasks:
        assert all(str(v) in t.instruction for v in t.draw.values.values())
        assert len(t.instruction.split()) <= 30


def _family(body: str, signature: str = "pick(song: str, n: int) -> str", draw=lambda rng, plan, person: None) -> Family:
    return Family(skill_source(signature, "Docs.", "spotify", body), ("'{song}' {n}",) * 3, draw, ("spotify",), 1,
                  "spotify.show_song")


def test_forms_of_a_reference():
    family = _family("songs = [song, n, song]\nreturn songs[n]")
    values = {"song": "Bob's Rain", "n": 2}
    assert family.call(values) == 'pick("Bob\'s Rain", 2)'
    assert family.inline(values).splitlines()[-2:] == ['songs = ["Bob\'s Rain", 2, "Bob\'s Rain"]', "answer = songs[2]"]
    assert family.kind == "question"
    assert "song" not in family.inline(values).splitlines()[0]
    namespace = {}
    code = "\n".join(family.inline(values).splitlines()[-2:])
    exec(code, namespace)  # our own two lines
    assert namespace["answer"] == "Bob's Rain"


def test_change_has_no_answer():
    family = _family("for i in range(n):\n    print(song)", "show(song: str, n: int) -> None")
    assert family.kind == "change"
    assert "answer" not in family.inline({"song": "a", "n": 1})


@pytest.mark.parametrize("body, signature", [
    ("if n:\n    return song\nreturn n", "f(song: str, n: int) -> str"),
    ("print(song)", "f(song: str, n: int) -> str"),
    ("return song", "f(song: str, n: int) -> None"),
])
def test_functions_that_cannot_be_inlined_are_refused(body, signature):
    with pytest.raises(ValueError, match="return"):
        _family(body, signature)


def test_a_draw_that_does_not_fit_its_function_is_refused(plan, monkeypatch):
    family = _family("return song", draw=lambda rng, plan, person: Draw({"n": 1, "song": "a"}, person.name))
    monkeypatch.setattr("sage_jax.world.miniworld.tasks.families_of", lambda role: (family,))
    with pytest.raises(ValueError, match="does not fit"):
        plan_tasks(plan, 4)

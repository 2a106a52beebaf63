"""Library, `defines` check, use detectors."""

import asyncio
import dataclasses
import json
import random

import pytest

from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.rl import rewards
from sage_jax.skills import usage, verify
from sage_jax.skills.extract import extract
from sage_jax.skills.library import Library, skill_from_json, skill_to_json
from sage_jax.skills.record import Origin
from sage_jax.world.types import InstallVerdict


def skills(code, position=1):
    return extract([(0, code)], Origin(f"abc1234_{position}", 0, "r", position), created=1.0).skills


def f(body, position=1):
    return skills(f"def f(x):\n    return {body}\n", position)[0]


def turn(code, calls=()):
    return Turn(f"```python\n{code}\n```", code, "", False, False, tuple(calls), "block", 5)


def episode(position, codes, defined=(), calls=()):
    turns = [turn(c, calls if n == 0 else ()) for n, c in enumerate(codes)]
    return Episode(f"abc1234_{position}", "abc1234", "train", 1, "", "r", position, [], turns, End.COMPLETED, None, (), (), tuple(defined), None)


def test_same_name_other_body_is_a_revision_and_nothing_is_lost():
    library = Library()
    one, two = f("x+1"), f("x + 2", 2)
    assert library.add([one]).added == (one,)
    report = library.add([two])
    assert [s.version for s in report.revisions] == [2] and report.revisions[0].parents == (one.id,)
    assert library.active() == [report.revisions[0]] and len(library) == 2
    assert library[one.id].source == one.source and library[two.id].source == two.source
    again = library.add([f("x  +  2  # other spacing")])
    assert not again.added and again.duplicates == report.revisions and len(library) == 2


def test_a_superseded_body_written_again_is_offered_again():
    library = Library([f("x+1"), f("x+2")])
    report = library.add([f("x+1", 3)])
    assert [s.id for s in report.restored] == [f("x+1").id] == [s.id for s in library.active()]
    third = library.add([f("x+3")]).added[0]
    assert third.version == 3 and third.parents == (f("x+1").id,)


def test_insertion_order_does_not_change_what_an_id_returns():
    a, b = f("x+1"), f("x+2")
    assert Library([a, b])[a.id].source == Library([b, a])[a.id].source


def test_uses_are_counted_and_survive_json():
    library = Library([f("x+1"), f("x+2"), *skills("def g():\n    return 1\n")])
    g = next(s.id for s in library if s.name == "g")
    library.record_use(g, True)
    library.record_use(g, False)
    assert (library[g].uses, library[g].successes) == (2, 1)
    assert [skill_from_json(json.loads(json.dumps(skill_to_json(s)))) for s in library] == list(library)
    with pytest.raises(KeyError, match="nothing@0"):
        library.record_use("nothing@0", True)


class Interpreter:
    """A runner that defines skills in a namespace of its own."""

    async def install(self, skills):
        verdicts = []
        for skill in skills:
            try:
                exec(skill.code, {})
                verdicts.append(InstallVerdict(skill.id, True))
            except Exception as e:
                verdicts.append(InstallVerdict(skill.id, False, repr(e)))
        return verdicts


def test_defines_check():
    good, bad = skills("def f():\n    return 1\ndef g(x=len(5)):\n    return 2\n")
    result = asyncio.run(verify.defines([good, bad], Interpreter()))
    assert [s.verified for s in result.skills] == [True, False]
    assert result.passed == (dataclasses.replace(good, verified=True),)
    assert "TypeError" in result.refused[0].reason
    assert Library(result.skills).active() == list(result.passed)


def test_defines_check_needs_a_verdict_a_skill():
    class Silent:
        async def install(self, skills):
            return []

    with pytest.raises(ValueError, match="verdicts"):
        asyncio.run(verify.defines([f("x")], Silent()))


def test_called_needs_a_call_of_an_id_from_an_earlier_episode():
    skill = f("x+1")
    chain = [episode(1, ["def f..."], [skill], calls=[skill.id]), episode(2, ["f(1)"]), episode(3, ["y=g(1)"], calls=[skill.id, "other@1"])]
    assert usage.called(chain) == [usage.Use(3, 1, skill.id)]  # not itself, not by name, not an unknown id
    assert usage.matrix(chain, usage.called(chain)) == [[False] * 3, [False] * 3, [True, False, False]]
    assert usage.called(chain[::-1]) == usage.called(chain)


def test_lexical_is_the_reference_rule():
    skill = skills("def top(x):\n    return x\n")[0]

    def use(code):
        return usage.lexical([episode(1, ["..."], [skill]), episode(2, [code])])

    assert use("print(top(1))") == [usage.Use(2, 1, skill.id)]
    assert use("# stop") == [usage.Use(2, 1, skill.id)]  # a substring is enough
    assert use("def top(x):\n  return 1\ntop(1)") == []
    assert use("print(1)") == []
    assert usage.lexical([episode(1, ["top"], [skill]), episode(2, [None])]) == []


def test_a_revision_belongs_to_the_reviser():
    one, two = f("x+1"), f("x+2", 2)
    chain = [episode(1, ["."], [one]), episode(2, ["."], [two]), episode(3, ["f(1)"], calls=[two.id])]
    assert usage.lexical(chain) == [usage.Use(2 + 1, 2, two.id)] == usage.called(chain)


def test_a_refused_revision_owns_nothing():
    one, two = f("x+1"), dataclasses.replace(f("x+2", 2), verified=False)
    chain = [episode(1, ["."], [one]), episode(2, ["."], [two]), episode(3, ["f(1)"], calls=[one.id])]
    assert usage.lexical(chain) == [usage.Use(3, 1, one.id)] == usage.called(chain)
    assert chain[1].kept == () and chain[0].kept == (one,)


def test_the_same_text_written_again_stays_with_its_first_writer():
    chain = [episode(1, ["."], [f("x+1")]), episode(2, ["."], [f("x + 1", 2)]), episode(3, ["f(1)"], calls=[f("x+1").id])]
    assert [u.origin for u in usage.called(chain)] == [1] == [u.origin for u in usage.lexical(chain) if u.user == 3]


def test_the_reward_pays_for_the_same_uses():
    draw = random.Random(0)
    bodies = [f(f"x+{k}") for k in range(3)] + list(skills("def g():\n    return 1\n"))
    for _ in range(200):
        chain = []
        for k in range(1, 5):
            codes = [draw.choice(["f(1)", "g()", "def f(x): pass\nf(2)", "1"]) for _ in range(2)]
            chain.append(episode(k, codes, draw.sample(bodies, draw.randint(0, 2)), [s.id for s in draw.sample(bodies, draw.randint(0, 2))]))
        for name in usage.DETECTORS:
            assert usage.matrix(chain, usage.detector(name)(chain)) == rewards.usage(chain, name).tolist()


def test_unknown_detector_and_equal_positions_raise():
    with pytest.raises(ValueError, match="called"):
        usage.detector("magic")
    with pytest.raises(ValueError, match="positions"):
        usage.called([episode(1, []), episode(1, [])])

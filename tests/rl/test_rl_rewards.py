"""Rewards against an independent reading of the formulas, and detectors on hand-made episodes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.errors import ConfigError
from sage_jax.rl.rewards import ChainRecord, chain_record, rewards, usage
from sage_jax.skills.record import Origin, Skill
from sage_jax.world.types import Judgement


def skill(name, id_):
    origin = Origin("t_1", 0, "r", 1)
    return Skill(id_, name, f"def {name}(): ...", (), (), (), f"{name}()", "", origin)


def episode(position, codes=(), calls=(), defined=(), passed=2, total=2, end=End.COMPLETED):
    turns = [Turn("", code, "", False, False, tuple(calls), "block", 1) for code in codes]
    judgement = Judgement(passed, total, passed == total, end == End.COMPLETED, (), ())
    return Episode(
        f"t_{position}", "t", "train", 1, "", "r", position, [], turns, end, judgement, (), (), tuple(defined), None
    )


def record(r, s, used=(), no_code=None, valid=True):
    k = len(r)
    u = np.zeros((k, k), bool)
    for j, i in used:
        u[j - 1, i - 1] = True
    return ChainRecord(tuple(r), tuple(s), tuple(no_code or [False] * k), u, valid)


def plain_skill_integrated(r, s, u):
    """The formula by loops, 1-based as it is written."""
    k_max = len(r)
    result = []
    for k in range(1, k_max + 1):
        written = [s[i - 1] * u[i - 1][k - 1] for i in range(k + 1, k_max + 1)]
        used = [u[k - 1][i - 1] for i in range(1, k)]
        result.append(r[k - 1] + s[k - 1] * max(written, default=0) + s[k - 1] * max(used, default=0))
    return result


def test_two_tasks_all_cases():
    for s1, s2, u in itertools.product((0, 1), repeat=3):
        r = (0.5 + 0.5 * s1, 0.25 + 0.75 * s2)
        got = rewards(record(r, (s1, s2), [(2, 1)] if u else []))
        np.testing.assert_allclose(got, [r[0] + s1 * s2 * u, r[1] + s2 * u])


@given(st.integers(1, 5).flatmap(lambda k: st.tuples(
    st.lists(st.floats(0, 1), min_size=k, max_size=k),
    st.lists(st.integers(0, 1), min_size=k, max_size=k),
    st.lists(st.lists(st.booleans(), min_size=k, max_size=k), min_size=k, max_size=k))))  # fmt: skip
def test_any_length_against_loops(case):
    r, s, u = case
    u = np.tril(np.array(u, bool), -1)
    got = rewards(ChainRecord(tuple(r), tuple(s), (False,) * len(r), u))
    np.testing.assert_allclose(got, plain_skill_integrated(r, s, u.astype(int).tolist()))


def test_chain_and_outcome():
    np.testing.assert_allclose(rewards(record((1, 1, 0.5), (1, 1, 0)), "outcome"), [1, 1, 0.5])
    np.testing.assert_allclose(rewards(record((1, 1, 0.5), (1, 1, 0)), "chain"), [1, 1, 0.5])
    np.testing.assert_allclose(rewards(record((1, 1, 1), (1, 1, 1)), "chain"), [2, 2, 2])


def test_no_code_is_penalised_and_pays_nobody():
    for kind in ("skill_integrated", "outcome", "chain"):
        got = rewards(record((1, 0), (1, 1), [(2, 1)], no_code=[False, True]), kind, no_code_reward=-0.5)
        np.testing.assert_allclose(got, [1, -0.5])
    assert rewards(record((0.0,), (0,), no_code=[True]))[0] == -1.0


def test_invalid_rollout_has_no_reward():
    assert np.isnan(rewards(record((1, 1), (1, 1), valid=False))).all()
    assert not chain_record([episode(1), episode(2, end=End.INFRASTRUCTURE_ERROR)]).valid


def test_wrong_names_and_shapes_raise():
    with pytest.raises(ConfigError, match="skill_integrated"):
        rewards(record((1,), (1,)), "skils")
    with pytest.raises(ConfigError, match="lexical"):
        usage([episode(1)], "semantic")
    with pytest.raises(ValueError, match="cannot be used before"):
        record((1, 1), (1, 1), [(1, 2)])
    with pytest.raises(ValueError, match="order"):
        usage([episode(2), episode(1)])


def test_called_pays_the_owner_of_the_called_version():
    first, second = skill("f", "f@1"), skill("f", "f@2")
    chain = [episode(1, defined=[first]), episode(2, defined=[second]), episode(3, ["f()"], calls=["f@2"])]
    np.testing.assert_array_equal(usage(chain), [[0, 0, 0], [0, 0, 0], [0, 1, 0]])
    same_again = [episode(1, defined=[first]), episode(2, defined=[first]), episode(3, ["f()"], calls=["f@1"])]
    np.testing.assert_array_equal(usage(same_again), [[0, 0, 0], [0, 0, 0], [1, 0, 0]])


def test_a_skill_of_one_s_own_does_not_count():
    chain = [episode(1, defined=[skill("f", "f@1")]), episode(2, ["def f(): ...\nf()"], defined=[skill("f", "f@2")])]
    assert not usage(chain, "called").any()
    assert not usage(chain, "lexical").any()


def test_lexical_is_a_substring_rule():
    writer = episode(1, defined=[skill("top", "top@1")])
    assert usage([writer, episode(2, ["x = stop()"])], "lexical")[1, 0]  # that is what the reference does
    assert not usage([writer, episode(2, ["def top(): ...\ntop()"])], "lexical")[1, 0]
    assert usage([writer, episode(2, ["def top(): ...", "top()"])], "lexical")[1, 0]
    assert not usage([writer, episode(2, [None])], "lexical")[1, 0]
    revised = [writer, episode(2, ["pass"], defined=[skill("top", "top@2")]), episode(3, ["top()"])]
    np.testing.assert_array_equal(usage(revised, "lexical")[2], [0, 1, 0])


def test_record_of_episodes_reads_outcomes():
    chain = [episode(1, passed=1, total=4), episode(2, passed=4, total=4), episode(3, end=End.NO_CODE, passed=4, total=4)]
    got = chain_record(chain)
    assert got.r == (0.25, 1.0, 0.0) and got.s == (0, 1, 0) and got.no_code == (False, False, True) and got.valid

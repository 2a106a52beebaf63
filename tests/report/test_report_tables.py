"""The figures of the tables, recomputed by hand on small sets."""

import io
import math

import numpy as np
import pytest
from rich.console import Console

from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.report import tables
from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin
from sage_jax.world.types import Judgement

SKILL = extract([(0, "def f(x):\n    return x\n")], Origin("t", 0, "r", 1), created=0.0).skills[0]


def episode(scenario, position, solved, use=False, turns=2, difficulty=1, split="dev", rollout="run0", end=None, passed=None):
    end = end or (End.COMPLETED if solved else End.MAX_TURNS)
    calls = (SKILL.id,) if use else ()
    made = [Turn("", "f(1)" if use else "x", "", False, False, calls, "block", 10) for _ in range(turns)]
    judgement = None if end is End.INFRASTRUCTURE_ERROR else Judgement(passed if passed is not None else 2 * solved, 2, bool(solved), end is End.COMPLETED, (), ())
    defined = (SKILL,) if position == 1 else ()
    return Episode(f"{scenario}_{position}", scenario, split, difficulty, "", f"{rollout}/{scenario}", position, [], made, end, judgement, (), (), defined, None)


def run(*patterns, **kw):
    """"ab": one letter a task. S solved, U solved with a skill, u used but not solved, x failed, E infrastructure error."""
    made = []
    for n, pattern in enumerate(patterns):
        for k, c in enumerate(pattern, 1):
            made.append(episode(f"s{n}", k, c in "SU", c in "uU", end=End.INFRASTRUCTURE_ERROR if c == "E" else None, **kw))
    return made


def test_shares_by_hand():
    row = tables.score([run("SUU", "SUx", "xux")], "SAGE")
    assert row.tgc == pytest.approx(5 / 9) and row.sgc == pytest.approx(1 / 3)
    assert row.skill_use == pytest.approx(4 / 6) and row.solved_with_skill == pytest.approx(3 / 6)
    assert row.turns == 2 and row.tokens == 20 and row.complete and row.scenarios == 3


def test_tests_passed_without_completion_is_no_success():
    e = episode("s0", 1, solved=True, end=End.MAX_TURNS)
    assert e.judgement.success and tables.score([[e]]).tgc == 0


def test_a_call_of_a_skill_from_elsewhere_is_no_use():
    episodes = run("SUU")
    episodes[0].defined = ()
    assert tables.score([episodes]).skill_use == 0


def test_a_given_skill_that_is_called_is_used():
    episodes = run("SUS")
    episodes[0].defined = ()
    for e in episodes:
        e.offered = (SKILL,)
    assert tables.score([episodes]).skill_use == pytest.approx(1 / 3), "the first task had it too and did without"
    episodes[0].turns = episodes[1].turns
    assert tables.score([episodes]).skill_use == pytest.approx(2 / 3)
    assert tables.score([run("SUS")]).skill_use == 0.5, "a first task without a given skill is not counted"


def test_infrastructure_errors_are_left_out_counted_and_said_first():
    row = tables.score([run("SSS", "SE")], "base", asked=6)
    assert (row.scored, row.errors, row.asked) == (4, 1, 6)
    assert row.tgc == 1 and row.sgc == 1 and row.scenarios == 1
    text = tables.markdown([row])
    assert text.splitlines()[0] == "INCOMPLETE. base: 4 of 6 tasks scored (1 infrastructure errors, 1 never run)."
    assert "4 of 6" in text.splitlines()[4]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.rich_table([row]))
    assert "INCOMPLETE" in console.export_text()
    assert tables.first_line([tables.score([run("SSS")], "base")]).startswith("All tasks scored")


def test_runs_are_averaged_with_their_spread():
    row = tables.score([run("SSS"), run("xxx")], "SAGE")
    assert row.tgc == 0.5 and row.spread["tgc"] == pytest.approx(np.std([0, 1], ddof=1)) and row.asked == 6
    assert "50.0 ± 70.7" in tables.markdown([row])
    assert math.isnan(tables.score([run("SSS")]).spread["tgc"])


def test_breakdown_by_difficulty():
    episodes = run("SSS") + [episode("z0", k, False, difficulty=2) for k in (1, 2, 3)]
    rows = {(r.split, r.difficulty): r for r in tables.breakdown([episodes], "SFT", "my ids", asked=6)}
    assert rows["my ids", None].tgc == 0.5 and rows["my ids", 1].sgc == 1 and rows["my ids", 2].sgc == 0
    assert all(r.complete for r in rows.values())
    alone = tables.breakdown([run("SSS")], "SFT", "dev", asked=4)
    assert len(alone) == 1 and not alone[0].complete


def test_a_task_twice_in_a_run_raises():
    with pytest.raises(ValueError, match="more than once"):
        tables.score([run("SSS") + run("SSS")])


def test_paired_difference():
    first, second = [run(*["xxx"] * 10, "SSS")], [run(*["SSS"] * 5, *["xxx"] * 5, "SSS", "SSS")]
    d = tables.paired_difference(first, second, "sgc", seed=1)
    assert d.scenarios == 11 and d.unpaired == 1 and d.mean == pytest.approx(5 / 11)
    assert 0 < d.low < d.mean < d.high < 1
    assert d == tables.paired_difference(first, second, "sgc", seed=1)
    assert "SGC % +45.5 [" in tables.difference_text(d) and "1 in one arm only" in tables.difference_text(d)
    same = tables.paired_difference(first, first, "sgc", seed=1)
    assert (same.mean, same.low, same.high) == (0, 0, 0)
    with pytest.raises(ValueError, match="solved_with_skill"):
        tables.paired_difference(first, second, "luck", seed=1)


def test_bootstrap_interval_agrees_with_theory():
    values = np.random.default_rng(0).normal(1.0, 2.0, 400)
    low, high = tables.bootstrap_interval(values, seed=3)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.03) and high == pytest.approx(values.mean() + error, abs=0.03)


def test_nothing_measured_is_a_dash_not_a_zero():
    assert "–" in tables.cells(tables.score([[episode("s0", 1, True)]]))

"""Group advantages: formulas, explicit groups, ties, invalid rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_jax.errors import ConfigError
from sage_jax.rl.advantages import ADVANTAGES, chain_advantages, group_advantages, signal_share


def test_formulas():
    r = np.array([1.0, 0.0, 0.5, 0.25])
    m = r.mean()
    np.testing.assert_allclose(group_advantages(r, [7] * 4, kind="mean"), r - m, rtol=1e-6)
    loo = [r[i] - np.delete(r, i).mean() for i in range(4)]
    np.testing.assert_allclose(group_advantages(r, [7] * 4, kind="loo"), loo, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(r, [7] * 4, kind="std"), (r - m) / (r.std(ddof=1) + 1e-6), rtol=1e-6)


def test_groups_by_id_not_by_stride():
    ids = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    r = np.array([1, 0, 0, 1, 1, 1, 1, 0, 1], float)
    for kind in ADVANTAGES:
        a = group_advantages(r, ids.tolist(), kind=kind)
        assert (a[ids == 1] == 0).all()
        assert abs(a[ids == 0].sum()) < 1e-6 and abs(a[ids == 2].sum()) < 1e-6 and a[0] > 0
        order = np.random.default_rng(0).permutation(9)
        np.testing.assert_array_equal(group_advantages(r[order], ids[order].tolist(), kind=kind), a[order])


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 13), st.sampled_from(ADVANTAGES))
def test_ties_are_exactly_zero(constant, n, kind):
    assert (group_advantages([constant] * n, ["g"] * n, kind=kind) == 0).all()


def test_ties_that_differ_below_float32_are_ties():
    assert (group_advantages([0.1 + 0.2, 0.3, 0.3], [0] * 3, kind="std") == 0).all()


def test_crashed_rollouts_are_no_samples():
    assert (group_advantages([np.nan, -1, -1, 0.0], [0] * 4, [False, True, True, False]) == 0).all()
    for kind in ADVANTAGES:
        a = group_advantages([np.nan, 1, 0, 0], [0] * 4, [False, True, True, True], kind)
        assert a[0] == 0
        np.testing.assert_array_equal(a[1:], group_advantages([1, 0, 0], [0] * 3, kind=kind))


def test_one_row_gives_zero_not_nan():
    assert group_advantages([0.7], ["x"], kind="std").tolist() == [0.0]


def test_scaling_one_group_leaves_the_others_alone():
    r, g = np.array([1, 0, 0.3, 0.9, 0.1, 0.5]), [0, 0, 0, 1, 1, 1]
    a = group_advantages(r, g, kind="std")
    b = group_advantages(r * np.array([10, 10, 10, 1, 1, 1]), g, kind="std")
    np.testing.assert_array_equal(a[3:], b[3:])


def test_per_chain_position():
    rows = [np.array([1.0, 0.0]), np.array([0.0, 0.5]), np.array([5.0, 5.0]), np.array([np.nan, np.nan])]
    a = chain_advantages(rows, ["c", "c", "d", "c"], [True, True, True, False])
    np.testing.assert_allclose(a[0], [0.5, -0.25])
    np.testing.assert_allclose(a[1], [-0.5, 0.25])
    assert (a[2] == 0).all() and (a[3] == 0).all()


def test_weight_of_negative_advantages():
    rows = [np.array([1.0, 0.0]), np.array([0.0, 0.5])]
    a = chain_advantages(rows, ["c", "c"], [True, True], negative_weight=0.2)
    np.testing.assert_allclose(a[0], [0.5, -0.05], rtol=1e-6)
    np.testing.assert_allclose(a[1], [-0.1, 0.25], rtol=1e-6)
    assert [x.tolist() for x in chain_advantages(rows, ["c", "c"], [True, True], negative_weight=0.0)] == [[0.5, 0.0], [0.0, 0.25]]


def test_signal_share():
    assert signal_share([0.5, -0.5, 0, 0], ["a", "a", "b", "b"]) == 0.5
    assert signal_share([], []) == 0.0


def test_refusals():
    with pytest.raises(ConfigError, match="loo"):
        group_advantages([1.0], [0], kind="median")
    with pytest.raises(ValueError, match="finite"):
        group_advantages([np.nan, 1.0], [0, 0])
    with pytest.raises(ValueError, match="group ids"):
        group_advantages([1.0, 2.0], [0])

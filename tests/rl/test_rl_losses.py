"""The loss against numpy and finite differences, masks, settings that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.errors import ConfigError
from sage_jax.rl import masked
from sage_jax.rl.losses import LossConfig, check_sampling, clipped_loss


def plain_loss(new, old, adv, low, high):
    ratio = np.exp(new - old)
    return -np.minimum(ratio * adv, np.clip(ratio, 1 - low, 1 + high) * adv)


@pytest.mark.parametrize(
    "ratio, advantage, loss, flows, clipped", [(1.5, 1, -1.2, 0, 1), (1.5, -1, 1.5, 1, 0), (0.5, 1, -0.5, 1, 0), (0.5, -1, 0.8, 0, 1)]
)
def test_clip_table(ratio, advantage, loss, flows, clipped):
    one = jnp.ones((1,))
    def f(lp):
        return clipped_loss(lp, jnp.zeros(1), advantage * one, one, 0.2, 0.2)
    value, _, was_clipped = f(jnp.log(ratio) * one)
    gradient = jax.grad(lambda lp: f(lp)[0].sum())(jnp.log(ratio) * one)
    np.testing.assert_allclose(value, [loss], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-ratio * advantage * flows], atol=1e-6)
    assert was_clipped[0] == clipped


def test_ratio_one_still_has_a_gradient():
    one = jnp.ones((1,))
    def f(lp):
        return clipped_loss(lp, jax.lax.stop_gradient(lp), 2 * one, one, 0.2, 0.2)[0].sum()
    value, gradient = jax.value_and_grad(f)(-1.3 * one)
    assert float(value) == -2 and gradient.tolist() == [-2.0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.9), st.floats(0, 2))
def test_against_numpy(seed, low, high):
    rng = np.random.default_rng(seed)
    new, old, adv = rng.normal(size=(3, 5)), rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
    mask = rng.integers(0, 2, (3, 5)).astype(np.float32)
    got, ratio, _ = clipped_loss(*(jnp.asarray(a, jnp.float32) for a in (new, old, adv, mask)), low, high)
    at = mask > 0
    np.testing.assert_allclose(np.asarray(got)[at], plain_loss(new, old, adv, low, high)[at], rtol=2e-5, atol=1e-6)
    assert (np.asarray(got)[~at] == 0).all() and (np.asarray(ratio)[~at] == 1).all()


def test_gradient_against_finite_differences():
    rng = np.random.default_rng(0)
    new, old, adv = (rng.normal(size=8) * s for s in (0.3, 0.3, 1.0))
    g = jax.grad(lambda x: clipped_loss(x, jnp.asarray(old, jnp.float32), jnp.asarray(adv, jnp.float32), jnp.ones(8), 0.2, 0.3)[0].sum())(
        jnp.asarray(new, jnp.float32)
    )
    h = 1e-5
    for i in range(8):
        up, down = new.copy(), new.copy()
        up[i] += h
        down[i] -= h
        numeric = (plain_loss(up, old, adv, 0.2, 0.3).sum() - plain_loss(down, old, adv, 0.2, 0.3).sum()) / (2 * h)
        np.testing.assert_allclose(g[i], numeric, atol=1e-3)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_garbage_reaches_neither_value_nor_gradient(garbage):
    mask = jnp.array([1.0, 0.0, 1.0])
    bad = jnp.array([0.0, garbage, 0.0])

    def f(lp, fill):
        return clipped_loss(lp + fill, fill, jnp.array([1.0, -1.0, 2.0]) + fill, mask, 0.2, 0.2)[0].sum()

    lp = jnp.array([-0.1, -0.2, 0.1])
    clean, dirty = (jax.value_and_grad(f)(lp, x) for x in (jnp.zeros(3), bad))
    assert float(clean[0]) == float(dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


def test_an_exploding_ratio_leaves_a_finite_gradient():
    g = jax.grad(lambda lp: clipped_loss(lp, jnp.zeros(2), jnp.array([1.0, 0.0]), jnp.ones(2), 0.2, 0.2)[0].sum())(jnp.full(2, 500.0))
    np.testing.assert_array_equal(g, [0, 0])


def test_masked_reductions():
    x, m = jnp.array([3.0, jnp.nan, -1.0, jnp.inf]), jnp.array([1.0, 0, 1, 0])
    assert float(masked.total(x, m)) == 2 and float(masked.least(x, m)) == -1 and float(masked.largest(x, m)) == 3
    assert float(masked.largest(x, jnp.zeros(4))) == -np.inf
    with pytest.raises(ValueError, match="shape"):
        masked.total(x, m[:2])
    g = jax.grad(lambda v: jnp.exp(masked.keep(v, jnp.array([1.0, 0.0]))).sum())(jnp.array([0.0, 1000.0]))
    assert g.tolist() == [1.0, 0.0]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 0.9, 0.99]))
def test_histogram_quantile(seed, q):
    x = np.exp(np.random.default_rng(seed).normal(-4, 3, 500)).astype(np.float32)
    halves = [masked.log_histogram(jnp.asarray(h), jnp.ones(250)) for h in np.split(x, 2)]
    got = float(masked.histogram_quantile(halves[0] + halves[1], q))
    np.testing.assert_allclose(got, np.quantile(x, q, method="inverted_cdf"), rtol=0.06)


def test_histogram_of_zeros_and_of_nothing():
    assert float(masked.histogram_quantile(masked.log_histogram(jnp.zeros(5), jnp.ones(5)), 0.99)) == 0
    assert float(masked.histogram_quantile(masked.log_histogram(jnp.ones(5), jnp.zeros(5)), 0.99)) == 0


def test_settings_that_would_give_wrong_ratios_raise():
    check_sampling(1.0, 0, 0.9)
    check_sampling(0.7, 0, 1.0, old_logprobs="sampler")
    for kwargs, word in [
        ({"temperature": 0.0, "top_k": 0, "top_p": 1.0}, "temperature"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "logit_bias": {3: -100.0}}, "logit"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 0.6, "old_logprobs": "sampler"}, "support"),
        ({"temperature": 1.0, "top_k": 20, "top_p": 1.0, "old_logprobs": "sampler"}, "support"),
    ]:
        with pytest.raises(ConfigError, match=word):
            check_sampling(**kwargs)
    with pytest.raises(ConfigError, match="sequence"):
        LossConfig(normaliser="mean")
    with pytest.raises(ConfigError, match="recomputed"):
        LossConfig(old_logprobs="none")
    with pytest.raises(ConfigError, match="clip_low"):
        LossConfig(clip_low=1.5)

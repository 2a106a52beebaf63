"""Temperature, top-k, top-p, log-probs and noise of the sampler's last step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.sampling.logits import sample, token_keys

ROWS = 20_000
draw = jax.jit(sample, static_argnames="vocab")


def keys_of(n, seed=0):
    return jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(seed), n))


def rows(logits, n, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, vocab=None):
    """The first n of 20,000 draws: one number of rows, so that few shapes are compiled."""
    logits = jnp.broadcast_to(jnp.asarray(logits), (ROWS, np.shape(logits)[-1]))
    full = lambda x, t: jnp.full((ROWS,), x, t)  # noqa: E731
    out = draw(logits, keys_of(ROWS, seed), full(temperature, jnp.float32), full(top_k, jnp.int32),
               full(top_p, jnp.float32), vocab=vocab or logits.shape[-1])
    return [x[:n] for x in out]


def reference_support(logits, temperature, top_k, top_p):
    """Plain numpy in double precision: kept ids of one row."""
    x = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-x, kind="stable")
    kept = list(order[:top_k] if top_k else order)
    p = np.exp(x[kept] - x.max())
    p /= p.sum()
    if top_p < 1:
        kept = [i for i, before in zip(kept, np.cumsum(p) - p) if before < top_p] or [order[0]]
    return kept


@pytest.mark.parametrize("top_k,top_p", [(0, 0.0), (0, 1e-8), (0, float(jnp.bfloat16(1e-3))), (1, 0.8), (1, 1.0)])
def test_vanishing_support_is_the_argmax(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32)
    ids, support, _ = rows(logits, 200, top_k=top_k, top_p=top_p)
    assert (ids == logits.argmax()).all()
    np.testing.assert_allclose(support, 0.0, atol=1e-6)


def test_top_k_above_the_vocabulary_is_harmless_and_uniform_rows_keep_k():
    logits = np.zeros(12, np.float32)
    assert (rows(logits, 300, top_k=1000)[0] == rows(logits, 300)[0]).all()
    ids, support, full = rows(logits, 300, top_k=3)
    assert set(np.asarray(ids)) == {0, 1, 2}
    np.testing.assert_allclose(support, -np.log(3), rtol=1e-5)
    np.testing.assert_allclose(full, -np.log(12), rtol=1e-5)


def test_greedy_takes_the_lowest_of_equals_and_needs_no_noise():
    ids, support, full = rows([1.0, 3.0, 3.0, 2.0] + [0.0] * 8, 5, temperature=0.0, top_p=0.1)
    assert (ids == 1).all() and (support == 0).all()
    np.testing.assert_allclose(full, jax.nn.log_softmax(jnp.array([1.0, 3, 3, 2] + [0] * 8))[1], rtol=1e-6)


def test_padded_ids_are_never_drawn_nor_counted():
    logits = np.r_[np.zeros(6), np.full(6, 50.0)].astype(np.float32)
    for temperature in (0.0, 1.0):
        ids, _, full = rows(logits, 200, temperature=temperature, vocab=6)
        assert (ids < 6).all()
        np.testing.assert_allclose(full, -np.log(6), rtol=1e-5)


@pytest.mark.parametrize("temperature,top_k,top_p", [(0.3, 0, 1.0), (1.0, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0),
                                                    (1.7, 0, 0.7), (0.8, 6, 0.9)])
def test_frequencies_and_logprobs(temperature, top_k, top_p):
    """Chi-square of 20,000 draws against the exact distribution (limit: 0.1 per cent tail, normal approximation)."""
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32) * 1.5
    n = ROWS
    ids, support, full = map(np.asarray, rows(logits, n, temperature=temperature, top_k=top_k, top_p=top_p))
    kept = reference_support(logits, temperature, top_k, top_p)
    scaled = logits.astype(np.float64) / temperature
    p = np.zeros(12)
    p[kept] = np.exp(scaled[kept] - scaled.max())
    p /= p.sum()
    everything = scaled - scaled.max()
    everything -= np.log(np.exp(everything).sum())
    np.testing.assert_allclose(support, np.log(p[ids]), atol=1e-4)
    np.testing.assert_allclose(full, everything[ids], atol=1e-4)
    counts = np.bincount(ids, minlength=12)
    assert counts[p == 0].sum() == 0
    big = p * n > 5
    chi2 = ((counts - n * p)[big] ** 2 / (n * p)[big]).sum()
    df = big.sum() - 1
    assert chi2 < df + 3.1 * np.sqrt(2 * df) + 6


def test_a_row_does_not_depend_on_its_neighbours_settings():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(4, 30)), jnp.float32)
    t, k, p = jnp.array([0.7, 1.0, 1.3, 0.9]), jnp.zeros(4, jnp.int32), jnp.ones(4)
    plain = draw(logits, keys_of(4), t, k, p, vocab=30)
    mixed = draw(logits, keys_of(4), t, k.at[0].set(3), p.at[1].set(0.5), vocab=30)
    for a, b in zip(plain, mixed):
        assert (np.asarray(a)[2:] == np.asarray(b)[2:]).all()


def test_keys_differ_by_index_and_by_request():
    with jax.debug_key_reuse(True):
        a = token_keys(keys_of(3), jnp.array([0, 0, 1], jnp.int32))
    assert len({tuple(r) for r in np.asarray(a)}) == 3
    assert (np.asarray(token_keys(keys_of(3)[:1], jnp.array([1]))) != np.asarray(a[:1])).any()

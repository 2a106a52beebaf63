"""The head-by-head attention of a single CPU device equals the batched form, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.model import attention


def batched(q, k, v, mask):
    batch, length, _, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    s = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * size**-0.5
    p = attention._softmax(s, mask[:, None, None])
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


@pytest.mark.parametrize("shape", [(2, attention.TILE + 22, 2, 2, 8), (3, 40, 1, 4, 8), (1, 2 * attention.TILE, 2, 1, 4)])
def test_head_by_head_equals_batched(shape):
    batch, length, kv_heads, group, size = shape
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(batch, length, n, size)), jnp.float32) for n in (kv_heads * group, kv_heads, kv_heads))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (batch, length)), 1)).at[:, -5:].set(0)  # the last five are padding
    mask = attention.sequence_mask(jnp.broadcast_to(jnp.arange(length), (batch, length)), segments)
    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def run(f):
        return jax.jit(jax.value_and_grad(lambda q, k, v: (f(q, k, v, mask) * weight).sum(), (0, 1, 2)))(q, k, v)

    (value, grads), (want, want_grads) = run(attention._attend_heads), run(batched)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for g, w in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5)
        assert np.isfinite(g).all()

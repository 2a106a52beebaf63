"""Attention in blocks with an online softmax (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv 2205.14135, algorithms 1 and
4): memory grows with T and not with T * T, and masks are built block by block from positions and segments.

Axes as in `attention.py`; I and J are the blocks of queries and keys. One loop goes over the pairs of blocks on and below the diagonal, so its
trip count is a constant of the program and XLA can shard batch and heads. The backward pass computes probabilities again
from the row sums that the forward pass keeps.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

NEG = -1e30
BLOCK = 512  # queries and keys of a block


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend_chunked(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array, block: int = BLOCK) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H], positions and segments int32 [B, T] -> [B, T, N, H].

    Query t sees key u if u <= t in T, they are of one segment, which is not 0, and position u <= position t.
    """
    return _forward(q, k, v, positions, segments, block)[0]


def _forward(q, k, v, positions, segments, block):
    batch, length, heads, size = q.shape
    block = min(block, length)
    kv_heads, group = k.shape[2], heads // k.shape[2]
    qs, ks, vs = _blocks(q, block), _blocks(k, block), _blocks(v, block)
    where = _blocks(positions, block), _blocks(segments, block)
    count = ks.shape[0]
    shape = (count, batch, block, kv_heads, group)
    start = jnp.full(shape, NEG, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, size), jnp.float32)

    def step(state, pair):
        i, j = pair
        top, total, acc = (_at(a, i) for a in state)
        s, mask = _scores(_at(qs, i), _at(ks, j), kv_heads, i, j, where)
        new = jnp.maximum(top, s.max(-1))
        p = jnp.where(mask, jnp.exp(s - new[..., None]), 0.0)
        keep = jnp.exp(top - new)
        mixed = jnp.einsum("btkgu,bukh->btkgh", p.astype(v.dtype), _at(vs, j), preferred_element_type=jnp.float32)
        fresh = new, total * keep + p.sum(-1), acc * keep[..., None] + mixed
        return tuple(_put(a, x, i) for a, x in zip(state, fresh, strict=True)), None

    (top, total, acc), _ = jax.lax.scan(step, start, _pairs(count))
    seen = jnp.maximum(total, 1e-30)
    out = _join((acc / seen[..., None]).astype(q.dtype), length).reshape(q.shape)
    return out, (q, k, v, positions, segments, out, top + jnp.log(seen))


def _backward(block, residuals, d_out):
    q, k, v, positions, segments, out, logsum = residuals
    length, kv_heads, size = q.shape[1], k.shape[2], q.shape[3]
    block = min(block, length)
    qs, ks, vs, d_os = (_blocks(a, block) for a in (q, k, v, d_out))
    where = _blocks(positions, block), _blocks(segments, block)
    # Row sums of P * dP, which are those of out * d_out.
    delta = _blocks((out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1), block)
    start = tuple(jnp.zeros(a.shape, jnp.float32) for a in (qs, ks, vs))

    def grouped(a):  # [B, t, N, ...] -> [B, t, K, G, ...]
        return a.reshape(*a.shape[:2], kv_heads, -1, *a.shape[3:])

    def step(state, pair):
        i, j = pair
        q_i, k_j, v_j, d_o = _at(qs, i), _at(ks, j), _at(vs, j), grouped(_at(d_os, i))
        s, mask = _scores(q_i, k_j, kv_heads, i, j, where)
        p = jnp.where(mask, jnp.exp(s - _at(logsum, i)[..., None]), 0.0)
        d_v = jnp.einsum("btkgu,btkgh->bukh", p.astype(d_o.dtype), d_o, preferred_element_type=jnp.float32)
        d_p = jnp.einsum("btkgh,bukh->btkgu", d_o, v_j, preferred_element_type=jnp.float32)
        d_s = (p * (d_p - grouped(_at(delta, i))[..., None]) * size**-0.5).astype(q.dtype)
        d_q = jnp.einsum("btkgu,bukh->btkgh", d_s, k_j, preferred_element_type=jnp.float32).reshape(q_i.shape)
        d_k = jnp.einsum("btkgu,btkgh->bukh", d_s, grouped(q_i), preferred_element_type=jnp.float32)
        d_qs, d_ks, d_vs = state
        return (_put(d_qs, _at(d_qs, i) + d_q, i), _put(d_ks, _at(d_ks, j) + d_k, j), _put(d_vs, _at(d_vs, j) + d_v, j)), None

    grads, _ = jax.lax.scan(step, start, _pairs(ks.shape[0]))
    d_q, d_k, d_v = (_join(g.astype(a.dtype), length) for g, a in zip(grads, (q, k, v), strict=True))
    return d_q, d_k, d_v, None, None


attend_chunked.defvjp(_forward, _backward)


def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(query block, key block) of all pairs on and below the diagonal, row by row."""
    i, j = np.tril_indices(count)
    return i.astype(np.int32), j.astype(np.int32)


def _scores(q, k, kv_heads, i, j, where):
    """(scores float32 [B, t, K, G, u] with NEG where masked, mask of the same shape or one that broadcasts to it)."""
    positions, segments = where
    batch, rows, heads, size = q.shape
    s = jnp.einsum("btkgh,bukh->btkgu", q.reshape(batch, rows, kv_heads, heads // kv_heads, size), k, preferred_element_type=jnp.float32)
    segment = _at(segments, i)[:, :, None]
    mask = (_at(positions, j)[:, None] <= _at(positions, i)[:, :, None]) & (_at(segments, j)[:, None] == segment) & (segment > 0)
    index = jnp.arange(rows)
    mask = mask & ((j < i) | (index[None, None, :] <= index[None, :, None]))
    mask = mask[:, :, None, None]
    return jnp.where(mask, s * size**-0.5, NEG), mask


def _blocks(a, block):
    """[B, T, ...] -> [I, B, block, ...], padded with zeros: segment 0, which sees and is seen by nothing."""
    a = jnp.pad(a, ((0, 0), (0, -a.shape[1] % block), *((0, 0),) * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(a.shape[0], -1, block, *a.shape[2:]), 1, 0)


def _join(a, length):
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], -1, *a.shape[3:])[:, :length]


def _at(a, i):
    return jax.lax.dynamic_index_in_dim(a, i, keepdims=False)


def _put(a, x, i):
    return jax.lax.dynamic_update_index_in_dim(a, x, i, 0)

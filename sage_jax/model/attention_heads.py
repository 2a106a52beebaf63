"""Attention for a single CPU device: heads one after the other, so that the scores of one head stay in the processor's cache.

Axes as in `attention.py`. Scores above the diagonal of TILE queries are never computed, and probabilities are computed again in the
backward pass rather than kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NEG = -1e30  # instead of -inf: differences of two masked scores stay finite
TILE = 128  # queries computed at a time


@jax.custom_vjp
def attend_heads(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H], mask bool [B, T, T], which must not look ahead in T -> [B, T, N, H]."""
    return _forward(q, k, v, mask)[0]


def _forward(q, k, v, mask):
    def one(inputs):
        q, k, v, row = inputs  # [G, T, H], [T, H], [T, H], []
        return jnp.concatenate([_mix(p, v[:end]) for p, _, end in _tiles(q, k, mask[row])], 1)

    out = jax.lax.map(one, _by_head(q, k, v))
    return _from_heads(out, q.shape), (q, k, v, mask)


def _backward(residuals, d_out):
    q, k, v, mask = residuals
    group, size = q.shape[2] // k.shape[2], q.shape[3]

    def one(inputs):
        q, k, v, row, d_out = inputs
        d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
        for p, start, end in _tiles(q, k, mask[row]):  # probabilities are computed again rather than kept
            rows = group * (min(start + TILE, q.shape[1]) - start)
            d_o, q_tile = (a[:, start : start + TILE].reshape(rows, size) for a in (d_out, q))
            p = p.reshape(rows, end)
            d_p = d_o @ v[:end].T
            d_s = (p * (d_p - (p * d_p).sum(-1, keepdims=True)) * size**-0.5).astype(k.dtype)
            d_q.append((d_s @ k[:end]).reshape(group, -1, size))
            d_k = d_k.at[:end].add(d_s.T @ q_tile)
            d_v = d_v.at[:end].add(p.astype(v.dtype).T @ d_o)
        return jnp.concatenate(d_q, 1), d_k, d_v

    heads_first = d_out.transpose(0, 2, 1, 3).reshape(-1, group, q.shape[1], size)
    d_q, d_k, d_v = jax.lax.map(one, (*_by_head(q, k, v), heads_first))
    return _from_heads(d_q, q.shape), _from_heads(d_k[:, None], k.shape), _from_heads(d_v[:, None], v.shape), None


attend_heads.defvjp(_forward, _backward)


def _tiles(q: jax.Array, k: jax.Array, mask: jax.Array):
    """Of one key/value head, q [G, T, H], k [T, H], mask [T, T]: (probabilities [G, t, end], start, end) of each tile of queries,
    with the keys from 0 to the tile's end."""
    group, length, size = q.shape
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        s = (q[:, start:end].reshape(-1, size) @ k[:end].T).astype(jnp.float32) * size**-0.5
        yield softmax(s.reshape(group, end - start, end), mask[None, start:end, :end]), start, end


def _mix(p: jax.Array, v: jax.Array) -> jax.Array:
    """p [G, t, u], v [u, H] -> [G, t, H] as one matrix product."""
    return (p.reshape(-1, p.shape[-1]).astype(v.dtype) @ v).reshape(*p.shape[:2], -1)


def _by_head(q: jax.Array, k: jax.Array, v: jax.Array):
    """[B, T, heads, H] -> one entry a row and key/value head: q [B K, G, T, H], k and v [B K, T, H], and the row's index."""
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.transpose(0, 2, 1, 3).reshape(batch * kv_heads, heads // kv_heads, length, size)
    k, v = (a.transpose(0, 2, 1, 3).reshape(batch * kv_heads, length, size) for a in (k, v))
    return q, k, v, jnp.repeat(jnp.arange(batch), kv_heads)


def _from_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[B K, G, T, H] -> [B, T, K G, H] of the given shape."""
    batch, length, heads, size = shape
    return x.reshape(batch, heads, length, size).transpose(0, 2, 1, 3)


def softmax(s: jax.Array, mask: jax.Array) -> jax.Array:
    """Over the last axis of float32 scores; a row with nothing to see is 0, not NaN."""
    s = jnp.where(mask, s, NEG)
    p = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))) * mask
    return p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)

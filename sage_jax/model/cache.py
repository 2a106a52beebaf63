"""The KV cache of multi-turn sampling and attention over it; the slot index is the position.

Axes: B batch, T queries, S cache slots, N query heads, K key/value heads, G = N / K, H head size, L layers.
Scores and softmax are float32. A query that may see nothing gets zeros, finite in value and gradient.

A layer never writes: each reads the old cache as it is and adds this call's own keys, and one scatter at the end stores the
new keys of all layers. So the cache is a loop invariant of the layer loop and the write is in place inside an outer
`while_loop` (scanning a cache as inputs and outputs copies all of it at every step). Cache blocks that no query can see are
skipped; a skipped block would have multiplied by 1 and added 0, so bits do not depend on it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sage_jax.model.config import ModelConfig
from sage_jax.model.rope import check_cache

NEG = -1e30  # instead of -inf: differences of two masked scores stay finite
BLOCK = 128  # cache slots read at a time
FLAT = 128  # K * H up to which one query a row is computed block-diagonally


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys (rotated) and values of all layers; slot index == position."""

    k: jax.Array  # compute dtype [L, B, S, K, H]
    v: jax.Array  # compute dtype [L, B, S, K, H]

    @property
    def length(self) -> int:
        return self.k.shape[2]


def make_cache(cfg: ModelConfig, batch: int, length: int) -> Cache:
    """An empty cache of `batch` rows and `length` slots. Raises ConfigError for a length at which `cfg` cannot use a cache."""
    check_cache(cfg, length)
    shape = (cfg.num_layers, batch, length, cfg.num_kv_heads, cfg.head_dim)
    return Cache(k=jnp.zeros(shape, cfg.dtype), v=jnp.zeros(shape, cfg.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheView:
    """What one call sees of a cache, the same for all layers."""

    query: jax.Array  # int32 [B, T] position, -1 for padding
    hidden: jax.Array  # bool [B, S] slots that this call overwrites, or beyond the row's length
    blocks: jax.Array  # int32 [] cache blocks that some query can see


def cache_view(positions: jax.Array, slots: int, lengths: jax.Array | None) -> CacheView:
    """positions int32 [B, T]; those < 0 or >= slots are padding. lengths int32 [B]: old slots at or beyond are not seen."""
    query = jnp.where((positions >= 0) & (positions < slots), positions, -1)
    index = jnp.arange(slots)
    if query.shape[1] == 1:
        hidden = index == query
    else:
        rows = jnp.arange(query.shape[0])[:, None]
        hidden = jnp.zeros((query.shape[0], slots), bool).at[rows, jnp.where(query < 0, slots, query)].set(True, mode="drop")
    if lengths is not None:
        hidden = hidden | (index >= lengths[:, None])
    seen = (~hidden & (index <= query.max(1, keepdims=True))).any(0)
    last = jnp.max(jnp.where(seen, index + 1, 0))
    return CacheView(query=query, hidden=hidden, blocks=-(-last // min(BLOCK, slots)))


def attend_cached(q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, layer: jax.Array, view: CacheView) -> jax.Array:
    """q [B, T, N, H] over this call's own k and v [B, T, K, H] and over the layer's old cache slots -> [B, T, N, H]."""
    batch, length, heads, size = q.shape
    kv_heads, slots = k.shape[2], cache.length
    width = min(BLOCK, slots)
    q = q.reshape(batch, length, kv_heads, -1, size)
    score, mix, shape = _flat(q) if length == 1 and kv_heads * size <= FLAT else _grouped(q)

    def fold(state, keys, values, mask):  # one step of the online softmax; mask [B, T, U]
        top, total, acc = state
        s = score(keys) * size**-0.5
        mask = mask if len(shape) == 3 else mask[:, None, None]  # flat: T is 1 and broadcasts over the heads
        new = jnp.maximum(top, jnp.where(mask, s, NEG).max(-1))
        p = jnp.where(mask, jnp.exp(s - new[..., None]), 0.0)
        keep = jnp.exp(top - new)
        return new, total * keep + p.sum(-1), acc * keep[..., None] + mix(p.astype(values.dtype), values)

    def block(i, state):
        start = jnp.minimum(i * width, slots - width)  # the last block may overlap the one before: masked below
        at, sizes = (layer, 0, start, 0, 0), (1, batch, width, kv_heads, size)
        keys = jax.lax.dynamic_slice(cache.k, at, sizes)[0]
        values = jax.lax.dynamic_slice(cache.v, at, sizes)[0]
        slot = start + jnp.arange(width)
        visible = ~jax.lax.dynamic_slice(view.hidden, (0, start), (batch, width)) & (slot >= i * width)
        return fold(state, keys, values, visible[:, None] & (slot <= view.query[..., None]))

    own = (view.query >= 0)[:, None, :] & (view.query[:, None, :] <= view.query[:, :, None])
    state = jnp.full(shape[:-1], NEG, jnp.float32), jnp.zeros(shape[:-1], jnp.float32), jnp.zeros(shape, jnp.float32)
    state = fold(state, k, v, own)
    _, total, acc = jax.lax.fori_loop(0, view.blocks, block, state)
    out = acc / jnp.maximum(total, 1e-30)[..., None]
    if len(shape) == 3:  # flat: each head keeps its own group's columns
        out = jnp.einsum("bkgkh->bkgh", out.reshape(batch, kv_heads, -1, kv_heads, size))[:, :, :, None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size).astype(q.dtype)


def _grouped(q: jax.Array):
    """Score and mix functions with state shape [B, K, G, T, H], for q [B, T, K, G, H]."""
    batch, length, kv_heads, group, size = q.shape

    def score(keys):
        return jnp.einsum("btkgh,bukh->bkgtu", q, keys, preferred_element_type=jnp.float32)

    def mix(p, values):
        return jnp.einsum("bkgtu,bukh->bkgth", p, values, preferred_element_type=jnp.float32)

    return score, mix, (batch, kv_heads, group, length, size)


def _flat(q: jax.Array):
    """The same for one query a row and small heads, with state shape [B, N, K H]: queries become block-diagonal over the key/value heads.

    K times the arithmetic, but the cache is read in the order it lies in, by one matrix product a row: on a CPU this is
    faster than a transposed copy of the cache and K small products a row.
    """
    batch, _, kv_heads, group, size = q.shape
    eye = jnp.eye(kv_heads, dtype=q.dtype)
    wide = jnp.einsum("bkgh,kj->bjhkg", q[:, 0], eye).reshape(batch, kv_heads * size, kv_heads * group)

    def rows(a):
        return a.reshape(*a.shape[:2], -1)

    def score(keys):
        s = jnp.einsum("buc,bcn->bun", rows(keys), wide, preferred_element_type=jnp.float32)
        return s.transpose(0, 2, 1)

    def mix(p, values):
        return jnp.einsum("bnu,buc->bnc", p, rows(values), preferred_element_type=jnp.float32)

    return score, mix, (batch, kv_heads * group, kv_heads * size)


def write(cache: Cache, keys: jax.Array, values: jax.Array, view: CacheView) -> Cache:
    """Stores this call's keys and values [L, B, T, K, H] at their positions; padding is dropped."""
    slot = jnp.where(view.query < 0, cache.length, view.query)
    rows = jnp.arange(slot.shape[0])[:, None]
    return Cache(
        k=cache.k.at[:, rows, slot].set(keys, mode="drop", unique_indices=True),
        v=cache.v.at[:, rows, slot].set(values, mode="drop", unique_indices=True),
    )

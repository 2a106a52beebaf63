"""Grouped-query attention: over whole sequences, and over a KV cache whose slot index is the position.

Axes: B batch, T queries, S cache slots, N query heads, K key/value heads, G = N / K, H head size.
Scores and softmax are float32. A query that may see nothing gets zeros, finite in value and gradient.

The cached form never writes inside a layer: each layer reads the old cache as it is, adds this call's own keys, and one
scatter at the end stores the new keys of all layers. So the cache is a loop invariant of the layer loop and the write is in
place inside an outer `while_loop` (scanning a cache as inputs and outputs copies all of it at every step). Cache blocks
that no query can see are skipped; a skipped block would have multiplied by 1 and added 0, so bits do not depend on it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sage_jax.model.config import ModelConfig

NEG = -1e30  # instead of -inf: differences of two masked scores stay finite
BLOCK = 128  # cache slots read at a time
TILE = 128  # queries computed at a time on a CPU
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
    """An empty cache of `batch` rows and `length` slots."""
    shape = (cfg.num_layers, batch, length, cfg.num_kv_heads, cfg.head_dim)
    return Cache(k=jnp.zeros(shape, cfg.dtype), v=jnp.zeros(shape, cfg.dtype))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding, halves form: x [B, T, heads, H], cos and sin float32 [B, T, H/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def phases(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotary angles, float32 [B, T, H/2]: angles in 16 bit are wrong after a few hundred tokens."""
    freq = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None] * freq
    return jnp.cos(angle), jnp.sin(angle)


def sequence_mask(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """bool [B, T, T]: query t sees key u of its own segment at the same or an earlier position; segment 0 is padding."""
    mask = positions[:, None, :] <= positions[:, :, None]
    if segment_ids is not None:
        same = segment_ids[:, None, :] == segment_ids[:, :, None]
        mask = mask & same & (segment_ids > 0)[:, None, :]
    return mask


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H], mask bool [B, T, T] -> [B, T, N, H]. The mask must not look ahead in T.

    On a single CPU device heads are computed one after the other (`_attend_heads`): the scores of one head stay in the
    processor's cache, and those above the diagonal are never computed. Elsewhere one batched form, which XLA can shard.
    """
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        return _attend_heads(q, k, v, mask)
    batch, length, heads, size = q.shape
    q = q.reshape(batch, length, k.shape[2], -1, size)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * size**-0.5
    p = _softmax(s, mask[:, None, None])
    return jnp.einsum("bkgts,bskh->btkgh", p.astype(v.dtype), v).reshape(batch, length, heads, size)


def _softmax(s: jax.Array, mask: jax.Array) -> jax.Array:
    """Over the last axis of float32 scores; a row with nothing to see is 0, not NaN."""
    s = jnp.where(mask, s, NEG)
    p = jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True))) * mask
    return p / jnp.maximum(p.sum(-1, keepdims=True), 1e-30)


@jax.custom_vjp
def _attend_heads(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    return _attend_heads_forward(q, k, v, mask)[0]


def _attend_heads_forward(q, k, v, mask):
    def one(inputs):
        q, k, v, row = inputs  # [G, T, H], [T, H], [T, H], []
        return jnp.concatenate([_mix(p, v[:end]) for p, _, end in _tiles(q, k, mask[row])], 1)

    out = jax.lax.map(one, _by_head(q, k, v))
    return _from_heads(out, q.shape), (q, k, v, mask)


def _attend_heads_backward(residuals, d_out):
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


_attend_heads.defvjp(_attend_heads_forward, _attend_heads_backward)


def _tiles(q: jax.Array, k: jax.Array, mask: jax.Array):
    """Of one key/value head, q [G, T, H], k [T, H], mask [T, T]: (probabilities [G, t, end], start, end) of each tile of queries,
    with the keys from 0 to the tile's end."""
    group, length, size = q.shape
    for start in range(0, length, TILE):
        end = min(start + TILE, length)
        s = (q[:, start:end].reshape(-1, size) @ k[:end].T).astype(jnp.float32) * size**-0.5
        yield _softmax(s.reshape(group, end - start, end), mask[None, start:end, :end]), start, end


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

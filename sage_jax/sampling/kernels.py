"""The three jitted functions of the sampler: extend one row, decode all rows, copy a row. Cache donated, weights an argument.

Shapes: B slots, S cache slots of a row (the context), T an extend bucket, N tokens of a decode chunk, V vocabulary.
One compiled program per bucket, one for decode, one for copy; nothing else depends on a request, so the bits of a row
follow from its own ids, lengths and key alone.

The last id of a prompt is not extended: decode feeds it first and samples what follows. So all sampling happens in one
shape, and an extend needs no head.

On a mesh the slots are split over the axes of "batch" into P parts, and no row ever leaves its part but in a copy: an extend runs one
row of every part at once, in which all but one are padding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sage_jax.model.rules import constrain
from sage_jax.sampling.logits import sample, token_keys

FINISH = ("", "stop_id", "accept", "length")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """State of all slots at a chunk's start, host-made. Inactive rows are computed with the others and write nothing."""

    token: Any  # int32 [B] id to feed next
    position: Any  # int32 [B] its position
    active: Any  # bool [B]
    index: Any  # int32 [B] tokens of the request sampled so far
    limit: Any  # int32 [B] tokens it may sample in all
    state: Any  # int32 [B] of the automaton
    stop_ids: Any  # int32 [B, MAX_STOP_IDS], -1 for none
    key: Any  # uint32 [B, 2]
    temperature: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """What a decode chunk sampled; rows are padded with id -1 and log-prob 0 after their last token."""

    ids: Any  # int32 [B, N]
    logprobs: Any  # float32 [B, N, 2]: over the support, over the whole vocabulary
    index: Any  # int32 [B]
    state: Any  # int32 [B]
    finish: Any  # int32 [B], index into FINISH
    steps: Any  # int32 [] loop iterations


@dataclasses.dataclass(frozen=True)
class Kernels:
    extend: Callable
    decode: Callable
    copy: Callable

    def compiled_shapes(self) -> int:
        return sum(f._cache_size() for f in (self.extend, self.decode, self.copy))


def build(graphdef: nnx.GraphDef, *, chunk: int, vocab: int, cache_sharding, parts: int = 1) -> Kernels:
    """The kernels of one model. chunk: N; ids >= vocab are banned; parts: P, into which `cache_sharding` splits the slots."""
    jit = functools.partial(jax.jit, donate_argnums=(0,))

    def mine(cache, row):
        """bool [P]: the part that holds a row."""
        return jnp.arange(parts) == row // (cache.k.shape[1] // parts)

    def take(cache, row):
        """[L, P, S, K, H]: of each part the row that lies where `row` does in its own."""

        def one(x):
            x = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
            return jax.lax.dynamic_slice_in_dim(x, row % x.shape[2], 1, axis=2)[:, :, 0]

        return jax.tree.map(one, cache)

    def put(cache, rows, row):
        """The cache with `rows`, as `take` gives them, in their places."""

        def one(x, new):
            split = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
            return jax.lax.dynamic_update_slice_in_dim(split, new[:, :, None], row % split.shape[2], axis=2).reshape(x.shape)

        return jax.tree.map(one, cache, rows)

    @functools.partial(jit, out_shardings=cache_sharding)
    def extend(cache, params, ids, row, start, count):
        """Writes the keys of the first `count` of ids int32 [T] at positions from `start` of `row`."""
        offset = jnp.arange(ids.shape[0])
        positions = jnp.where(offset < count, start + offset, -1)[None]
        if parts > 1:
            positions = jnp.where(mine(cache, row)[:, None], positions, -1)
        ids = jnp.broadcast_to(ids, positions.shape)
        _, new = nnx.merge(graphdef, params)(constrain(ids, "batch"), constrain(positions, "batch"), cache=take(cache, row))
        return put(cache, new, row)

    @functools.partial(jit, out_shardings=(cache_sharding, None))
    def decode(cache, params, table, accept, rows: Rows, steps):
        """Up to `steps` <= N tokens for every active row; stops when no row is active.

        table int16 [states, V]: the automaton's state after a token; `accept` int32 [] its accepting state.
        """
        model = nnx.merge(graphdef, params)
        rows = jax.tree.map(lambda x: constrain(x, "batch"), rows)
        batch = rows.token.shape[0]
        out = Chunk(
            ids=jnp.full((batch, chunk), -1, jnp.int32), logprobs=jnp.zeros((batch, chunk, 2), jnp.float32),
            index=rows.index, state=rows.state, finish=jnp.zeros(batch, jnp.int32), steps=jnp.int32(0),
        )

        def more(carry):
            _, _, _, active, out = carry
            return (out.steps < jnp.minimum(steps, chunk)) & active.any()

        def step(carry):
            cache, token, position, active, out = carry
            hidden, cache = model(token[:, None], jnp.where(active, position, -1)[:, None], cache=cache)
            ids, support, full = sample(
                model.logits(hidden[:, 0]), token_keys(rows.key, out.index),
                rows.temperature, rows.top_k, rows.top_p, vocab=vocab,
            )
            index = out.index + active
            state = jnp.where(active, table[out.state, ids].astype(jnp.int32), out.state)
            stopped = (ids[:, None] == rows.stop_ids).any(-1)
            finish = jnp.where(stopped, 1, jnp.where(state == accept, 2, jnp.where(index >= rows.limit, 3, 0)))
            out = Chunk(
                ids=out.ids.at[:, out.steps].set(jnp.where(active, ids, -1)),
                logprobs=out.logprobs.at[:, out.steps].set(jnp.where(active[:, None], jnp.stack([support, full], -1), 0.0)),
                index=index, state=state, finish=jnp.where(active, finish, out.finish), steps=out.steps + 1,
            )
            return cache, ids, position + active, active & (finish == 0), out

        cache, *_, out = jax.lax.while_loop(more, step, (cache, rows.token, rows.position, rows.active, out))
        return cache, out

    @functools.partial(jit, out_shardings=cache_sharding)
    def copy(cache, source, target):
        """Copies the row `source` onto the row `target`."""
        rows = take(cache, source)
        if parts > 1:
            here, there = (mine(cache, row)[None, :, None, None, None] for row in (source, target))
            sent = jax.tree.map(lambda x: jnp.where(here, x, 0).sum(1, keepdims=True, dtype=x.dtype), rows)
            rows = jax.tree.map(lambda new, old: jnp.where(there, new, old), sent, take(cache, target))
        return put(cache, rows, target)

    return Kernels(extend, decode, copy)

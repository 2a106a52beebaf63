"""From logits to a token: temperature, top-k, top-p, and the log-probs that RL needs. Pure functions of arrays.

B rows, V vocabulary (padded). Every per-row setting is an array, so no value of it causes a retrace.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

IMPL = "threefry2x32"  # stated, so that a process-wide default cannot change what a seed gives


def sample(logits, keys, temperature, top_k, top_p, *, vocab: int):
    """Draws one token a row.

    logits float [B, V]; keys: raw threefry keys uint32 [B, 2], one a row and used up here; temperature float32 [B], 0 means
    greedy; top_k int32 [B], 0 means off; top_p float32 [B], at least 1 means off; vocab: ids at or above it are banned.
    Order: temperature, then top-k, then top-p over what top-k left. The likeliest id always stays (of equals, the lowest).

    Returns (ids int32 [B], support float32 [B], full float32 [B]): log-probs at the sampling temperature over the
    sampled support, and over the whole unpadded vocabulary. Greedy rows: support 0, full at temperature 1.
    """
    logits = logits.astype(jnp.float32)
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = jnp.where(jnp.arange(logits.shape[-1]) < vocab, scaled, -jnp.inf)
    full = jax.nn.log_softmax(scaled, axis=-1)
    # Only the mask is computed under the condition: the arithmetic that follows is the same for every row, so whether a
    # neighbour asks for top-k cannot move a row's bits.
    filtered = ~greedy & ((top_k > 0) | (top_p < 1))
    keep = jax.lax.cond(
        filtered.any(), lambda: _support(full, top_k, top_p), lambda: jnp.ones(full.shape, jnp.bool)
    )
    masked = jnp.where(keep, full, -jnp.inf)
    best = jnp.argmax(scaled, axis=-1)
    # By the inverse of the cumulative distribution: one random number a row instead of V. A rounded sum may be flat or dip
    # where the probability is 0, so an id outside the support is never taken, whatever the sum says.
    uniform = jax.vmap(lambda k: jax.random.uniform(jax.random.wrap_key_data(k, impl=IMPL)))(keys)
    mass = jnp.cumsum(jnp.exp(masked), axis=-1)
    reached = (masked > -jnp.inf) & (mass >= (1.0 - uniform)[:, None] * mass[:, -1:])  # 1 - uniform is in (0, 1]
    ids = jnp.where(greedy | ~reached.any(-1), best, jnp.argmax(reached, axis=-1)).astype(jnp.int32)
    full_id = jnp.take_along_axis(full, ids[:, None], axis=-1)[:, 0]
    support = jnp.where(greedy, 0.0, full_id - jax.nn.logsumexp(masked, axis=-1))
    return ids, support, full_id


def token_keys(keys, index):
    """Raw keys uint32 [B, 2] of token `index` int32 [B] of the requests with the raw keys `keys` uint32 [B, 2]."""
    fold = lambda k, i: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(k, impl=IMPL), i))  # noqa: E731
    return jax.vmap(fold)(keys, index)


def _support(logprobs, top_k, top_p):
    """bool [B, V]: ids inside top-k and, of those, inside top-p. Off values keep every id of the row."""
    order = jnp.argsort(logprobs, axis=-1, descending=True, stable=True)  # stable: of equals, the lowest id first
    ordered = jnp.take_along_axis(logprobs, order, axis=-1)
    rank = jnp.arange(logprobs.shape[-1])[None, :]
    keep = (top_k <= 0)[:, None] | (rank < top_k[:, None])
    probs = jnp.where(keep, jnp.exp(ordered), 0.0)
    probs = probs / probs.sum(-1, keepdims=True)
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the likelier ids: the id that crosses top_p stays in
    keep &= (top_p >= 1)[:, None] | (before < top_p[:, None])
    keep |= rank == 0
    return jnp.put_along_axis(jnp.zeros(keep.shape, jnp.bool), order, keep, axis=-1, inplace=False)

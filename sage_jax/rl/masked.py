"""All masked reductions. What stands under mask 0, NaN and inf included, reaches neither a value nor a gradient.

A `where` after an operation that overflowed still sends NaN back through it: so values are replaced *before* they are
used (`keep`), and the caller computes on the result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def keep(x: jax.Array, mask: jax.Array, fill: float = 0.0) -> jax.Array:
    """x where mask > 0, else `fill`; shapes must be equal."""
    if x.shape != mask.shape:
        raise ValueError(f"values {x.shape} and mask {mask.shape} must have one shape")
    return jnp.where(mask > 0, x, fill)


def total(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the kept entries, float32 []."""
    return keep(x, mask).astype(jnp.float32).sum()


def count(mask: jax.Array) -> jax.Array:
    """Number of kept entries, float32 []."""
    return (mask > 0).sum().astype(jnp.float32)


def least(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Smallest kept entry, +inf if there is none."""
    return keep(x, mask, jnp.inf).min()


def largest(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Largest kept entry, -inf if there is none."""
    return keep(x, mask, -jnp.inf).max()


# Quantiles of a quantity that is spread over micro-batches and devices: counts in logarithmic bins add up, sorted
# values do not. 512 bins over 11 decades are 5 per cent wide.
BINS, LOW, HIGH = 512, 1e-9, 1e2


def log_histogram(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Counts of the kept non-negative entries: float32 [BINS]; bin 0 holds what is below LOW."""
    scaled = (jnp.log(jnp.maximum(keep(x, mask), LOW)) - jnp.log(LOW)) / (jnp.log(HIGH) - jnp.log(LOW)) * (BINS - 1)
    bins = jnp.clip(jnp.ceil(scaled), 0, BINS - 1).astype(jnp.int32)
    return jnp.zeros(BINS, jnp.float32).at[bins.ravel()].add((mask > 0).astype(jnp.float32).ravel())


def histogram_quantile(counts: jax.Array, q: float) -> jax.Array:
    """Upper edge of the bin in which the quantile q lies (0 for bin 0); 0 if nothing was counted."""
    cumulated = jnp.cumsum(counts)
    index = jnp.argmax(cumulated >= q * cumulated[-1])
    edge = jnp.exp(jnp.log(LOW) + index / (BINS - 1) * (jnp.log(HIGH) - jnp.log(LOW)))
    return jnp.where(index == 0, 0.0, edge)

"""Mixture of experts of Qwen3-MoE: a router picks k of E experts for each token, none is dropped.

Axes: B batch, T time, D hidden, E experts, M expert width, k experts of a token. Rows are sorted by expert and multiplied group by group
(`jax.lax.ragged_dot`). On a mesh each device computes its own experts (`expert` axis) and its own columns (`tensor` axis) for the
tokens of its rows, and the parts are summed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sage_jax.model.config import ModelConfig

BATCH = ("data", "fsdp")


class Load(NamedTuple):
    """Sums over the tokens that count, of one layer or of several added up."""

    chosen: jax.Array  # float32 [E] times that each expert was chosen
    probability: jax.Array  # float32 [E] sum of the router's probabilities
    tokens: jax.Array  # float32 []


def mixture(x: jax.Array, w: dict[str, jax.Array], cfg: ModelConfig, counts: jax.Array | None) -> tuple[jax.Array, Load]:
    """x [B, T, D] -> (weighted sum of the chosen experts' outputs [B, T, D], load over the tokens where `counts` [B, T] is true)."""
    logits = jnp.einsum("btd,de->bte", x, w["router"])
    probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weight, chosen = jax.lax.top_k(probability, cfg.experts_per_token)
    if cfg.norm_topk:
        weight = weight / weight.sum(-1, keepdims=True)
    y = _experts(x, weight.astype(x.dtype), chosen, w["expert_gate"], w["expert_up"], w["expert_down"])
    counted = jnp.ones(x.shape[:2], jnp.float32) if counts is None else counts.astype(jnp.float32)
    times = (jax.nn.one_hot(chosen, cfg.num_experts) * counted[..., None, None]).sum((0, 1, 2))
    return y, Load(times, (probability * counted[..., None]).sum((0, 1)), counted.sum())


def balance_loss(load: Load) -> jax.Array:
    """E sum_e f_e P_e over the layers of `load` together (Fedus et al. 2021, arXiv 2101.03961, eqs. 4 to 6): k if all are used alike."""
    tokens = jnp.maximum(load.tokens, 1)  # a batch of padding only: 0, not NaN
    return load.chosen.shape[0] * jnp.sum(load.chosen / tokens * load.probability / tokens)


def _experts(x, weight, chosen, gate, up, down):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return _local(x, weight, chosen, gate, up, down, first=0)
    batch = BATCH if x.shape[0] % math.prod(mesh.shape[a] for a in BATCH) == 0 else None
    time = "sequence" if x.shape[1] % mesh.shape["sequence"] == 0 else None

    def part(x, weight, chosen, gate, up, down):
        y = _local(x, weight, chosen, gate, up, down, first=jax.lax.axis_index("expert") * gate.shape[0])
        return jax.lax.psum(y, ("expert", "tensor"))

    rows, columns = P(batch, time, None), P("expert", None, "tensor")
    run = jax.shard_map(part, in_specs=(rows, rows, rows, columns, columns, P("expert", "tensor", None)), out_specs=rows)
    return run(x, weight, chosen, gate, up, down)


def _local(x, weight, chosen, gate, up, down, first):
    """The part that the experts from `first` on add; those of other devices stand at the end and add nothing."""
    batch, time, size = x.shape
    k, count = chosen.shape[-1], gate.shape[0]
    expert = chosen.reshape(-1) - first
    expert = jnp.where((expert >= 0) & (expert < count), expert, count)
    order = jnp.argsort(expert, stable=True)
    groups = jnp.bincount(expert, length=count + 1)[:count].astype(jnp.int32)
    rows = x.reshape(-1, size)[order // k]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, groups)) * jax.lax.ragged_dot(rows, up, groups)
    out = jax.lax.ragged_dot(hidden, down, groups)
    out = out[jnp.argsort(order)].reshape(batch, time, k, size)
    mine = (expert < count).reshape(batch, time, k, 1)
    return (jnp.where(mine, out, 0) * weight[..., None]).sum(2)

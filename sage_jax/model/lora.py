"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): y = x W + (alpha / rank) (x A) B, A random and B zero at the start.

Adapters are parameters of type `LoraParam` beside the weight that they change, `q_lora_a` and `q_lora_b` beside `q`, so that a
state splits into what trains and what is frozen by type alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from sage_jax.model.config import ModelConfig

SUFFIXES = ("_lora_a", "_lora_b")
# einsum of (A, B) -> the weight's shape, per target and layer
_PRODUCT = {
    "q": "ldr,lrnh->ldnh", "k": "ldr,lrnh->ldnh", "v": "ldr,lrnh->ldnh", "o": "lnhr,lrd->lnhd",
    "gate": "ldr,lrm->ldm", "up": "ldr,lrm->ldm", "down": "lmr,lrd->lmd",
}  # fmt: skip


class LoraParam(nnx.Param):
    """A parameter of an adapter."""


def scale(cfg: ModelConfig) -> float:
    return cfg.lora_alpha / cfg.lora_rank


def split_trainable(state: nnx.State) -> tuple[nnx.State, nnx.State]:
    """(what trains, what is frozen): the adapters and the rest, or all and an empty State where there are no adapters."""
    adapters, rest = nnx.split_state(state, LoraParam, ...)
    return (adapters, rest) if adapters.flat_state() else (rest, adapters)


def join(trainable: nnx.State, frozen: nnx.State) -> nnx.State:
    """The whole State again; nothing is copied."""
    return nnx.merge_state(frozen, trainable)


def merged(cfg: ModelConfig, state: nnx.State) -> tuple[ModelConfig, nnx.State]:
    """(config without adapters, State with them added into the weights). Weights without an adapter are shared, not copied."""
    if not cfg.lora_rank:
        return cfg, state
    flat = dict(state.flat_state())
    out = {}
    for path, variable in flat.items():
        if path[-1].endswith(SUFFIXES):
            continue
        a, b = (flat.get((*path[:-1], path[-1] + s)) for s in SUFFIXES)
        if a is not None:
            w = variable.get_value()
            change = jnp.einsum(_PRODUCT[path[-1]], a.get_value().astype(jnp.float32), b.get_value().astype(jnp.float32))
            variable = variable.replace((w.astype(jnp.float32) + scale(cfg) * change).astype(w.dtype))
        out[path] = variable
    return cfg.replace(lora_rank=0), nnx.State.from_flat_path(out)

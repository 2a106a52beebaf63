"""The hand-over of weights to the engine, and where its cache lies."""

from __future__ import annotations

import math

import jax
from jax.sharding import Mesh, NamedSharding

from sage_jax.errors import ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.rules import mesh_axes, spec


def check_params(params, expected: dict[str, jax.ShapeDtypeStruct], shardings: dict | None) -> dict:
    """The weights' shardings by name. expected: abstract weights by name; shardings: those of the first weights, if any.

    Raises ConfigError with both sides if tree, shape, dtype or sharding differ.
    """
    want, have = expected, named(params)
    if want.keys() != have.keys():
        missing, extra = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise ConfigError(f"the weights' tree does not fit the policy: missing {missing}, unknown {extra}")
    for name, given in have.items():
        if (given.shape, given.dtype) != (want[name].shape, want[name].dtype):
            raise ConfigError(f"weights {name}: given {given.dtype}{given.shape}, policy {want[name].dtype}{want[name].shape}")
        first = shardings[name] if shardings else given.sharding
        if not given.sharding.is_equivalent_to(first, given.ndim):
            raise ConfigError(f"weights {name}: given sharding {given.sharding}, the engine's is {first}")
    return {name: given.sharding for name, given in have.items()}


def named(tree) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def cache_sharding(cfg: ModelConfig, mesh: Mesh | None, slots: int, context: int):
    """Of [L, B, S, K, H]: slots lie as the rows of a batch, key/value heads as those of the projections that fill them.

    Raises ConfigError for a number of slots that does not divide.
    """
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = (cfg.num_layers, slots, context, cfg.num_kv_heads, cfg.head_dim)
    return NamedSharding(mesh, spec(("layers", "batch", None, "kv_heads", "head_dim"), shape, mesh, f"cache of {slots} slots"))


def slot_parts(mesh: Mesh | None) -> int:
    """Into how many parts the slots are split."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes("batch"))

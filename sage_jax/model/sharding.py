"""From logical axes to mesh axes: one table, the mesh, and parameters that are created already sharded.

Each parameter names its axes in the metadata `logical_axes`; optimizer states keep the parameter's box, so the same rule
places them. Sizes that do not divide raise before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sage_jax.errors import ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.lora import split_trainable
from sage_jax.model.qwen import Policy
from sage_jax.model.rules import MESH_AXES, spec


def make_mesh(shape: dict[str, int] | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data, fsdp, tensor, expert, sequence (absent ones have size 1) over `devices` (default: all).

    Raises ConfigError for an unknown axis or when the sizes do not multiply to the number of devices.
    """
    shape = dict(shape or {})
    unknown = sorted(set(shape) - set(MESH_AXES))
    if unknown:
        raise ConfigError(f"unknown mesh axes {unknown}: valid are {', '.join(MESH_AXES)}")
    devices = list(jax.devices() if devices is None else devices)
    sizes = tuple(int(shape.get(axis, 1)) for axis in MESH_AXES)
    if math.prod(sizes) != len(devices):
        n = len(devices)
        raise ConfigError(
            f"mesh {dict(zip(MESH_AXES, sizes))} needs {math.prod(sizes)} devices and there are {n}: the sizes must multiply to {n}, e.g. "
            f"--config.mesh.data={n} --config.rl.rows={n} --config.sft.rows={n} (rows, and sampler.slots, are spread over data * fsdp)"
        )
    return Mesh(np.array(devices).reshape(sizes), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def place(tree: Any, mesh: Mesh) -> Any:
    """Shardings for a tree of nnx variables (parameters, gradients, optimizer state); other leaves are replicated.

    Works on abstract and on concrete trees. Each variable is replaced by one NamedSharding.
    """

    def one(path, leaf):
        if isinstance(leaf, nnx.Variable):
            axes = leaf.get_metadata().get("logical_axes")
            value = leaf.get_value()
            if axes is not None and len(axes) == len(value.shape):
                return NamedSharding(mesh, spec(axes, value.shape, mesh, jax.tree_util.keystr(path)))
        return NamedSharding(mesh, P())

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def abstract_params(cfg: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, State of ShapeDtypeStructs) of a policy; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Policy(cfg, rngs=nnx.Rngs(0))))


def create_params(cfg: ModelConfig, mesh: Mesh, seed: int) -> tuple[nnx.GraphDef, nnx.State]:
    """(graphdef, parameters), created on their devices: no unsharded copy exists. The seed alone decides the values."""
    graphdef, abstract = abstract_params(cfg)
    init = jax.jit(lambda key: nnx.split(Policy(cfg, rngs=nnx.Rngs(params=key)))[1], out_shardings=place(abstract, mesh))
    return graphdef, init(jax.random.key(seed))


def create_adapters(cfg: ModelConfig, mesh: Mesh, seed: int) -> nnx.State:
    """The adapters alone, the same as those of `create_params`; the weights beside them are never computed."""
    adapters, _ = split_trainable(abstract_params(cfg)[1])
    init = jax.jit(lambda key: split_trainable(nnx.split(Policy(cfg, rngs=nnx.Rngs(params=key)))[1])[0], out_shardings=place(adapters, mesh))
    return init(jax.random.key(seed))

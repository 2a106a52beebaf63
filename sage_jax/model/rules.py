"""The one table from logical axes to mesh axes, and what follows from it for single arrays.

Parameters name their axes in metadata (`sharding.place`); activations are pinned inside the forward pass by `constrain`, on the mesh that
the caller set with `on`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sage_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")

RULES: dict[str, str | tuple[str, ...] | None] = {
    # parameters
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "expert": "expert",
    "expert_mlp": "tensor",
    "layers": None,
    # activations
    "batch": ("data", "fsdp"),
    "sequence": "sequence",
}


def mesh_axes(axis: str | None) -> tuple[str, ...]:
    """The mesh axes of a logical axis. Raises ConfigError for an unknown name."""
    if axis is None:
        return ()
    if axis not in RULES:
        raise ConfigError(f"unknown logical axis {axis!r}: valid are {', '.join(RULES)}")
    target = RULES[axis]
    return (target,) if isinstance(target, str) else tuple(target or ())


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh, name: str = "array") -> P:
    """The PartitionSpec of an array whose axes carry these logical names (None: not sharded).

    Fewer kv heads than the tensor axis are replicated if they divide it. Any other size that does not divide raises
    ConfigError with both numbers, as do an unknown name and two axes that meet on one mesh axis.
    """
    if len(axes) != len(shape):
        raise ConfigError(f"{name}: axes {tuple(axes)} do not fit the shape {tuple(shape)}")
    parts: list = []
    used: set[str] = set()
    for axis, size in zip(axes, shape):
        try:
            names = mesh_axes(axis)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
        count = math.prod(mesh.shape[n] for n in names)
        if axis == "kv_heads" and size < count and count % size == 0:
            names, count = (), 1
        if size % count:
            raise ConfigError(f"{name}: axis {axis!r} of size {size} does not divide over mesh axes {names} of size {count}")
        if used & set(names):
            raise ConfigError(f"{name}: axes {tuple(axes)} meet on mesh axes {sorted(used & set(names))}")
        used |= set(names)
        parts.append(names if len(names) > 1 else names[0] if names else None)
    return P(*parts)


def on(mesh: Mesh, run: Callable) -> Callable:
    """`run` with `mesh` set, so that activations inside are constrained to it; `run` itself on one device."""
    if mesh.size == 1:
        return run

    @functools.wraps(run)
    def inside(*args, **kwargs):
        with jax.set_mesh(mesh):
            return run(*args, **kwargs)

    return inside


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` with the sharding that RULES gives these axes on the mesh that is set; a size that does not divide stays whole.

    Without a mesh, or on one device, nothing happens. Axes of x beyond those named are not sharded.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    parts = []
    for axis, size in zip(axes, x.shape):
        names = mesh_axes(axis)
        parts.append(names if names and size % math.prod(mesh.shape[n] for n in names) == 0 else None)
    return jax.lax.with_sharding_constraint(x, P(*parts))

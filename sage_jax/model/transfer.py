"""Between stored tensors and arrays on a mesh, a slab of tensors at a time: the host never holds much more than one tensor.

A parameter of all layers (and experts) is many stored tensors. Small ones are read and written at once. Of a large one a
slab, some of its tensors in stored order and type, crosses between host and devices; axes are turned and types changed on the
devices, into or out of the parameter, which is filled in place.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from sage_jax.model.layout import Layout
from sage_jax.model.safetensors_io import Stored

AT_ONCE = 16 << 20  # bytes: a smaller parameter is one slab, and so many tensors of a larger one are one


def to_devices(
    layout: Layout, tensors: dict[str, Stored], shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding, advance: Callable[[int], object]
) -> jax.Array:
    """The parameter of `shape` and `dtype`; each process reads what its devices hold. `advance(n)`: n tensors more are done."""
    lead, view = layout.lead, tuple(shape[layout.lead + a] for a in layout.order)
    kinds = {tensors[name].dtype for name in layout.names.flat}
    kind = kinds.pop() if len(kinds) == 1 else np.dtype(np.float32)  # holds every value of the others
    if math.prod(shape) * max(kind.itemsize, dtype.itemsize) <= AT_ONCE:
        rows = tuple(map(range, shape[:lead]))

        def shard(index):
            rest = index[lead:]
            block = _read(layout, tensors, view, rows, (*index[:lead], *(rest[a] for a in layout.order)), dtype)
            return block.transpose(*range(lead), *(lead + a for a in layout.ours))

        array = _placed(shape, sharding, shard)
        advance(layout.names.size)
        return array

    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    slab_sharding = NamedSharding(sharding.mesh, P(*spec[:lead], *(spec[lead + a] for a in layout.order)))
    slabs = _Slabs(shape[:lead], sharding.shard_shape(shape)[:lead], math.prod(view) * kind.itemsize)
    put = _put(sharding, slab_sharding, lead, layout.ours, dtype)
    array = None if slabs.single else _zeros(shape, dtype, sharding)()
    for at, rows in slabs:
        slab = _placed((*map(len, rows), *view), slab_sharding, functools.partial(_read, layout, tensors, view, rows, dtype=kind))
        array = jax.block_until_ready(put(array, slab, np.array(at, np.int32)))  # else the host runs ahead of its devices
        advance(math.prod(map(len, rows)))
    return array


def from_devices(
    layout: Layout, arrays: Sequence[jax.Array], combine: Callable[..., jax.Array]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor as stored) of a parameter, in its own dtype, one after the other.

    arrays: the parameter and what belongs to it (adapters), alike in their leading axes; `combine` makes one array of slabs
    of them, shaped like a slab of the parameter. Every process of several has to run through all of it.
    """
    first, lead = arrays[0], layout.lead
    order = (*range(lead), *(lead + a for a in layout.order))
    if first.size * first.dtype.itemsize <= AT_ONCE:
        yield from _named(layout, tuple(map(range, first.shape[:lead])), _to_host(combine(*arrays)).transpose(order))
        return
    local = first.sharding.shard_shape(first.shape)[:lead]
    slabs = _Slabs(first.shape[:lead], local, math.prod(first.shape[lead:]) * first.dtype.itemsize)

    def fetch(at: tuple[int, ...]) -> np.ndarray:  # a function, so that nothing of a slab outlives it
        return _to_host(jnp.transpose(combine(*(_cut(a.sharding, lead, slabs.chunk)(a, np.array(at, np.int32)) for a in arrays)), order))

    for at, rows in slabs:
        yield from _named(layout, rows, fetch(at))


class _Slabs:
    """Iterates over (where a slab starts within each device's shard, its rows of the whole), a row list for each leading axis.

    A leading axis may be sharded (experts): a slab then takes the same rows of every shard, so that devices need nothing of
    each other.
    """

    def __init__(self, lead: tuple[int, ...], local: tuple[int, ...], tensor_bytes: int):
        self._lead, self._local = lead, local
        many = max(1, AT_ONCE // (tensor_bytes * (math.prod(lead) // math.prod(local))))
        chunk = []
        for size in reversed(local):
            take = max(n for n in range(1, size + 1) if size % n == 0 and n <= many)
            chunk.append(take)
            many = many // take if take == size else 1
        self.chunk = tuple(reversed(chunk))

    @property
    def single(self) -> bool:
        return self.chunk == self._local

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[list[int], ...]]]:
        for at in itertools.product(*(range(0, n, c) for n, c in zip(self._local, self.chunk))):
            yield at, tuple(
                [shard + start + n for shard in range(0, size, local) for n in range(take)]
                for size, local, start, take in zip(self._lead, self._local, at, self.chunk)
            )


def _placed(shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """An array whose parts `read` gives; a part that several devices hold is read once."""
    parts: dict[tuple, np.ndarray] = {}

    def part(index):
        key = tuple((i.start, i.stop) for i in index)
        if key not in parts:
            parts[key] = read(index)
        return parts[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _read(
    layout: Layout, tensors: dict[str, Stored], view: tuple[int, ...], rows: tuple[Sequence[int], ...], index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """Part `index` of the slab of these rows, axes in stored order with heads apart (`view`)."""
    names = _pick(layout.names, [np.asarray(r)[i] for r, i in zip(rows, index)])
    part = index[layout.lead :]
    block = np.empty((*names.shape, *(len(range(*i.indices(n))) for i, n in zip(part, view))), dtype)
    for at, name in np.ndenumerate(names):
        block[at] = tensors[name].open().reshape(view)[part]
    return block


def _named(layout: Layout, rows: tuple[Sequence[int], ...], slab: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for at, name in np.ndenumerate(_pick(layout.names, rows)):
        yield name, slab[at].reshape(layout.shape)


def _pick(names: np.ndarray, rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.asarray(names[np.ix_(*rows)] if rows else names, object)


def _to_host(a: jax.Array) -> np.ndarray:
    return np.asarray(a if a.is_fully_addressable else multihost_utils.process_allgather(a, tiled=True))


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.cache
def _put(sharding: NamedSharding, slab_sharding: NamedSharding, lead: int, ours: tuple[int, ...], dtype: np.dtype) -> Callable:
    """(array or None, slab, where) -> the array with the slab in it, our axes and dtype."""

    def turned(slab):
        return slab.transpose(*range(lead), *(lead + a for a in ours)).astype(dtype)

    def update(array, slab, at):
        return jax.lax.dynamic_update_slice(array, turned(slab), (*at, *[jnp.int32(0)] * len(ours)))

    part = jax.shard_map(update, mesh=sharding.mesh, in_specs=(sharding.spec, slab_sharding.spec, P()), out_specs=sharding.spec)
    into, whole = jax.jit(part, donate_argnums=0), jax.jit(turned, out_shardings=sharding)
    return lambda array, slab, at: whole(slab) if array is None else into(array, slab, at)


@functools.cache
def _cut(sharding: Sharding, lead: int, chunk: tuple[int, ...]) -> Callable:
    """(array, where) -> that slab of each device's shard; always a new array, whose copy on the host goes with it."""

    def part(array, at):
        sizes = (*chunk, *array.shape[lead:])
        return jax.lax.dynamic_slice(array, (*at, *[jnp.int32(0)] * (array.ndim - lead)), sizes)

    if isinstance(sharding, NamedSharding):
        part = jax.shard_map(part, mesh=sharding.mesh, in_specs=(sharding.spec, P()), out_specs=sharding.spec)
    return jax.jit(part)

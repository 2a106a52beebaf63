"""Attention by the Pallas splash kernel for TPU, with packed sequences by segment ids.

The kernel is causal in T, so positions of a segment must rise with T (those of packed rows do). It runs inside a `shard_map` over
batch and heads where a mesh is set; grouped key/value heads are repeated to the query heads.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BLOCK = 128  # lengths are multiples of it
LARGE = 512  # block that is taken where it divides the length
BATCH = ("data", "fsdp")
HEADS = "tensor"


def attend_splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, interpret: bool = False) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H], segments int32 [B, T] -> [B, T, N, H]; T a multiple of BLOCK. `interpret`: on any backend, slow."""
    group = q.shape[2] // k.shape[2]
    q = q * q.shape[-1] ** -0.5
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    local = functools.partial(_local, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return local(q, k, v, segments)
    rows = P(BATCH, None, HEADS, None)
    # The kernel's outputs carry no record of the axes over which they vary, so that check is off.
    return jax.shard_map(local, in_specs=(rows, rows, rows, P(BATCH, None)), out_specs=rows, check_vma=False)(q, k, v, segments)


def _local(q, k, v, segments, interpret):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1], q.shape[2]
    size = LARGE if length % LARGE == 0 else BLOCK
    blocks = kernel.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=size, block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=size,
        block_q_dq=size, block_kv_dq=size,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    attend = kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, interpret=interpret)
    heads_first = [a.transpose(0, 2, 1, 3) for a in (q, k, v)]
    out = jax.vmap(lambda q, k, v, s: attend(q, k, v, segment_ids=kernel.SegmentIds(q=s, kv=s)))(*heads_first, segments)
    return out.transpose(0, 2, 1, 3)

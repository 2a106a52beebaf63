"""Grouped-query attention over whole sequences, without a cache: what is visible, and which implementation computes it.

Axes: B batch, T time, N query heads, K key/value heads, G = N / K, H head size. Scores and softmax are float32. `cache.py` holds the
cached form that sampling uses.

  heads    head by head for a single CPU device (`attention_heads`)
  xla      jax.nn.dot_product_attention, which holds T x T scores a head
  chunked  blocks with an online softmax (`attention_chunked`): any backend, memory grows with T
  cudnn    jax.nn.dot_product_attention on cuDNN's fused kernels, GPU
  splash   the Pallas kernel for TPU (`attention_splash`)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sage_jax.errors import ConfigError
from sage_jax.model.attention_chunked import attend_chunked
from sage_jax.model.attention_heads import attend_heads
from sage_jax.model.attention_splash import BLOCK as SPLASH_BLOCK
from sage_jax.model.attention_splash import attend_splash
from sage_jax.model.config import ATTENTION, ModelConfig

LONG = 4_096  # from this length on `auto` never holds T x T scores
_NEEDS = {"cudnn": "gpu", "splash": "tpu", "heads": "cpu"}


@dataclasses.dataclass(frozen=True)
class Visible:
    """What each query of a batch sees: keys of its own segment, which is not 0, at the same or an earlier position, never later in T."""

    positions: jax.Array  # int32 [B, T]
    segments: jax.Array  # int32 [B, T], 0 is padding
    mask: jax.Array | None  # bool [B, T, T]; None for implementations that build it block by block
    implementation: str


def visible(cfg: ModelConfig, positions: jax.Array, segment_ids: jax.Array | None) -> Visible:
    """Made once for all layers of a call."""
    segments = jnp.ones_like(positions) if segment_ids is None else segment_ids
    name = choose(cfg, positions.shape[1])
    mask = sequence_mask(positions, segment_ids) if name in ("heads", "xla", "cudnn") else None
    return Visible(positions, segments, mask, name)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, see: Visible) -> jax.Array:
    """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]. What stands at padding is finite and meaningless."""
    if see.implementation == "heads":
        return attend_heads(q, k, v, see.mask)
    if see.implementation == "chunked":
        return attend_chunked(q, k, v, see.positions, see.segments)
    if see.implementation == "splash":
        return attend_splash(q, k, v, see.segments)
    return jax.nn.dot_product_attention(q, k, v, mask=see.mask[:, None], implementation=see.implementation)


def sequence_mask(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """bool [B, T, T]: query t sees key u of its own segment at the same or an earlier position; segment 0 is padding."""
    mask = positions[:, None, :] <= positions[:, :, None]
    if segment_ids is not None:
        same = segment_ids[:, None, :] == segment_ids[:, :, None]
        mask = mask & same & (segment_ids > 0)[:, None, :]
    return mask


def choose(cfg: ModelConfig, length: int, backend: str | None = None, devices: int | None = None) -> str:
    """The implementation for sequences of `length`: the one that the config names, or for `auto` what fits backend and shape.

    Whether a named one can run here is not asked (programs are also compiled for other machines): see `check_available`.
    """
    if cfg.attention != "auto":
        return cfg.attention
    backend = jax.default_backend() if backend is None else backend
    devices = jax.device_count() if devices is None else devices
    plain = "chunked" if length >= LONG else "xla"
    if backend == "tpu":
        return "splash" if length % SPLASH_BLOCK == 0 and cfg.head_dim % 128 == 0 else plain
    if backend == "gpu":
        return "cudnn" if cfg.dtype != "float32" and cfg.head_dim <= 128 and cfg.head_dim % 8 == 0 else plain
    return "heads" if devices == 1 and length < LONG else plain


def check_available(cfg: ModelConfig, lengths: tuple[int, ...], backend: str | None = None, devices: int | None = None) -> None:
    """Raises ConfigError where the named implementation cannot run on this machine, or not with rows of these lengths."""
    backend = jax.default_backend() if backend is None else backend
    devices = jax.device_count() if devices is None else devices
    name = cfg.attention
    if name in _NEEDS and backend != _NEEDS[name]:
        valid = ", ".join(a for a in ATTENTION if _NEEDS.get(a, backend) == backend)
        raise ConfigError(f"model.attention={name!r} needs a {_NEEDS[name].upper()} and this is {backend}: valid are {valid}")
    if name == "heads" and devices > 1:
        raise ConfigError(f"model.attention='heads' is for a single device and there are {devices}: use auto, xla or chunked")
    if name == "cudnn" and cfg.dtype == "float32":
        raise ConfigError("model.attention='cudnn' computes in 16 bit only: set model.dtype='bfloat16'")
    if name == "splash":
        if wrong := [n for n in lengths if n % SPLASH_BLOCK]:
            raise ConfigError(f"model.attention='splash' needs rows of a multiple of {SPLASH_BLOCK} tokens, got {wrong[0]}")
        if cfg.head_dim % 128:
            raise ConfigError(f"model.attention='splash' needs a head size that is a multiple of 128, got {cfg.head_dim}")

"""Rotary position embedding: its frequencies, plain and scaled, and the rotation of queries and keys.

Pairs are halves of a head: dimension i turns with dimension i + H/2. All angles are float32: in 16 bit they are wrong after a
few hundred tokens. The scalings are those of published Qwen checkpoints:

  linear   f_i / factor                                                                             (Chen et al. 2023, arXiv 2306.15595)
  dynamic  theta' = theta (factor n / m - (factor - 1))^(H / (H - 2)) for n = max(length, m), m = max_position   (NTK-aware, growing)
  yarn     f_i / factor for slow dimensions, f_i for fast ones, a ramp between; cos and sin times 0.1 ln(factor) + 1   (arXiv 2309.00071)
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sage_jax.errors import ConfigError

if TYPE_CHECKING:
    from sage_jax.model.config import ModelConfig

KINDS = ("linear", "dynamic", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a longer context follow from the trained ones. `yarn` alone reads all but kind and factor."""

    kind: str
    factor: float
    original_max_position: int = 0  # positions of the training before scaling
    attention_factor: float | None = None  # of cos and sin; None: from the factor
    beta_fast: float = 32.0  # turns over the original context above which a dimension is left alone
    beta_slow: float = 1.0  # and below which it is interpolated
    truncate: bool = True  # bounds of the ramp at whole dimensions
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"rope_type={self.kind!r} is not supported: valid are default, {', '.join(KINDS)}")
        if not self.factor > 0:
            raise ConfigError(f"rope factor={self.factor}: must be above 0")
        if self.kind == "yarn" and self.original_max_position < 1:
            raise ConfigError("rope_type='yarn' needs original_max_position_embeddings")

    @property
    def cos_scale(self) -> float:
        """Factor of cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], max_position: int) -> RopeScaling | None:
        """Of the content of `rope_parameters` or `rope_scaling`; None for the default. Raises ConfigError for what is not supported."""
        kind = raw.get("rope_type", raw.get("type", "default"))
        if raw.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"partial_rotary_factor={raw['partial_rotary_factor']!r} is not supported: valid is 1.0")
        if kind == "default":
            return None
        if kind not in KINDS:
            raise ConfigError(f"rope_type={kind!r} is not supported: valid are default, {', '.join(KINDS)}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "max_position_embeddings", *_YARN}
        if unknown := sorted(k for k in set(raw) - known if raw[k] is not None):
            raise ConfigError(f"{unknown[0]}={raw[unknown[0]]!r} of rope_type={kind!r} is not supported: valid are {', '.join(sorted(known))}")
        original = raw.get("original_max_position_embeddings") or max_position
        factor = raw.get("factor")
        if factor is None:
            if kind != "yarn":
                raise ConfigError(f"rope_type={kind!r} needs a factor")
            factor = max_position / original
        yarn = {ours: raw[theirs] for theirs, ours in _YARN.items() if kind == "yarn" and raw.get(theirs) is not None}
        return cls(**{"kind": kind, "factor": float(factor), **yarn, "original_max_position": original if kind == "yarn" else 0})

    def to_hf(self) -> dict[str, Any]:
        raw = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "yarn":
            raw |= {theirs: getattr(self, ours) for theirs, ours in _YARN.items() if getattr(self, ours) is not None}
        return raw


_YARN = {
    "original_max_position_embeddings": "original_max_position", "attention_factor": "attention_factor", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow", "truncate": "truncate", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}


def phases(positions: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotary angles, float32 [B, T, H/2], of int32 positions [B, T].

    With dynamic scaling the length is the largest position of the call plus one: the frequencies of a whole batch follow from
    its longest row, as in the published implementation. Keys that lie in a cache cannot follow: see `check_cache`.
    """
    scaling = cfg.rope_scaling
    if scaling is None or scaling.kind != "dynamic":
        freq = jnp.asarray(frequencies(cfg))
    else:
        length = jnp.maximum(jnp.max(positions) + 1, cfg.max_position).astype(jnp.float32)
        stretch = (scaling.factor * length / cfg.max_position - (scaling.factor - 1)) ** (cfg.head_dim / (cfg.head_dim - 2))
        freq = (cfg.rope_theta * stretch) ** -jnp.asarray(_exponents(cfg.head_dim))
    angle = positions.astype(jnp.float32)[..., None] * freq
    scale = 1.0 if scaling is None else scaling.cos_scale
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def frequencies(cfg: ModelConfig) -> np.ndarray:
    """Angle per position of each pair, float32 [H/2]; with dynamic scaling those within `max_position`."""
    size, scaling = cfg.head_dim, cfg.rope_scaling
    freq = (1.0 / np.float32(cfg.rope_theta) ** _exponents(size)).astype(np.float32)
    if scaling is None or scaling.kind == "dynamic":
        return freq
    if scaling.kind == "linear":
        return freq / np.float32(scaling.factor)

    def dimension(turns: float) -> float:  # the one that turns this often over the original context
        return size * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low or 0.001), 0, 1)
    return (freq / np.float32(scaling.factor) * ramp + freq * (1 - ramp)).astype(np.float32)


def check_cache(cfg: ModelConfig, length: int) -> None:
    """Raises ConfigError for a cache of `length` slots in which a growing row would change the frequencies of what it holds."""
    if cfg.rope_scaling is not None and cfg.rope_scaling.kind == "dynamic" and length > cfg.max_position:
        raise ConfigError(
            f"a context of {length} tokens with rope_type='dynamic' and max_position_embeddings={cfg.max_position}: beyond it every new token "
            f"changes the frequencies of the keys in the cache. Use at most {cfg.max_position} tokens, or rope_type 'yarn' or 'linear'"
        )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [B, T, heads, H] turned by cos and sin float32 [B, T, H/2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _exponents(size: int) -> np.ndarray:
    return np.arange(0, size, 2, dtype=np.float32) / np.float32(size)


def _mscale(scale: float, weight: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

"""The per-token policy loss and its normalisers. Every loss is a (sum, denominator) pair until all micro-batches and
devices are in: dividing earlier would weight tokens by the micro-batch they happened to fall into.

For a sampled token t of an episode with advantage A: rho_t = exp(new_t - old_t), both log-probs over the whole unpadded vocabulary at
the sampling temperature, and

    loss_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A)          (PPO, Schulman et al. 2017, eq. 7)

The batch's loss is sum_t w_t loss_t / denominator, with (`rl.batch.pack` fills both in)
  sequence  w = 1/|o|, |o| all sampled tokens of the episode; denominator = valid rollouts                      (SAGE, GRPO)
  token     w = 1; denominator = all sampled tokens of the global batch                                         (DAPO, LOOP)
  constant  w = 1; denominator = constant * valid episodes                                                      (Dr. GRPO)
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from sage_jax.errors import ConfigError
from sage_jax.rl import masked

NORMALISERS = ("sequence", "token", "constant")
OLD_LOGPROBS = ("recomputed", "sampler")
MAX_LOG_RATIO = 20.0  # e^20: keeps inf * 0 out of the gradient; every sane ratio is far below


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Choices of the policy loss; checked when made."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    normaliser: str = "sequence"
    constant: float = 1.0  # tokens; read by the `constant` normaliser only
    old_logprobs: str = "recomputed"  # with the weights that sampled, or the sampler's own

    def __post_init__(self):
        if self.normaliser not in NORMALISERS:
            raise ConfigError(f"unknown normaliser {self.normaliser!r}; choices: {', '.join(NORMALISERS)}")
        if self.old_logprobs not in OLD_LOGPROBS:
            raise ConfigError(f"unknown old_logprobs {self.old_logprobs!r}; choices: {', '.join(OLD_LOGPROBS)}")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ConfigError(f"clip_low must be in [0, 1) and clip_high >= 0, got {self.clip_low}, {self.clip_high}")
        if self.constant <= 0:
            raise ConfigError(f"the constant of the normaliser must be positive, got {self.constant}")


def check_sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float = 1.0,
    logit_bias: dict | None = None,
    old_logprobs: str = "recomputed",
) -> None:
    """Refuses at start the sampling settings under which a policy ratio would be wrong.

    Args:
      temperature: of the sampler; the trainer's log-probs are taken at the same one.
      top_k: 0 means off. top_p: 1.0 means off.

    Raises:
      ConfigError: greedy sampling, repetition penalty or logit bias, or the sampler's log-probs as `old` while top-k or top-p cut
        the support (they are renormalised over the kept mass, so each ratio would be off by that mass).
    """
    if temperature <= 0:
        raise ConfigError(f"RL needs a sampling temperature above 0, got {temperature}")
    if repetition_penalty != 1.0:
        raise ConfigError(f"RL with repetition_penalty={repetition_penalty} has no well-defined ratio; set it to 1.0")
    if logit_bias:
        raise ConfigError(f"RL with a logit bias has no well-defined ratio; remove logit_bias={logit_bias}")
    if old_logprobs == "sampler" and (top_k > 0 or top_p < 1.0):
        raise ConfigError(
            f"old_logprobs='sampler' with top_k={top_k}, top_p={top_p}: the sampler's log-probs are over the kept support; "
            "use old_logprobs='recomputed', or top_k=0 and top_p=1.0"
        )


def clipped_loss(
    new: jax.Array, old: jax.Array, advantages: jax.Array, mask: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss of each token. All arguments float32 [B, T] (or any one shape); gradients flow into `new` only.

    Returns:
      (loss [B, T], ratio [B, T], clipped [B, T]: 1 where the clip took the gradient away); 0, 1 and 0 under mask 0.
    """
    new, old, advantages = masked.keep(new, mask), masked.keep(jax.lax.stop_gradient(old), mask), masked.keep(advantages, mask)
    ratio = jnp.exp(jnp.minimum(new - old, MAX_LOG_RATIO))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, bounded * advantages)
    clipped = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return loss, ratio, clipped.astype(jnp.float32)

"""The policy update: (recompute old log-probs) -> accumulate over micro-batches -> clip -> AdamW -> metrics.

Strictly on-policy (one epoch, one mini-batch, old log-probs recomputed) the old log-probs are those of this very
forward pass, so `old = stop_gradient(new)`: the ratio is exactly 1 and no second forward runs. Otherwise they are recomputed
for all mini-batches with the weights that sampled, before the first update.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from sage_jax.errors import ConfigError
from sage_jax.model.lora import join
from sage_jax.model.rules import on
from sage_jax.rl import masked
from sage_jax.rl.accumulate import Stats, UpdateStep, batch_sharding, put_batch
from sage_jax.rl.batch import Packed, TrainBatch
from sage_jax.rl.losses import LossConfig, clipped_loss
from sage_jax.rl.router import batch_logprobs
from sage_jax.training.state import TrainState

# (params, batch) -> (log-prob of each next token, entropy of its distribution in nats), float32 [B, T-1], and what is added to the loss, if anything
LogprobFn = Callable[[Any, TrainBatch], tuple[jax.Array, ...]]


def policy_logprobs(graphdef: Any, *, temperature: float, vocab_size_real: int) -> LogprobFn:
    """The policy's log-probs at the sampling temperature over the whole unpadded vocabulary, and its router's loss if it has one."""

    def logprobs(params: Any, batch: TrainBatch) -> tuple[jax.Array, ...]:
        return batch_logprobs(nnx.merge(graphdef, params), batch, temperature, vocab_size_real)

    return logprobs


def policy_loss(params: Any, batch: TrainBatch, logprobs: LogprobFn, cfg: LossConfig, on_policy: bool) -> tuple[jax.Array, Stats]:
    """Weighted sum of the clipped losses of one micro-batch, and its statistics. See `rl.losses` for the formula.

    A router's loss is a mean over all tokens of the micro-batch; added in proportion to these, its mean over the batch remains.

    The gap |sampler's log-prob - trainer's| is taken at the sampling temperature. With top-k or top-p the sampler's is
    over the kept support, so the gap then holds the log of the kept mass, the ratio does not.
    """
    mask = batch.mask[:, 1:]
    new, entropy, *extra = logprobs(params, batch)
    new = masked.keep(new, mask)
    old = jax.lax.stop_gradient(new) if on_policy else batch.old_logprobs[:, 1:]
    loss, ratio, clipped = clipped_loss(new, old, batch.advantages[:, 1:], mask, cfg.clip_low, cfg.clip_high)
    trainer = jax.lax.stop_gradient(old if cfg.old_logprobs == "recomputed" else new)
    gap = jnp.abs(masked.keep(batch.logprobs[:, 1:], mask) - masked.keep(trainer, mask))
    stats = Stats(
        sums={
            "tokens": masked.count(mask),
            "ratio": masked.total(ratio, mask),
            "clipped": masked.total(clipped, mask),
            "entropy": masked.total(entropy, mask),
            "gap": masked.total(gap, mask),
            "gap_histogram": masked.log_histogram(gap, mask),
        },
        mins={"ratio": masked.least(ratio, mask)},
        maxs={"ratio": masked.largest(ratio, mask), "gap": masked.largest(gap, mask)},
    )
    value = masked.total(loss * masked.keep(batch.weights[:, 1:], mask), mask)
    if extra:
        stats.sums["router_loss"] = extra[0] * batch.tokens_share.sum()
        value += stats.sums["router_loss"]
    return value, jax.lax.stop_gradient(stats)


class PolicyUpdate:
    """`update(state, packed, ...) -> (state, metrics)`: all optimizer updates of one step.

    Args:
      logprobs: see `policy_logprobs`; any function of parameters and a batch will do.
      tx: the optimizer of `state`.
      state: gives the shardings; not donated here.
      epochs, mini_batches: passes over the batch, and optimizer updates in each pass.
      frozen: the part of the parameters that does not train, see `UpdateStep`.
    """

    def __init__(
        self,
        logprobs: LogprobFn,
        tx: optax.GradientTransformation,
        state: TrainState,
        mesh: Mesh,
        cfg: LossConfig,
        *,
        epochs: int = 1,
        mini_batches: int = 1,
        frozen: Any = None,
    ):
        if epochs < 1 or mini_batches < 1:
            raise ConfigError(f"epochs={epochs} and mini_batches={mini_batches} must be at least 1")
        self.cfg, self.epochs, self.mini_batches = cfg, epochs, mini_batches
        self.on_policy = epochs == mini_batches == 1 and cfg.old_logprobs == "recomputed"
        self._sharding = batch_sharding(mesh)
        self._step = UpdateStep(lambda p, b: policy_loss(p, b, logprobs, cfg, self.on_policy), tx, state, mesh, frozen)
        self._frozen, self._mesh = frozen, mesh

        def recompute(params: Any, frozen: Any, batch: TrainBatch) -> jax.Array:
            params = params if frozen is None else join(params, frozen)
            return jnp.pad(masked.keep(logprobs(params, batch)[0], batch.mask[:, 1:]), ((0, 0), (1, 0)))

        self._recompute = jax.jit(recompute)

    def __call__(self, state: TrainState, packed: Sequence[Packed]) -> tuple[TrainState, dict[str, float]]:
        """Runs epochs x mini-batches updates; `state` is donated.

        Args:
          packed: one a mini-batch, see `rl.batch.split_by_rollout` and `pack`.

        Returns:
          the new state and the metrics of `docs/metrics.md`: means over the updates, extremes over all tokens; the gap
          over the first pass.
        """
        if len(packed) != self.mini_batches:
            raise ValueError(f"built for {self.mini_batches} mini-batches, got {len(packed)}")
        start = time.perf_counter()
        parts = [p.micro_batches for p in packed]
        if not self.on_policy and self.cfg.old_logprobs == "recomputed":
            parts = [[self._with_old(state, b) for b in part] for part in parts]
        updates, stats = [], []
        for _ in range(self.epochs):
            for part in parts:
                state, one, seen = self._step(state, part)
                updates.append(one)
                stats.append(seen)
        return state, self._metrics(packed, updates, stats, time.perf_counter() - start)

    def _with_old(self, state: TrainState, batch: TrainBatch) -> TrainBatch:
        old = on(self._mesh, self._recompute)(state.params, self._frozen, put_batch(batch, self._sharding))
        return dataclasses.replace(batch, old_logprobs=np.asarray(jax.device_get(old)))

    def _metrics(self, packed: Sequence[Packed], updates: list[dict], stats: list[Stats], seconds: float) -> dict[str, float]:
        every = _merged(stats)
        first = _merged(stats[: self.mini_batches])
        tokens, first_tokens = max(every.sums["tokens"], 1.0), max(first.sums["tokens"], 1.0)
        seen = every.sums["tokens"] > 0
        means = {k: float(np.mean([u[k] for u in updates])) for k in ("loss", "grad_norm", "update_norm")}
        useful = sum(p.tokens for p in packed) * self.epochs
        places = sum(b.ids.size for p in packed for b in p.micro_batches)
        router = {}
        if "router_loss" in every.sums:
            router["update/router_loss"] = float(every.sums["router_loss"] / max(sum(p.denominator for p in packed) * self.epochs, 1.0))
        return router | {
            "update/loss": means["loss"],
            "update/grad_norm": means["grad_norm"],
            "update/update_norm": means["update_norm"],
            "update/applied": float(sum(u["applied"] for u in updates)),
            "update/skipped": float(sum(1 - u["applied"] for u in updates)),
            "update/ratio_min": float(every.mins["ratio"]) if seen else 1.0,
            "update/ratio_mean": float(every.sums["ratio"] / tokens) if seen else 1.0,
            "update/ratio_max": float(every.maxs["ratio"]) if seen else 1.0,
            "update/clip_share": float(every.sums["clipped"] / tokens),
            "update/entropy_nats": float(every.sums["entropy"] / tokens),
            "update/gap_mean_nats": float(first.sums["gap"] / first_tokens),
            "update/gap_p99_nats": min(
                float(masked.histogram_quantile(first.sums["gap_histogram"], 0.99)), max(float(first.maxs["gap"]), 0.0)
            ),
            "update/gap_max_nats": max(float(first.maxs["gap"]), 0.0),
            "update/trained_tokens": float(sum(p.trained_tokens for p in packed)),
            "update/packed_tokens": float(sum(p.tokens for p in packed)),
            "update/padding_share": 1 - sum(p.tokens for p in packed) / places,
            "update/idle_episodes": float(sum(p.idle for p in packed)),
            "update/tokens_per_s": useful / seconds,
            "time/update_s": seconds,
        }

    def compiled(self) -> int:
        """Programs compiled so far."""
        return self._step.compiled() + self._recompute._cache_size()


def _merged(stats: Sequence[Stats]) -> Stats:
    def fold(op: np.ufunc, dicts: list[dict]) -> dict:
        return {k: op.reduce([d[k] for d in dicts]) for k in dicts[0]}

    return Stats(
        fold(np.add, [s.sums for s in stats]), fold(np.minimum, [s.mins for s in stats]), fold(np.maximum, [s.maxs for s in stats])
    )

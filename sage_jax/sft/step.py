"""The supervised loss on packed rows and its evaluation.

With p_t the policy's probability of label token t, the loss is sum_t w_t (-log p_t) / denominator, with the weights and
denominators of `rl.batch.pack`: `sequence` averages within each conversation first, `token` over all labels.
Axes: B rows, T tokens of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from sage_jax.model.qwen import Policy, mask_padded
from sage_jax.model.rules import on
from sage_jax.rl import masked
from sage_jax.rl.accumulate import LossFn, Stats, batch_sharding, put_batch
from sage_jax.rl.batch import Packed, TrainBatch
from sage_jax.rl.router import batch_logprobs

CHUNK = 128  # time steps whose logits exist at once

NORMALISERS = ("sequence", "token")


def supervised_loss(graphdef: Any, vocab_size_real: int, *, router: bool = True) -> LossFn:
    """The loss function for `rl.accumulate.UpdateStep`. router: with the balance loss of a mixture of experts, as in `rl.update`."""

    def loss(params: Any, batch: TrainBatch) -> tuple[jax.Array, Stats]:
        mask = batch.mask[:, 1:]
        logprobs, _, *extra = batch_logprobs(nnx.merge(graphdef, params), batch, 1.0, vocab_size_real)
        value = -masked.total(masked.keep(logprobs, mask) * masked.keep(batch.weights[:, 1:], mask), mask)
        if router and extra:
            value += extra[0] * batch.tokens_share.sum()
        return value, Stats({"tokens": masked.count(mask)}, {}, {})

    return loss


class Evaluation:
    """Held-out loss and accuracy: `evaluation(params, packed) -> metrics`."""

    def __init__(self, graphdef: Any, vocab_size_real: int, mesh: Mesh):
        self._sharding = batch_sharding(mesh)
        loss_fn = supervised_loss(graphdef, vocab_size_real, router=False)

        def sums(params: Any, batch: TrainBatch) -> dict[str, jax.Array]:
            loss, stats = loss_fn(params, batch)
            mask = batch.mask[:, 1:]
            wrong = masked.keep(1.0 - _hits(nnx.merge(graphdef, params), batch, vocab_size_real), mask)
            # w = 1/|o| in `sequence` packing; counts of whole conversations need segments, so wrong tokens are summed by segment
            index = batch.segment_ids[:, 1:] + jnp.arange(batch.shape[0])[:, None] * (batch.shape[1] + 1)
            size = batch.shape[0] * (batch.shape[1] + 1)
            by_segment = jnp.zeros(size).at[index].add(wrong)
            labels = jnp.zeros(size).at[index].add((mask > 0).astype(jnp.float32))
            return {
                "loss": loss,
                "denominator": batch.denominator.sum(),
                "tokens": stats.sums["tokens"],
                "wrong": wrong.sum(),
                "conversations": (labels > 0).sum().astype(jnp.float32),
                "right_conversations": ((labels > 0) & (by_segment == 0)).sum().astype(jnp.float32),
            }

        self._sums = on(mesh, jax.jit(sums))

    def __call__(self, params: Any, packed: Packed) -> dict[str, float]:
        """{"loss_nats", "token_accuracy", "sequence_accuracy"}: greedy, with the right context before each token (teacher forcing)."""
        parts: Sequence[dict] = jax.device_get([self._sums(params, put_batch(b, self._sharding)) for b in packed.micro_batches])
        total = {k: float(sum(p[k] for p in parts)) for k in parts[0]}
        return {
            "loss_nats": total["loss"] / max(total["denominator"], 1.0),
            "token_accuracy": 1 - total["wrong"] / max(total["tokens"], 1.0),
            "sequence_accuracy": total["right_conversations"] / max(total["conversations"], 1.0),
        }


def _hits(policy: Policy, batch: TrainBatch, vocab_size_real: int) -> jax.Array:
    """1.0 where the most probable token is the next one, float32 [B, T-1]."""
    hidden, _ = policy(batch.ids, batch.positions, segment_ids=batch.segment_ids)
    rows, steps = batch.ids.shape[0], batch.ids.shape[1] - 1
    pad = -steps % min(CHUNK, steps)
    chunks = (steps + pad) // min(CHUNK, steps)
    hidden = jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0))).reshape(rows, chunks, -1, hidden.shape[-1])
    best = jax.lax.map(lambda h: mask_padded(policy.logits(h), vocab_size_real).argmax(-1), jnp.moveaxis(hidden, 1, 0))
    best = jnp.moveaxis(best, 0, 1).reshape(rows, -1)[:, :steps]
    return (best == batch.ids[:, 1:]).astype(jnp.float32)

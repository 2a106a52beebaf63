"""Log-probs of a policy and, for a mixture of experts, its load-balancing loss from the same forward pass."""

from __future__ import annotations

import jax

from sage_jax.model.qwen import Policy, token_logprobs
from sage_jax.rl.batch import TrainBatch


def batch_logprobs(policy: Policy, batch: TrainBatch, temperature: float, vocab_size_real: int) -> tuple[jax.Array, ...]:
    """(log-prob of each next token, entropy of its distribution in nats), float32 [B, T-1], as `token_logprobs`.

    With experts and a `router_aux_coef` other than 0 a third: that coefficient times the balance loss over the batch's tokens, float32 [].
    """
    inputs = batch.ids, batch.positions, batch.segment_ids, temperature, vocab_size_real
    if not (policy.cfg.num_experts and policy.cfg.router_aux_coef):
        return token_logprobs(policy, *inputs)
    watched = _Watched(policy)
    return *token_logprobs(watched, *inputs), policy.cfg.router_aux_coef * watched.aux


class _Watched:
    """A policy that keeps the balance loss of its forward pass in `aux`."""

    def __init__(self, policy: Policy):
        self._policy, self.logits = policy, policy.logits

    def __call__(self, ids: jax.Array, positions: jax.Array, *, segment_ids: jax.Array | None) -> tuple[jax.Array, None]:
        hidden, self.aux = self._policy.with_aux(ids, positions, segment_ids=segment_ids)
        return hidden, None

"""The load-balancing loss of a mixture of experts in training: its gradient, its weight over micro-batches, and where it is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sage_jax.model.config import ModelConfig
from sage_jax.model.qwen import token_logprobs
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.rl.accumulate import UpdateStep
from sage_jax.rl.batch import RowShape, Sample, pack
from sage_jax.rl.losses import LossConfig
from sage_jax.rl.update import PolicyUpdate, policy_logprobs
from sage_jax.sft.step import Evaluation, supervised_loss
from sage_jax.training.optimizer import init_opt_state
from sage_jax.training.state import TrainState

COEF = 0.3
CFG = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32, embed_init_std=0.3, num_experts=4,
    experts_per_token=2, expert_size=8, router_aux_coef=COEF,
)  # fmt: skip
SHAPE = [RowShape(1, 16)]


@pytest.fixture(scope="module")
def policy():
    mesh = make_mesh({}, jax.devices()[:1])
    return mesh, *create_params(CFG, mesh, 0)


def samples(lengths, key=0):
    rng = np.random.default_rng(key)
    return [
        Sample((key, r, 0), rng.integers(0, 32, t).astype(np.int32), np.arange(t).astype(bool).astype(np.float32), np.zeros(t, np.float32), 1.0)
        for r, t in enumerate(lengths)
    ]


def step(policy, make_update, packed):
    """(gradient, what the update says): SGD with rate 1 moves the parameters by it."""
    mesh, _, params = policy
    tx = optax.sgd(1.0)
    state = TrainState(jax.tree.map(jnp.copy, params), init_opt_state(tx, params, mesh))
    state, values, *_ = make_update(tx, state)(state, packed)
    return jax.tree.map(lambda a, b: a - b, params, state.params), values


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_the_gradient_has_the_balance_loss_by_tokens_of_each_micro_batch(policy):
    """Rows of 16 and 9 tokens as two micro-batches: 16/25 of the one's balance loss and 9/25 of the other's."""
    mesh, graph, params = policy
    packed = pack(samples([16, 9]), SHAPE, normaliser="token")
    assert len(packed.micro_batches) == 2

    def formula(params):
        net = nnx.merge(graph, params)
        loss = 0.0
        for b, share in zip(packed.micro_batches, (16 / 25, 9 / 25)):
            logp, _ = token_logprobs(net, b.ids, b.positions, b.segment_ids, 1.0, 32)
            loss -= (logp * b.mask[:, 1:]).sum() / packed.denominator
            loss += COEF * share * net.with_aux(b.ids, b.positions, b.segment_ids)[1]
        return loss

    want, gradient = jax.jit(jax.value_and_grad(formula))(params)
    got, values = step(policy, lambda tx, state: UpdateStep(supervised_loss(graph, 32), tx, state, mesh), packed.micro_batches)
    close(got, gradient)
    assert values["loss"] == pytest.approx(float(want), rel=1e-5)
    held_out = Evaluation(graph, 32, mesh)(params, packed)
    assert held_out["loss_nats"] < values["loss"] - COEF, "the balance loss, at least 1, is no part of what is measured"


def test_rl_adds_it_and_says_so(policy):
    mesh, graph, _ = policy
    packed = pack(samples([9, 7]), SHAPE)

    def make(graph):
        logprobs = policy_logprobs(graph, temperature=1.0, vocab_size_real=32)
        return lambda tx, state: PolicyUpdate(logprobs, tx, state, mesh, LossConfig())

    plain = nnx.split(nnx.eval_shape(lambda: type(nnx.merge(*policy[1:]))(CFG.replace(router_aux_coef=0.0), rngs=nnx.Rngs(0))))[0]
    (with_it, values), (without, bare) = (step(policy, make(g), [packed]) for g in (graph, plain))
    assert values["update/loss"] == pytest.approx(bare["update/loss"] + values["update/router_loss"], rel=1e-5)
    assert values["update/router_loss"] > COEF and "update/router_loss" not in bare
    moved = np.abs(np.asarray(with_it["layers"]["router"][...]) - np.asarray(without["layers"]["router"][...])).max()
    assert moved > 1e-4


def test_a_batch_without_tokens_adds_nothing_and_is_finite(policy):
    """All samples are idle: one micro-batch of padding, whose denominator counts them all the same."""
    mesh, graph, _ = policy
    idle = Sample((0, 0, 0), np.zeros(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.float32), 0.0)
    packed = pack([idle], SHAPE)
    got, values = step(policy, lambda tx, state: UpdateStep(supervised_loss(graph, 32), tx, state, mesh), packed.micro_batches)
    assert values["applied"] == 1 and values["loss"] == 0 and not any(np.abs(x).max() for x in map(np.asarray, jax.tree.leaves(got)))

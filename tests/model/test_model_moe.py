"""The mixture of experts against a loop over tokens, its load-balancing loss, and what does not depend on the other tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sage_jax.errors import ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.moe import Load, balance_loss, mixture
from sage_jax.model.sharding import create_params, make_mesh

CFG = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=8, num_experts=5, experts_per_token=2,
    expert_size=12, embed_init_std=0.5,
)  # fmt: skip


def weights(rng, cfg=CFG):
    d, e, m = cfg.hidden_size, cfg.num_experts, cfg.expert_size
    shapes = {"router": (d, e), "expert_gate": (e, d, m), "expert_up": (e, d, m), "expert_down": (e, m, d)}
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def by_hand(x, w, cfg):
    out, chosen = np.zeros_like(x), []
    for n, t in enumerate(x):
        logits = t @ w["router"]
        p = np.exp(logits - logits.max())
        p /= p.sum()
        best = np.argsort(-p)[: cfg.experts_per_token]
        chosen.append((best, p))
        share = p[best] / p[best].sum() if cfg.norm_topk else p[best]
        for weight, e in zip(share, best):
            gate = t @ w["expert_gate"][e]
            out[n] += weight * ((gate / (1 + np.exp(-gate)) * (t @ w["expert_up"][e])) @ w["expert_down"][e])
    return out, chosen


@pytest.mark.parametrize("norm", [True, False])
def test_equals_a_loop_over_tokens(norm):
    cfg, rng = CFG.replace(norm_topk=norm), np.random.default_rng(0)
    w, x = weights(rng), rng.normal(size=(2, 9, 16)).astype(np.float32)
    y, load = jax.jit(lambda x: mixture(x, w, cfg, None))(x)
    want, chosen = by_hand(x.reshape(-1, 16), {k: np.asarray(v) for k, v in w.items()}, cfg)
    np.testing.assert_allclose(y.reshape(-1, 16), want, atol=2e-4)
    np.testing.assert_array_equal(load.chosen, np.bincount(np.concatenate([best for best, _ in chosen]), minlength=5))
    np.testing.assert_allclose(load.probability, sum(p for _, p in chosen), rtol=1e-5)
    assert load.tokens == 18


def test_a_token_does_not_depend_on_the_others():
    rng = np.random.default_rng(1)
    w, x = weights(rng), rng.normal(size=(1, 8, 16)).astype(np.float32)
    run = jax.jit(lambda x: mixture(x, w, CFG, None)[0])
    other = x.copy()
    other[:, 3:] = rng.normal(size=(1, 5, 16))
    np.testing.assert_array_equal(run(x)[:, :3], run(other)[:, :3])


def test_balance_loss_is_k_when_all_experts_are_used_alike_and_more_otherwise():
    alike = Load(jnp.full(4, 5.0), jnp.full(4, 2.5), jnp.float32(10))  # k = 2 of 4, 10 tokens
    assert balance_loss(alike) == 2
    skewed = Load(jnp.array([10.0, 10, 0, 0]), jnp.array([5.0, 5, 0, 0]), jnp.float32(10))
    assert balance_loss(skewed) == 4


def test_balance_loss_of_a_policy_leaves_padding_out_and_has_a_gradient():
    graph, params = create_params(CFG, make_mesh(devices=jax.devices()[:1]), 0)
    rng = np.random.default_rng(2)
    ids, where = rng.integers(0, 64, (1, 12)), np.arange(12)[None]
    segments = np.where(where < 8, 1, 0)

    def aux(params, ids):
        return nnx.merge(graph, params).with_aux(jnp.asarray(ids), jnp.asarray(where), jnp.asarray(segments))[1]

    other = ids.copy()
    other[:, 8:] = rng.integers(0, 64, (1, 4))
    value, grad = jax.jit(jax.value_and_grad(aux))(params, ids)
    assert value == jax.jit(aux)(params, other) and 1.5 < value < 6
    assert np.abs(np.asarray(grad["layers"]["router"].get_value())).max() > 0


@pytest.mark.parity
@pytest.mark.parametrize("padded", [False, True])
def test_balance_loss_equals_transformers(padded):
    torch = pytest.importorskip("torch", reason="needs the extra: pip install sage-jax[parity]")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    rng = np.random.default_rng(3)
    layers = [(weights(rng), rng.normal(size=(2, 7, 16)).astype(np.float32)) for _ in range(3)]
    real = np.ones((2, 7), bool)
    real[1, 4:] = not padded
    loads = [mixture(jnp.asarray(x), w, CFG, jnp.asarray(real))[1] for w, x in layers]
    ours = balance_loss(jax.tree.map(lambda *a: sum(a), *loads))
    gates = tuple(torch.tensor(x.reshape(-1, 16) @ np.asarray(w["router"])) for w, x in layers)
    theirs = load_balancing_loss_func(gates, 5, 2, torch.tensor(real, dtype=torch.float32) if padded else None)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"experts_per_token": 6}, "experts_per_token=6: must be between 1 and num_experts=5"),
        ({"expert_size": 0}, "expert_size=0"),
        ({"lora_rank": 2, "lora_targets": ("gate",)}, "experts have no adapters"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        CFG.replace(**changes)
    for key, value in (("mlp_only_layers", [0]), ("decoder_sparse_step", 2)):
        with pytest.raises(ConfigError, match=f"{key}={value!r}".replace("[", r"\[")):
            ModelConfig.from_hf({**CFG.to_hf(), key: value})

"""Adapters: nothing at the start, what is trained, merged weights equal adapted ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sage_jax.errors import ConfigError
from sage_jax.model.config import LORA_TARGETS, ModelConfig
from sage_jax.model.lora import LoraParam, join, merged, split_trainable
from sage_jax.model.sharding import abstract_params, create_params, make_mesh

BASE = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24, embed_init_std=0.5)
CFG = BASE.replace(lora_rank=3, lora_alpha=6.0)
IDS = np.random.default_rng(0).integers(0, 64, (2, 11))
WHERE = np.broadcast_to(np.arange(11), (2, 11))


def build(cfg, seed=0):
    return create_params(cfg, make_mesh(devices=jax.devices()[:1]), seed)


def logits(cfg, params):
    policy = nnx.merge(abstract_params(cfg)[0], params)
    return jax.jit(lambda p: p.logits(p(jnp.asarray(IDS), jnp.asarray(WHERE))[0]))(policy)


def moved(params, rng):
    """Adapters with values of their own."""
    adapters, rest = split_trainable(params)
    adapters = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.3, a.dtype), adapters)
    return join(adapters, rest)


def test_adapters_change_nothing_at_the_start():
    np.testing.assert_array_equal(logits(CFG, build(CFG)[1]), logits(BASE, build(BASE)[1]))


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("q", "v"), ("o", "down")])
def test_merged_weights_equal_adapted_ones(targets):
    cfg = CFG.replace(lora_targets=targets)
    params = moved(build(cfg)[1], np.random.default_rng(1))
    base = logits(BASE, build(BASE)[1])
    adapted = logits(cfg, params)
    plain_cfg, plain = merged(cfg, params)
    assert plain_cfg == BASE.replace(lora_alpha=6.0, lora_targets=targets) and np.abs(adapted - base).max() > 0.01
    np.testing.assert_allclose(logits(plain_cfg, plain), adapted, atol=1e-4)
    assert plain["embed"].get_value() is params["embed"].get_value()  # shared, not copied


def test_only_adapters_are_trainable_and_all_is_without_them():
    params = build(CFG)[1]
    adapters, frozen = split_trainable(params)
    names = {path[-1] for path, _ in adapters.flat_state()}
    assert names == {f"{t}_lora_{x}" for t in LORA_TARGETS for x in "ab"}
    assert all(isinstance(v, LoraParam) for _, v in adapters.flat_state())
    assert not any("lora" in str(path[-1]) for path, _ in frozen.flat_state())
    assert jax.tree.structure(join(adapters, frozen)) == jax.tree.structure(params)
    everything, nothing = split_trainable(build(BASE)[1])
    assert jax.tree.structure(everything) == jax.tree.structure(build(BASE)[1]) and not jax.tree.leaves(nothing)


def test_gradients_of_adapters_equal_those_through_merged_weights():
    """d loss / d A = scale * (d loss / d W) B^T for the merged weight, checked on one target."""
    cfg = CFG.replace(lora_targets=("gate",))
    params = moved(build(cfg)[1], np.random.default_rng(2))

    def loss(cfg):
        return lambda p: (nnx.merge(abstract_params(cfg)[0], p)(jnp.asarray(IDS), jnp.asarray(WHERE))[0] ** 2).sum()

    adapters = jax.jit(jax.grad(loss(cfg)))(params)["layers"]
    plain_cfg, plain = merged(cfg, params)
    d_w = jax.jit(jax.grad(loss(plain_cfg)))(plain)["layers"]["gate"].get_value()
    b = params["layers"]["gate_lora_b"].get_value()
    np.testing.assert_allclose(adapters["gate_lora_a"].get_value(), 2.0 * jnp.einsum("ldm,lrm->ldr", d_w, b), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lora_rank": -1}, "lora_rank=-1"),
        ({"lora_alpha": 0.0}, "lora_alpha=0.0"),
        ({"lora_targets": ("q", "query")}, "valid are distinct names of q, k, v, o, gate, up, down"),
        ({"lora_targets": ("q", "q")}, "distinct"),
        ({"lora_targets": ()}, "lora_targets"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        CFG.replace(**changes)

"""Rotary frequencies: scalings by hand-worked values, what is refused, and where a cache cannot follow. Logits: test_model_parity."""

import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.errors import ConfigError
from sage_jax.model.cache import make_cache
from sage_jax.model.config import ModelConfig
from sage_jax.model.rope import RopeScaling, frequencies, phases

CFG = ModelConfig(
    vocab_size=8, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_size=8, rope_theta=10_000.0, max_position=32
)
PLAIN = np.array([1.0, 0.1, 0.01, 0.001])


def scaled(**kw):
    return CFG.replace(rope_scaling=RopeScaling(**kw))


def test_plain_and_linear():
    np.testing.assert_allclose(frequencies(CFG), PLAIN, rtol=1e-6)
    np.testing.assert_allclose(frequencies(scaled(kind="linear", factor=4.0)), PLAIN / 4, rtol=1e-6)


def test_yarn_leaves_fast_pairs_interpolates_slow_ones_and_scales_cos():
    # 4,096 positions: a pair turns 4096 f / 2 pi times, so 32 turns lie at dimension 2 x 1.31 and one turn at 2 x 2.81.
    cfg = scaled(kind="yarn", factor=4.0, original_max_position=4_096, truncate=False)
    low, high = (8 * np.log(4_096 / (turns * 2 * np.pi)) / (2 * np.log(10_000)) for turns in (32, 1))
    ramp = np.clip((np.arange(4) - low) / (high - low), 0, 1)
    got = frequencies(cfg)
    np.testing.assert_allclose(got, PLAIN * (1 - ramp) + PLAIN / 4 * ramp, rtol=1e-5)
    assert got[0] == 1.0 and np.isclose(got[3], 0.001 / 4)
    assert np.isclose(cfg.rope_scaling.cos_scale, 0.1 * np.log(4) + 1)
    cos, sin = phases(jnp.arange(3)[None], cfg)
    np.testing.assert_allclose(cos**2 + sin**2, np.full((1, 3, 4), (0.1 * np.log(4) + 1) ** 2), rtol=1e-5)
    assert scaled(kind="yarn", factor=4.0, original_max_position=8, attention_factor=0.5).rope_scaling.cos_scale == 0.5


def test_dynamic_grows_with_the_longest_row_of_the_call():
    cfg = scaled(kind="dynamic", factor=2.0)
    short = phases(jnp.arange(32)[None], cfg)
    np.testing.assert_array_equal(short[0], phases(jnp.arange(32)[None], CFG)[0])
    theta = 10_000 * (2 * 64 / 32 - 1) ** (8 / 6)
    np.testing.assert_allclose(np.arcsin(phases(jnp.array([[1, 63]]), cfg)[1][0, 0]), theta ** -(np.arange(4) / 4), rtol=1e-5)


def test_a_cache_cannot_follow_dynamic_scaling_beyond_max_position():
    cfg = scaled(kind="dynamic", factor=2.0)
    assert make_cache(cfg, 1, 32).length == 32
    with pytest.raises(ConfigError, match="context of 33 tokens with rope_type='dynamic' and max_position_embeddings=32"):
        make_cache(cfg, 1, 33)


@pytest.mark.parametrize(
    "raw, message",
    [
        ({"rope_type": "llama3", "factor": 8.0}, "rope_type='llama3' is not supported: valid are default, linear, dynamic, yarn"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_type='mrope'"),
        ({"rope_type": "linear"}, "'linear' needs a factor"),
        ({"rope_type": "linear", "factor": 0.0}, "factor=0.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "yarn", "factor": 2.0, "long_factor": [1.0]}, r"long_factor=\[1.0\]"),
    ],
)
def test_what_is_not_supported_is_named_with_its_value(raw, message):
    with pytest.raises(ConfigError, match=message):
        RopeScaling.from_hf(raw, 32)


def test_config_json_and_back():
    for scaling in (
        RopeScaling("linear", 2.0), RopeScaling("dynamic", 2.0), RopeScaling("yarn", 4.0, 32_768),
        RopeScaling("yarn", 4.0, 16, attention_factor=0.7, beta_fast=16.0, beta_slow=2.0, truncate=False),
    ):  # fmt: skip
        cfg = CFG.replace(rope_scaling=scaling)
        back = ModelConfig.from_hf(cfg.to_hf())
        assert back.rope_scaling == scaling and back.rope_theta == cfg.rope_theta
    # yarn without a factor: the ratio of the two contexts; without the original one: max_position.
    assert RopeScaling.from_hf({"rope_type": "yarn", "original_max_position_embeddings": 8}, 32).factor == 4.0
    assert RopeScaling.from_hf({"type": "yarn", "factor": 4.0}, 32).original_max_position == 32
    with pytest.raises(ConfigError, match="scaling is given twice"):
        ModelConfig.from_hf({**CFG.to_hf(), "rope_scaling": {"type": "linear", "factor": 2.0}})

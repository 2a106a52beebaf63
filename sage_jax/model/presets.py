"""Named model shapes. The small ones are ours; the Qwen ones follow the published models.

Unverified: the Qwen values are those of huggingface.co/Qwen/Qwen3-{0.6B,1.7B,4B,8B,14B,32B} and Qwen/Qwen2.5-32B-Instruct as
they are commonly cited, and were not compared with the files. `load_hf` reads a folder's own config.json, never a preset.
"""

from __future__ import annotations

from typing import Any

from sage_jax.errors import ConfigError
from sage_jax.model.config import ModelConfig


def _small(vocab: int, width: int, layers: int, heads: int, kv_heads: int, head_dim: int, mlp: int, std: float) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim,
        mlp_size=mlp, rope_theta=500.0, tie_embeddings=True, embed_init_std=std, max_position=8_192,
    )  # fmt: skip


def _qwen3(width: int, layers: int, heads: int, mlp: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936, hidden_size=width, num_layers=layers, num_heads=heads, num_kv_heads=8, head_dim=128,
        mlp_size=mlp, tie_embeddings=tied, dtype="bfloat16", max_position=40_960,
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    # Three values decide how soon copying from the prompt is learned (docs/log.md): the scale of the tied embedding, 0.1 and not
    # 0.02; a head size of 32 and not 16; a small rope base, so that several frequencies tell neighbours apart.
    "tiny": _small(640, 128, 4, 8, 4, 32, 384, std=0.1),
    "nano": _small(1_024, 128, 4, 8, 4, 32, 384, std=0.1),
    "micro": _small(4_096, 256, 6, 8, 4, 32, 768, std=0.1),
    "qwen3_0_6b": _qwen3(1_024, 28, 16, 3_072, tied=True),
    "qwen3_1_7b": _qwen3(2_048, 28, 16, 6_144, tied=True),
    "qwen3_4b": _qwen3(2_560, 36, 32, 9_728, tied=True),
    "qwen3_8b": _qwen3(4_096, 36, 32, 12_288, tied=False),
    "qwen3_14b": _qwen3(5_120, 40, 40, 17_408, tied=False),
    "qwen3_32b": _qwen3(5_120, 64, 64, 25_600, tied=False),
    "qwen2_5_32b": ModelConfig(
        vocab_size=152_064, hidden_size=5_120, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128, mlp_size=27_648,
        tie_embeddings=False, qk_norm=False, attention_bias=True, dtype="bfloat16", max_position=32_768,
    ),
}  # fmt: skip


def preset(name: str, **changes: Any) -> ModelConfig:
    """The named shape with `changes` to its fields. An unknown name or field raises ConfigError with the valid ones."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model preset {name!r}: valid are {', '.join(PRESETS)}")
    unknown = sorted(set(changes) - set(ModelConfig.__dataclass_fields__))
    if unknown:
        raise ConfigError(f"unknown model fields {unknown}: valid are {', '.join(ModelConfig.__dataclass_fields__)}")
    return PRESETS[name].replace(**changes)

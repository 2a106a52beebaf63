"""The shape of a policy: one frozen record, its reading from and writing to Hugging Face's `config.json`.

Owns what is supported and says so: a key that would change the computation and that we do not compute raises with the
key and its value, because a wrong bias, rotary base or head size trains happily and fails quietly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sage_jax.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen-family decoder.

    `vocab_size` counts embedding rows, padding included; the tokenizer's own size may be smaller.
    `dtype` is the compute type (also of the KV cache), `param_dtype` that of the master weights.
    `remat` recomputes each layer in the backward pass instead of keeping its activations.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 1_000_000.0
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    attention_bias: bool = False
    embed_init_std: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    max_position: int = 40_960
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "max_position"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: rotary embedding needs an even size")
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ConfigError(f"{name}={getattr(self, name)!r}: valid are {', '.join(DTYPES)}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], **overrides: Any) -> ModelConfig:
        """Reads the content of a `config.json` of Qwen2, Qwen2.5 or Qwen3 (dense).

        Raises ConfigError that names the key and its value for everything that we would compute differently.
        """
        kind = raw.get("model_type")
        if kind not in ("qwen2", "qwen3"):
            raise ConfigError(f"model_type={kind!r} is not supported: valid are qwen2, qwen3")
        for key in ("vision_config", "quantization_config", "num_experts"):
            if raw.get(key):
                raise ConfigError(f"{key}={raw[key]!r} is not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={raw['hidden_act']!r} is not supported: valid is silu")
        if raw.get("use_sliding_window"):
            raise ConfigError(f"use_sliding_window={raw['use_sliding_window']!r} is not supported: valid is false")
        if "sliding_attention" in (raw.get("layer_types") or ()):
            raise ConfigError(f"layer_types={raw['layer_types']!r} is not supported: valid is full_attention everywhere")
        if kind == "qwen3" and raw.get("attention_bias"):
            raise ConfigError(f"attention_bias={raw['attention_bias']!r} is not supported for qwen3: valid is false")
        missing = [
            k
            for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            if raw.get(k) is None
        ]
        if missing:
            raise ConfigError(f"config.json lacks {', '.join(missing)}")
        hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim")
        if head_dim is None:
            if kind == "qwen3":
                head_dim = 128  # the default of the published implementation
            elif hidden % heads:
                raise ConfigError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads} and head_dim is absent")
            else:
                head_dim = hidden // heads
        fields = {
            "vocab_size": raw["vocab_size"],
            "hidden_size": hidden,
            "num_layers": raw["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "mlp_size": raw["intermediate_size"],
            "rope_theta": _rope_theta(raw),
            "rms_eps": raw.get("rms_norm_eps", 1e-6),
            "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "qk_norm": kind == "qwen3",
            "attention_bias": kind == "qwen2",
            "embed_init_std": raw.get("initializer_range", 0.02),
            "max_position": raw.get("max_position_embeddings", 32_768),
        }
        return cls(**{**fields, **overrides})

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads; raises ConfigError for what it cannot express."""
        if self.qk_norm == self.attention_bias:
            raise ConfigError(
                f"qk_norm={self.qk_norm} with attention_bias={self.attention_bias} has no Hugging Face form: "
                "qwen3 has the norm and no bias, qwen2 the bias and no norm"
            )
        kind = "qwen3" if self.qk_norm else "qwen2"
        raw = {
            "architectures": ["Qwen3ForCausalLM" if self.qk_norm else "Qwen2ForCausalLM"],
            "model_type": kind,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_size,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.embed_init_std,
            "max_position_embeddings": self.max_position,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
        }
        if self.qk_norm:
            raw["attention_bias"] = False
        return raw


def pad_vocab(size: int) -> int:
    """Embedding rows for a tokenizer of `size` ids: the next multiple of 32, so that the table splits over a mesh."""
    return -(-size // 32) * 32


def _rope_theta(raw: dict[str, Any]) -> float:
    """The rotary base: `rope_parameters` of new files, `rope_theta` (and `rope_scaling`) of old ones."""
    bases = {}
    if raw.get("rope_theta") is not None:
        bases["rope_theta"] = float(raw["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        inner = raw.get(key)
        if not inner:
            continue
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{key}={inner!r} is not supported: valid is rope_type 'default'")
        if inner.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{key}={inner!r} is not supported: valid is partial_rotary_factor 1.0")
        if inner.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = float(inner["rope_theta"])
    if len(set(bases.values())) > 1:
        raise ConfigError(f"the rotary base is given twice with different values: {bases}")
    return next(iter(bases.values()), 10_000.0)

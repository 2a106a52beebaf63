"""The shape of a policy: one frozen record, its reading from and writing to Hugging Face's `config.json`.

Owns what is supported and says so: a key that would change the computation and that we do not compute raises with the
key and its value, because a wrong bias, rotary base or head size trains happily and fails quietly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sage_jax.errors import ConfigError
from sage_jax.model.rope import RopeScaling

DTYPES = ("float32", "bfloat16", "float16")
ATTENTION = ("auto", "heads", "xla", "chunked", "cudnn", "splash")
REMAT = ("none", "full", "dots", "dots_no_batch")
LORA_TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Qwen-family decoder.

    `vocab_size` counts embedding rows, padding included; the tokenizer's own size may be smaller.
    `dtype` is the compute type (also of the KV cache), `param_dtype` that of the master weights.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    rms_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True
    attention_bias: bool = False
    num_experts: int = 0  # 0: a dense MLP of `mlp_size`; otherwise experts of `expert_size` in every layer
    experts_per_token: int = 0
    expert_size: int = 0
    norm_topk: bool = True  # the weights of a token's experts sum to 1
    router_aux_coef: float = 0.0  # of the load-balancing loss in training; kept for export
    embed_init_std: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"
    max_position: int = 40_960
    attention: str = "auto"  # over whole sequences; see `attention.choose`
    remat: str = "none"  # what the backward pass computes again: see `qwen.REMAT_POLICIES`
    lora_rank: int = 0  # 0: no adapters
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "max_position"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim}: rotary embedding needs an even size")
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic" and self.head_dim < 4:
            raise ConfigError(f"head_dim={self.head_dim}: dynamic rotary scaling needs at least 4")
        for name, valid in (("dtype", DTYPES), ("param_dtype", DTYPES), ("attention", ATTENTION), ("remat", REMAT)):
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name}={getattr(self, name)!r}: valid are {', '.join(valid)}")
        if self.num_experts:
            if not 1 <= self.experts_per_token <= self.num_experts:
                raise ConfigError(f"experts_per_token={self.experts_per_token}: must be between 1 and num_experts={self.num_experts}")
            if self.expert_size < 1:
                raise ConfigError(f"expert_size={self.expert_size}: must be at least 1")
        self._check_lora()

    def _check_lora(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank={self.lora_rank}: must be 0 (off) or above")
        if not self.lora_rank:
            return
        if not self.lora_alpha > 0:
            raise ConfigError(f"lora_alpha={self.lora_alpha}: must be above 0")
        valid = LORA_TARGETS[:4] if self.num_experts else LORA_TARGETS
        targets = self.lora_targets
        if not targets or set(targets) - set(valid) or len(set(targets)) != len(targets):
            why = " (experts have no adapters)" if self.num_experts else ""
            raise ConfigError(f"lora_targets={targets!r}: valid are distinct names of {', '.join(valid)}{why}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, raw: dict[str, Any], **overrides: Any) -> ModelConfig:
        """Reads the content of a `config.json` of Qwen2, Qwen2.5, Qwen3 (dense or mixture of experts) or Qwen3-Embedding.

        Raises ConfigError that names the key and its value for everything that we would compute differently.
        """
        kind = raw.get("model_type")
        if kind not in MODEL_TYPES:
            raise ConfigError(f"model_type={kind!r} is not supported: valid are {', '.join(MODEL_TYPES)}")
        if kind == "qwen3_moe" and raw.get("num_experts") is None and raw.get("num_local_experts") is not None:
            raw = {**raw, "num_experts": raw["num_local_experts"]}  # the key that transformers 5 writes
        _refuse_unsupported(kind, raw)
        needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
        if kind == "qwen3_moe":
            needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        if missing := [k for k in needed if raw.get(k) is None]:
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
        max_position = raw.get("max_position_embeddings", 32_768)
        theta, scaling = _rope(raw, max_position)
        fields = {
            "vocab_size": raw["vocab_size"],
            "hidden_size": hidden,
            "num_layers": raw["num_hidden_layers"],
            "num_heads": heads,
            "num_kv_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": head_dim,
            "mlp_size": raw["intermediate_size"],
            "rope_theta": theta,
            "rope_scaling": scaling,
            "rms_eps": raw.get("rms_norm_eps", 1e-6),
            "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "qk_norm": kind != "qwen2",
            "attention_bias": kind == "qwen2",
            "embed_init_std": raw.get("initializer_range", 0.02),
            "max_position": max_position,
        }
        if kind == "qwen3_moe":
            fields |= {
                "num_experts": raw["num_experts"],
                "experts_per_token": raw["num_experts_per_tok"],
                "expert_size": raw["moe_intermediate_size"],
                "norm_topk": bool(raw.get("norm_topk_prob", False)),  # absent means false in the published implementation
                "router_aux_coef": raw.get("router_aux_loss_coef", 0.001),
            }
        return cls(**{**fields, **overrides})

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers reads; raises ConfigError for what it cannot express."""
        if self.qk_norm == self.attention_bias or (self.num_experts and not self.qk_norm):
            raise ConfigError(
                f"qk_norm={self.qk_norm} with attention_bias={self.attention_bias} and num_experts={self.num_experts} has no Hugging Face form: "
                "qwen3 and qwen3_moe have the norm and no bias, qwen2 the bias and no norm"
            )
        kind = "qwen3_moe" if self.num_experts else "qwen3" if self.qk_norm else "qwen2"
        scaling = {"rope_type": "default"} if self.rope_scaling is None else self.rope_scaling.to_hf()
        raw = {
            "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[kind]],
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
            "rope_parameters": {"rope_theta": self.rope_theta, **scaling},
            "rms_norm_eps": self.rms_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "initializer_range": self.embed_init_std,
            "max_position_embeddings": self.max_position,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
        }
        if self.rope_scaling is not None:
            raw["rope_scaling"] = scaling  # older readers know this key only
        if self.qk_norm:
            raw["attention_bias"] = False
        if self.num_experts:
            raw |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.expert_size,
                "norm_topk_prob": self.norm_topk,
                "router_aux_loss_coef": self.router_aux_coef,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return raw


def pad_vocab(size: int) -> int:
    """Embedding rows for a tokenizer of `size` ids: the next multiple of 32, so that the table splits over a mesh."""
    return -(-size // 32) * 32


def _refuse_unsupported(kind: str, raw: dict[str, Any]) -> None:
    for key in ("vision_config", "quantization_config", *(() if kind == "qwen3_moe" else ("num_experts", "num_local_experts"))):
        if raw.get(key):
            raise ConfigError(f"{key}={raw[key]!r} is not supported for {kind}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={raw['hidden_act']!r} is not supported: valid is silu")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"use_sliding_window={raw['use_sliding_window']!r} is not supported: valid is false")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(f"layer_types={raw['layer_types']!r} is not supported: valid is full_attention everywhere")
    if kind != "qwen2" and raw.get("attention_bias"):
        raise ConfigError(f"attention_bias={raw['attention_bias']!r} is not supported for {kind}: valid is false")
    if raw.get("mlp_only_layers"):
        raise ConfigError(f"mlp_only_layers={raw['mlp_only_layers']!r} is not supported: valid is [], experts in every layer")
    if raw.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(f"decoder_sparse_step={raw['decoder_sparse_step']!r} is not supported: valid is 1, experts in every layer")


def _rope(raw: dict[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """(base, scaling): from `rope_parameters` of new files, `rope_theta` and `rope_scaling` of old ones; both must agree."""
    bases: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    if raw.get("rope_theta") is not None:
        bases["rope_theta"] = float(raw["rope_theta"])
    for key in ("rope_parameters", "rope_scaling"):
        if inner := raw.get(key):
            scalings[key] = RopeScaling.from_hf(inner, max_position)
            if inner.get("rope_theta") is not None:
                bases[f"{key}.rope_theta"] = float(inner["rope_theta"])
    if len(set(bases.values())) > 1:
        raise ConfigError(f"the rotary base is given twice with different values: {bases}")
    if len(set(scalings.values())) > 1:
        raise ConfigError(f"the rotary scaling is given twice with different values: {scalings}")
    return next(iter(bases.values()), 10_000.0), next(iter(scalings.values()), None)

"""Small models of every supported family and option, as Hugging Face folders with weights drawn by numpy: the same on every machine,
so that golden values need not carry the weights."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LENGTH = 24
_BASE = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "use_sliding_window": False, "attention_dropout": 0.0,
}  # fmt: skip
_QWEN3 = {**_BASE, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False}
_QWEN2 = {**_BASE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
_MOE = {
    **_QWEN3, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
}  # fmt: skip


def _rope(config: dict, **scaling) -> dict:
    return {**config, "rope_parameters": {"rope_theta": 1e4, **scaling}}


FAMILIES: dict[str, dict] = {
    "qwen2_tied": {**_QWEN2, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2_untied": {**_QWEN2, "tie_word_embeddings": False, "rope_theta": 1e6, "num_key_value_heads": 1},
    "qwen3_tied": {**_QWEN3, "tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen3_untied": {**_QWEN3, "tie_word_embeddings": False, "rope_theta": 1e6, "num_key_value_heads": 4},
    "qwen3_moe_normalised": {**_MOE, "tie_word_embeddings": False, "norm_topk_prob": True, "rope_theta": 1e6},
    "qwen3_moe": {**_MOE, "tie_word_embeddings": True, "norm_topk_prob": False, "rope_theta": 1e6},
    "linear": _rope({**_QWEN3, "tie_word_embeddings": True}, rope_type="linear", factor=3.0),
    "dynamic": _rope({**_QWEN2, "tie_word_embeddings": True, "max_position_embeddings": 16}, rope_type="dynamic", factor=2.0),
    "yarn": _rope({**_QWEN3, "tie_word_embeddings": True}, rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
    "yarn_old_keys": {
        **_QWEN2, "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "beta_slow": 2},
    },
}  # fmt: skip
CAUSAL = tuple(FAMILIES)


def tensors(config: dict) -> dict[str, np.ndarray]:
    """Name -> float32 values: norms around 1, biases around 0, all random."""
    d, n, k = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    h, m, v = config.get("head_dim") or d // n, config["intermediate_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        heads = {"q": n, "k": k, "v": k}
        shapes |= {f"{at}self_attn.{name}_proj.weight": (count * h, d) for name, count in heads.items()}
        shapes |= {f"{at}self_attn.o_proj.weight": (d, n * h), f"{at}input_layernorm.weight": (d,), f"{at}post_attention_layernorm.weight": (d,)}
        if config["model_type"] == "qwen2":
            shapes |= {f"{at}self_attn.{name}_proj.bias": (count * h,) for name, count in heads.items()}
        else:
            shapes |= {f"{at}self_attn.q_norm.weight": (h,), f"{at}self_attn.k_norm.weight": (h,)}
        if config["model_type"] == "qwen3_moe":
            shapes[f"{at}mlp.gate.weight"] = (config["num_experts"], d)
            m = config["moe_intermediate_size"]
            blocks = [f"{at}mlp.experts.{e}." for e in range(config["num_experts"])]
        else:
            blocks = [f"{at}mlp."]
        for block in blocks:
            shapes |= {f"{block}gate_proj.weight": (m, d), f"{block}up_proj.weight": (m, d), f"{block}down_proj.weight": (d, m)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    return {name: _draw(name, shape) for name, shape in shapes.items()}


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.normal(size=shape)
    if name.endswith("norm.weight"):
        x = 1 + 0.2 * x
    elif len(shape) == 1:
        x = 0.5 * x
    else:
        x = x * 1.5 / shape[1] ** 0.5
    return x.astype(np.float32)


def write_folder(folder: Path, name: str) -> Path:
    """The family's folder: config.json and one file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]))
    save_file(tensors(FAMILIES[name]), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ids(name: str, rows: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, FAMILIES[name]["vocab_size"], (rows, length))


def probe(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The direction onto which the gradient of the tensor `name` is projected."""
    return np.random.default_rng(zlib.crc32(f"probe {name}".encode())).normal(size=shape)

"""Adapter folders of the peft package, in and out: adapter_config.json and adapter_model.safetensors.

Written for the package's LoRA on the linear layers of attention and MLP; a setting that would change the computation and that
we do not compute raises with its key and value.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model.config import LORA_TARGETS, ModelConfig
from sage_jax.model.hf import Bar, load_state, misfits, no_bar, read_json, write_folder, write_json
from sage_jax.model.layout import adapter_layout, module_name
from sage_jax.model.lora import LoraParam, split_trainable
from sage_jax.model.safetensors_io import DTYPES, open_folder
from sage_jax.model.sharding import abstract_params
from sage_jax.model.transfer import from_devices

_CONFIG, _STEM = "adapter_config.json", "adapter_model"
_TARGET = {module_name(t): t for t in LORA_TARGETS}
# Keys that say nothing of the adapter's function, or that are read below; any other has to be off.
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "init_lora_weights", "bias", "fan_in_fan_out"}
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode",
    "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
}  # fmt: skip
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")  # ways to begin that leave the weights below as they were


def save_peft(
    folder: str | Path, cfg: ModelConfig, params: nnx.State, base_name: str, dtype: str = "float32", *, bar: Bar = no_bar
) -> None:
    """Writes the adapters of a policy as a folder that peft loads onto `base_name`, a folder or a name on the Hub.

    Whole or not at all, and with several processes, as `save_hf`. Raises ConfigError where there are no adapters.
    """
    if not cfg.lora_rank:
        raise ConfigError("lora_rank=0: there are no adapters to write; save_hf writes the whole model")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: valid are {', '.join(DTYPES)}")
    flat = {path: jnp.asarray(v.get_value()) for path, v in params.flat_state() if isinstance(v, LoraParam)}
    layouts = {path: adapter_layout(cfg, path, a.shape) for path, a in flat.items()}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for path, array in flat.items():
            yield from from_devices(layouts[path], [array], lambda adapter: adapter)

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": cfg.lora_rank,
        "lora_alpha": cfg.lora_alpha,
        "target_modules": [module_name(t) for t in cfg.lora_targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_folder(
        Path(folder), layouts, tensors(), DTYPES[dtype], lambda part: write_json(part / _CONFIG, config), _CONFIG, sys.maxsize, bar, _STEM
    )


def load_peft(
    folder: str | Path, mesh: Mesh, cfg: ModelConfig, params: nnx.State, *, bar: Bar = no_bar
) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """(config, graphdef, parameters) of the policy `cfg`, `params` with the adapters of a PEFT folder; the weights are shared.

    Raises:
      CheckpointError: as `load_hf`, of the adapter's tensors and files.
      ConfigError: a setting of peft that is not supported; a policy that has adapters already.
    """
    folder = Path(folder)
    if cfg.lora_rank:
        raise ConfigError(f"the policy has adapters of rank {cfg.lora_rank} already: merge them, or load its base without")
    raw = read_json(folder, _CONFIG, "a PEFT adapter folder")
    opened = open_folder(folder, _STEM)
    modules = _modules(raw) | {part for name in opened.tensors for part in name.split(".") if part in _TARGET}
    if not modules:
        raise CheckpointError(f"{folder}: " + "; ".join(opened.faults or ["no tensor of it is an adapter of " + ", ".join(_TARGET)]))
    cfg = cfg.replace(lora_rank=raw["r"], lora_alpha=_alpha(raw), lora_targets=tuple(t for m, t in _TARGET.items() if m in modules))
    graphdef, abstract = abstract_params(cfg)
    adapters, _ = split_trainable(abstract)
    layouts = {path: adapter_layout(cfg, path, v.get_value().shape) for path, v in adapters.flat_state()}
    if faults := misfits(opened, layouts):
        raise CheckpointError(f"{folder}: {len(faults)} faults: " + "; ".join(faults))
    return cfg, graphdef, nnx.merge_state(params, load_state(adapters, layouts, opened, mesh, f"load {folder.name}", bar))


def _modules(raw: dict[str, Any]) -> set[str]:
    """Last names of the target modules; none where a pattern stands for them. Raises ConfigError for what is not supported."""
    if raw.get("peft_type") != "LORA":
        raise ConfigError(f"peft_type={raw.get('peft_type')!r} is not supported: valid is LORA")
    if not isinstance(raw.get("r"), int) or not isinstance(raw.get("lora_alpha"), (int, float)):
        raise ConfigError(f"{_CONFIG}: r={raw.get('r')!r}, lora_alpha={raw.get('lora_alpha')!r}: both must be numbers")
    for key, valid in (("bias", ("none", None)), ("init_lora_weights", _KEEPS_BASE), ("fan_in_fan_out", (False, None))):
        if raw.get(key) not in valid:
            raise ConfigError(f"{key}={raw[key]!r} of a PEFT adapter is not supported: valid are {', '.join(map(repr, valid))}")
    for key, value in sorted(raw.items()):
        if value and key not in _READ | _IGNORED:
            raise ConfigError(f"{key}={value!r} of a PEFT adapter is not supported: it must be off")
    targets = raw.get("target_modules") or ()
    names = set() if isinstance(targets, str) else {str(t).split(".")[-1] for t in targets}
    if unknown := sorted(names - set(_TARGET)):
        raise ConfigError(f"target_modules {unknown} are not supported: valid are {', '.join(_TARGET)}")
    return names


def _alpha(raw: dict[str, Any]) -> float:
    """Ours is divided by the rank; that of rank-stabilised LoRA by its root (Kalajdzievski 2023, arXiv 2312.03732)."""
    return raw["lora_alpha"] * (math.sqrt(raw["r"]) if raw.get("use_rslora") else 1.0)

"""Hugging Face folders in and out: safetensors, config, generation config, tokenizer.

Reading goes tensor by tensor straight to the shards of its devices; writing goes to a temporary folder that is renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors.numpy import save_file

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.sharding import abstract_params, place

if TYPE_CHECKING:
    from sage_jax.model.tokenizer import Tokenizer

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_STORED = {"F32": DTYPES["float32"], "F16": DTYPES["float16"], "BF16": DTYPES["bfloat16"]}

_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
}
_TOP = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}


def load_hf(folder: str | Path, mesh: Mesh, **overrides: Any) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """(config, graphdef, parameters on the mesh) of a folder; `overrides` change config fields such as `dtype`.

    Raises CheckpointError for missing files and, in one message, for all missing, surplus and wrong-shape tensors;
    ConfigError for what the architecture does not support.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    cfg = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), **overrides)
    tensors = _open_folder(folder)
    graphdef, abstract = abstract_params(cfg)
    flat = abstract.flat_state()
    wanted = {name: shape for path, v in flat for name, shape in _files_of(cfg, path, v.get_value().shape)}
    surplus = set(tensors) - set(wanted)
    if cfg.tie_embeddings:
        surplus.discard(_TOP["head"])  # some tied folders store the head again
    faults = [f"missing {n} {list(wanted[n])}" for n in sorted(set(wanted) - set(tensors))]
    faults += [f"surplus {n} {list(tensors[n].shape)}" for n in sorted(surplus)]
    faults += [
        f"wrong shape {n} {list(tensors[n].shape)} instead of {list(shape)}"
        for n, shape in sorted(wanted.items())
        if n in tensors and tuple(tensors[n].shape) != tuple(shape)
    ]
    if faults:
        raise CheckpointError(f"{folder}: {len(faults)} tensors do not fit: " + "; ".join(faults))

    def load(path, variable, sharding):
        shape, dtype = variable.get_value().shape, variable.get_value().dtype
        names = [name for name, _ in _files_of(cfg, path, shape)]
        per_tensor = shape[1:] if path[0] == "layers" else shape

        def shard(index):
            if path[0] != "layers":
                return _from_hf(path[-1], tensors[names[0]], per_tensor)[index].astype(dtype)
            rows = names[index[0]]
            return np.stack([_from_hf(path[-1], tensors[n], per_tensor)[index[1:]].astype(dtype) for n in rows])

        return variable.replace(jax.make_array_from_callback(shape, sharding, shard))

    shardings = dict(place(abstract, mesh).flat_state())
    params = nnx.State.from_flat_path({path: load(path, v, shardings[path]) for path, v in flat})
    return cfg, graphdef, params


def save_hf(
    folder: str | Path, cfg: ModelConfig, params: nnx.State, tokenizer: Tokenizer | None, dtype: str = "bfloat16"
) -> None:
    """Writes a folder that transformers loads: weights in `dtype`, config, generation config, tokenizer and template.

    The folder appears whole or not at all; an existing one is replaced. Raises ConfigError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: valid are {', '.join(DTYPES)}")
    folder = Path(folder)
    config = {**cfg.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
    if tokenizer is not None:
        if tokenizer.vocab_size > cfg.vocab_size:
            raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids and the model {cfg.vocab_size} embedding rows")
        ids = {"eos_token_id": sorted(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
        generation.update(ids)
        config.update({"eos_token_id": tokenizer.end_of_turn_id, "pad_token_id": tokenizer.pad_id})
    tensors: dict[str, np.ndarray] = {}
    for path, variable in params.flat_state():
        value = np.asarray(jax.device_get(variable.get_value()))
        for n, (name, shape) in enumerate(_files_of(cfg, path, value.shape)):
            one = value[n] if path[0] == "layers" else value
            tensors[name] = np.ascontiguousarray(_to_hf(path[-1], one, shape).astype(DTYPES[dtype]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "model.safetensors").chmod(0o644)  # the library makes it for its owner alone
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (part / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        if tokenizer is not None:
            tokenizer.save(part)
        if folder.exists():
            old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
            os.rename(folder, old)
            os.rename(part, folder)
            shutil.rmtree(old)
        else:
            os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _files_of(cfg: ModelConfig, path: tuple, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """(stored name, stored shape) of each tensor that makes up one of our parameters, in layer order."""
    if path[0] == "layers":
        stored = _stored_shape(path[-1], shape[1:])
        return [(f"model.layers.{n}.{_LAYER[path[-1]]}", stored) for n in range(cfg.num_layers)]
    return [(_TOP[path[-1]], _stored_shape(path[-1], shape))]


def _stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Linear weights are stored [out, in] and flat; ours are [in..., out...] with heads apart."""
    if name in ("q", "k", "v"):
        return (shape[1] * shape[2], shape[0])
    if name == "o":
        return (shape[2], shape[0] * shape[1])
    if name in ("gate", "up", "down", "head"):
        return (shape[1], shape[0])
    if name.endswith("_bias"):
        return (shape[0] * shape[1],)
    return shape


def _from_hf(name: str, a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (a.T if name in ("q", "k", "v", "o", "gate", "up", "down", "head") else a).reshape(shape)


def _to_hf(name: str, a: np.ndarray, stored: tuple[int, ...]) -> np.ndarray:
    return a.reshape(stored[::-1]).T if name in ("q", "k", "v", "o", "gate", "up", "down", "head") else a.reshape(stored)


def _open_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder as memory maps, from one file or by the index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        by_name = json.loads(index.read_text())["weight_map"]
        absent = sorted({f for f in by_name.values() if not (folder / f).is_file()})
        if absent:
            raise CheckpointError(f"{folder}: the index names files that are missing: {', '.join(absent)}")
        tensors: dict[str, np.ndarray] = {}
        for file in sorted(set(by_name.values())):
            tensors.update(_open_file(folder / file))
        return tensors
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    return _open_file(folder / "model.safetensors")


def _open_file(path: Path) -> dict[str, np.ndarray]:
    """Memory maps of one safetensors file. Its numpy reader knows no bfloat16, the format is: u64 size, JSON, bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if head + 8 > size:
            raise CheckpointError(f"{path} is truncated: its header wants {head + 8} bytes and it has {size}")
        try:
            header = json.loads(file.read(head))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: its header is not JSON") from error
    header.pop("__metadata__", None)
    end = 8 + head + max((info["data_offsets"][1] for info in header.values()), default=0)
    if size < end:
        raise CheckpointError(f"{path} is truncated: its tensors end at byte {end} and it has {size}")
    tensors = {}
    for name, info in header.items():
        if info["dtype"] not in _STORED:
            raise CheckpointError(f"{path}: {name} has dtype {info['dtype']}: valid are {', '.join(_STORED)}")
        kind, shape = _STORED[info["dtype"]], tuple(info["shape"])
        raw = np.memmap(path, np.uint8, "r", offset=8 + head + info["data_offsets"][0], shape=(int(np.prod(shape)) * kind.itemsize,))
        tensors[name] = raw.view(kind).reshape(shape)
    return tensors

"""Hugging Face folders in and out: safetensors, config, generation config, tokenizer.

Reading goes tensor by tensor straight to the shards of its devices; writing goes tensor by tensor into a temporary folder that
takes the place of the old one when it is whole. With several processes each reads for its own devices and the first writes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.folders import whole_folder
from sage_jax.model.layout import HEAD, PREFIX, Layout, file_order, layout
from sage_jax.model.lora import SUFFIXES, LoraParam, join, merged
from sage_jax.model.safetensors_io import DTYPES, Opened, Writer, open_folder
from sage_jax.model.sharding import abstract_params, create_adapters, place
from sage_jax.model.transfer import from_devices, to_devices

if TYPE_CHECKING:
    from sage_jax.model.tokenizer import Tokenizer

__all__ = ["DTYPES", "MAX_SHARD_BYTES", "load_hf", "save_hf"]

MAX_SHARD_BYTES = 5_000_000_000
# (name, total) -> context of `advance(n)`; `report.progress.bar` is one
Bar = Callable[[str, int], contextlib.AbstractContextManager[Callable[..., None]]]


def no_bar(name: str, total: int) -> contextlib.AbstractContextManager[Callable[..., None]]:
    return contextlib.nullcontext(lambda n=1, **facts: None)


def load_hf(
    folder: str | Path, mesh: Mesh, *, seed: int = 0, bar: Bar = no_bar, **overrides: Any
) -> tuple[ModelConfig, nnx.GraphDef, nnx.State]:
    """(config, graphdef, parameters on the mesh) of a folder; `overrides` change config fields such as `dtype`.

    The host holds about one tensor above the shards of its devices. Names may have the prefix "model." or not, never both.
    With `lora_rank` among the overrides new adapters are made from `seed`.

    Raises:
      CheckpointError: in one message all missing, surplus and wrong-shape tensors, unreadable types, missing, damaged and
        truncated files, and a head that differs from the embedding that it is tied to.
      ConfigError: what the architecture does not support.
    """
    folder = Path(folder)
    cfg = ModelConfig.from_hf(read_json(folder, "config.json", "a Hugging Face model folder"), **overrides)
    opened = open_folder(folder)
    prefix, faults = _prefix(opened)
    graphdef, abstract = abstract_params(cfg)
    adapters, weights = nnx.split_state(abstract, LoraParam, ...)
    layouts = {path: layout(cfg, path, v.get_value().shape, prefix) for path, v in weights.flat_state()}
    faults += misfits(opened, layouts, optional=(HEAD,) if cfg.tie_embeddings else ())
    if cfg.tie_embeddings and not faults and HEAD in opened.tensors:
        faults += _untied(opened, prefix)
    if faults:
        raise CheckpointError(f"{folder}: {len(faults)} faults: " + "; ".join(faults))
    params = load_state(weights, layouts, opened, mesh, f"load {folder.name}", bar)
    if adapters.flat_state():
        params = join(create_adapters(cfg, mesh, seed), params)
    return cfg, graphdef, params


def save_hf(
    folder: str | Path,
    cfg: ModelConfig,
    params: nnx.State,
    tokenizer: Tokenizer | None,
    dtype: str = "bfloat16",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    bar: Bar = no_bar,
) -> None:
    """Writes a folder that transformers loads: weights in `dtype`, config, generation config, tokenizer and template.

    Adapters are merged into the weights, a tensor at a time. The folder appears whole or not at all; an existing model folder
    is replaced. With several processes all must call it; it returns when the first has written.

    Raises:
      ConfigError: an unknown dtype; a tokenizer with more ids than the model has rows; a config that has no Hugging Face form.
      CheckpointError: no room on the disk (the old folder stays); something at `folder` that is no model folder.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: valid are {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes}: must be at least 1")
    config = {**cfg.to_hf(), "dtype": dtype, "torch_dtype": dtype}
    generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0}
    if tokenizer is not None:
        if tokenizer.vocab_size > cfg.vocab_size:
            raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids and the model {cfg.vocab_size} embedding rows")
        ids = {"eos_token_id": sorted(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id}
        generation.update(ids)
        config.update({"eos_token_id": tokenizer.end_of_turn_id, "pad_token_id": tokenizer.pad_id})

    flat = dict(params.flat_state())
    weights = {path: [path, *_adapters(flat, path)] for path in flat if not isinstance(flat[path], LoraParam)}
    layouts = {path: layout(cfg, path, flat[path].get_value().shape) for path in weights}

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for path, parts in weights.items():
            arrays = [jnp.asarray(flat[p].get_value()) for p in parts]
            yield from from_devices(layouts[path], arrays, _merge(cfg, flat, parts))

    def rest(part: Path) -> None:
        write_json(part / "config.json", config)
        write_json(part / "generation_config.json", generation)
        if tokenizer is not None:
            tokenizer.save(part)

    write_folder(folder, layouts, tensors(), DTYPES[dtype], rest, "config.json", max_shard_bytes, bar)


def load_state(weights: nnx.State, layouts: dict[tuple, Layout], opened: Opened, mesh: Mesh, title: str, bar: Bar) -> nnx.State:
    """The abstract `weights` filled from files that fit them."""
    shardings = dict(place(weights, mesh).flat_state())
    out = {}
    with bar(title, sum(x.names.size for x in layouts.values())) as advance:
        for path, v in weights.flat_state():
            value = v.get_value()
            out[path] = v.replace(to_devices(layouts[path], opened.tensors, value.shape, value.dtype, shardings[path], advance))
    return nnx.State.from_flat_path(out)


def misfits(opened: Opened, layouts: dict[tuple, Layout], optional: tuple[str, ...] = ()) -> list[str]:
    """Everything in which files differ from what is wanted."""
    tensors, wanted = opened.tensors, dict(file_order(layouts))
    faults = list(opened.faults)
    if tensors or not faults:  # a folder without one readable file lacks everything: that is said already
        faults += [f"missing {n} {list(wanted[n])}" for n in sorted(set(wanted) - set(tensors) - opened.lost)]
    faults += [f"surplus {n} {list(tensors[n].shape)}" for n in sorted(set(tensors) - set(wanted) - set(optional))]
    faults += [
        f"wrong shape {n} {list(tensors[n].shape)} instead of {list(shape)}"
        for n, shape in sorted(wanted.items())
        if n in tensors and tensors[n].shape != tuple(shape)
    ]
    return faults


def write_folder(
    folder: Path, layouts: dict[tuple, Layout], tensors: Iterator[tuple[str, np.ndarray]], dtype: np.dtype,
    rest: Callable[[Path], None], mark: str, max_shard_bytes: int, bar: Bar, stem: str = "model",
) -> None:  # fmt: skip
    """`tensors` and what `rest` writes into a folder, which replaces one that has the file `mark`; on the first process only."""
    shapes = file_order(layouts)
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            size = sum(math.prod(shape) * dtype.itemsize for _, shape in shapes)
            with whole_folder(folder, size, mark) as part, bar(f"write {folder.name}", len(shapes)) as advance:
                with Writer(part, shapes, dtype, max_shard_bytes, stem) as writer:
                    for name, tensor in tensors:
                        writer.write(name, tensor.astype(dtype, copy=False))
                        advance()
                rest(part)
        except Exception as error:
            failure = error
    if jax.process_count() > 1:
        for _ in tensors:  # gathering is a joint work: also of those who do not write, and after a failure
            pass
        if not multihost_utils.broadcast_one_to_all(np.int32(failure is None)) and failure is None:
            failure = CheckpointError(f"{folder} was not written: the first process failed, see its error")
    if failure is not None:
        raise failure


def read_json(folder: Path, name: str, what: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        hint = "; it holds a PEFT adapter: load its base model, then the adapter" if (folder / "adapter_config.json").is_file() else ""
        raise CheckpointError(f"{folder} has no {name}: it is not {what}{hint}")
    try:
        return dict(json.loads((folder / name).read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}/{name} is damaged: it is no JSON object") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _merge(cfg: ModelConfig, flat: dict[tuple, Any], parts: list[tuple]) -> Callable[..., jax.Array]:
    """(weight, its adapters, or some layers of each) -> the weight with them."""
    if len(parts) == 1:
        return lambda weight: weight

    def merge(*arrays: jax.Array) -> jax.Array:
        state = nnx.State.from_flat_path({p: flat[p].replace(a) for p, a in zip(parts, arrays)})
        return dict(merged(cfg, state)[1].flat_state())[parts[0]].get_value()

    return jax.jit(merge)  # also because variables hold each other: outside they would keep arrays until a garbage collection


def _adapters(flat: dict[tuple, Any], path: tuple) -> list[tuple]:
    return [p for s in SUFFIXES if (p := (*path[:-1], path[-1] + s)) in flat]


def _prefix(opened: Opened) -> tuple[str, list[str]]:
    """What stands before the names of the body, and a fault where some have it and some not."""
    names = sorted({*opened.tensors, *opened.lost} - {HEAD})
    bare = [n for n in names if n.startswith(("embed_tokens.", "layers.", "norm."))]
    full = [n for n in names if n.startswith(PREFIX)]
    if bare and full:
        fault = f"names with and without {PREFIX!r} are mixed: {len(full)} as {full[0]}, {len(bare)} as {bare[0]}"
        return (PREFIX if len(full) >= len(bare) else ""), [fault]
    return ("" if bare else PREFIX), []


def _untied(opened: Opened, prefix: str) -> list[str]:
    """A fault where the stored head of a tied model is not its embedding; compared some rows at a time."""
    head, embed = (opened.tensors[n].open() for n in (HEAD, f"{prefix}embed_tokens.weight"))
    rows = max(1, (16 << 20) // max(1, embed[:1].nbytes))
    if head.shape == embed.shape and all(np.array_equal(head[n : n + rows], embed[n : n + rows]) for n in range(0, len(head), rows)):
        return []
    return [f"{HEAD} {list(head.shape)} differs from the embedding, and tie_word_embeddings is true: set it to false, or drop {HEAD}"]

"""Folders in and out, configs read and refused, presets, meshes."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.hf import DTYPES, load_hf, save_hf
from sage_jax.model.presets import PRESETS, preset
from sage_jax.model.sharding import abstract_params, make_mesh, spec
from sage_jax.model.tokenizer import train_bpe

QWEN3 = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24)
QWEN2 = QWEN3.replace(qk_norm=False, attention_bias=True, tie_embeddings=False, head_dim=4)
MOE = QWEN3.replace(num_experts=4, experts_per_token=2, expert_size=12, norm_topk=False)
FAMILIES = {"qwen3": QWEN3, "qwen2 tied": QWEN2.replace(tie_embeddings=True), "qwen2.5 untied": QWEN2, "moe": MOE.replace(tie_embeddings=False)}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({}, devices=jax.devices()[:1])


@functools.cache
def randomised(cfg):
    """(graphdef, random parameters); not by `create_params`, which compiles for long."""
    graph, abstract = abstract_params(cfg)
    rng = np.random.default_rng(0)
    return graph, jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), abstract)


@pytest.mark.parametrize("cfg", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_is_exact(cfg, dtype, mesh, tmp_path):
    _, params = randomised(cfg)
    save_hf(tmp_path / "m", cfg, params, None, dtype)
    got_cfg, _, got = load_hf(tmp_path / "m", mesh)
    assert got_cfg == cfg
    want = jax.tree.map(lambda a: np.asarray(a).astype(DTYPES[dtype]).astype(np.float32), params)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_array_equal(a, b)
    save_hf(tmp_path / "again", cfg, got, None, dtype)
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "m/model.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "m"]  # nothing temporary is left


def test_folder_is_one_that_transformers_reads(mesh, tmp_path):
    from transformers import AutoConfig, GenerationConfig

    tokenizer = train_bpe(["a b c\n" * 20], 300)
    cfg = QWEN3.replace(vocab_size=320)
    save_hf(tmp_path / "m", cfg, randomised(cfg)[1], tokenizer)
    config = AutoConfig.from_pretrained(tmp_path / "m")
    assert type(config).__name__ == "Qwen3Config" and config.head_dim == 8
    assert config.rope_parameters["rope_theta"] == cfg.rope_theta
    assert set(GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id) == tokenizer.stop_ids
    assert ModelConfig.from_hf(config.to_dict()) == cfg
    with pytest.raises(ConfigError, match="64 embedding rows"):
        save_hf(tmp_path / "n", QWEN3, randomised(QWEN3)[1], tokenizer)
    assert not (tmp_path / "n").exists()


def test_sharded_index_and_all_faults_in_one_error(mesh, tmp_path):
    _, params = randomised(QWEN3)
    save_hf(tmp_path / "m", QWEN3, params, None, "float32")
    tensors = load_file(tmp_path / "m/model.safetensors")
    split = tmp_path / "split"
    split.mkdir()
    shutil.copy(tmp_path / "m/config.json", split)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, split / file)
    index = {"weight_map": {n: f for f, part in files.items() for n in part}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    for a, b in zip(jax.tree.leaves(load_hf(split, mesh)[2]), jax.tree.leaves(params)):
        np.testing.assert_array_equal(a, b)
    (split / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load_hf(split, mesh)

    broken = {**tensors, "extra.weight": np.zeros(3, np.float32), "model.norm.weight": np.zeros(5, np.float32)}
    del broken["model.layers.1.mlp.up_proj.weight"]
    save_file(broken, tmp_path / "m/model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)missing model\.layers\.1\.mlp\.up_proj.*surplus extra.*wrong shape model\.norm.*\[5\].*\[16\]"):
        load_hf(tmp_path / "m", mesh)
    raw = (tmp_path / "m/model.safetensors").read_bytes()
    for cut in (len(raw) - 1, 20):
        (tmp_path / "m/model.safetensors").write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match="truncated"):
            load_hf(tmp_path / "m", mesh)


def test_rope_theta_wherever_it_is_kept():
    raw = QWEN3.to_hf()
    del raw["rope_theta"], raw["rope_parameters"]
    assert ModelConfig.from_hf({**raw, "rope_theta": 5e5}).rope_theta == 5e5
    assert ModelConfig.from_hf({**raw, "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}).rope_theta == 7e5
    with pytest.raises(ConfigError, match="different values"):
        ModelConfig.from_hf({**raw, "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}})


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama"},
        {"rope_type": "llama3"},
        {"use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"vision_config": {"depth": 2}},
        {"num_experts": 8},
    ],
)
def test_unsupported_keys_are_named_with_their_value(change):
    (key, value), = change.items()
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf({**QWEN3.to_hf(), **({"rope_parameters": change} if key == "rope_type" else change)})
    assert key in str(error.value) and repr(value) in str(error.value)


def test_presets():
    for name, cfg in PRESETS.items():
        assert ModelConfig.from_hf(cfg.to_hf(), dtype=cfg.dtype) == cfg, name
    tiny = preset("tiny", vocab_size=704)
    assert (tiny.vocab_size, tiny.hidden_size, tiny.head_dim, tiny.embed_init_std) == (704, 128, 32, 0.1)
    with pytest.raises(ConfigError, match=r"tiny.*qwen3_32b"):
        preset("small")
    with pytest.raises(ConfigError, match="hidden_size"):
        preset("tiny", width=3)


class FakeMesh:
    shape = {"data": 1, "fsdp": 3, "tensor": 4}  # noqa: RUF012


def test_sizes_that_do_not_divide_are_named_with_both_numbers():
    with pytest.raises(ConfigError, match=r"size 16 .*size 3"):
        spec(("embed",), (16,), FakeMesh)
    with pytest.raises(ConfigError, match=r"size 3 .*size 4"):
        spec(("kv_heads",), (3,), FakeMesh)
    assert spec(("kv_heads", "head_dim"), (2, 8), FakeMesh) == jax.sharding.PartitionSpec(None, None)
    with pytest.raises(ConfigError, match="meet"):
        spec(("mlp", "vocab"), (8, 8), FakeMesh)
    with pytest.raises(ConfigError, match="unknown logical axis"):
        spec(("width",), (8,), FakeMesh)
    with pytest.raises(ConfigError, match="unknown mesh axes"):
        make_mesh({"model": 1})
    with pytest.raises(ConfigError, match=r"needs 64 devices"):
        make_mesh({"tensor": 64})


def theirs(model, ids):
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor(ids)).logits.numpy()


def ours(graph, params, ids):
    policy = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    return np.asarray(policy.logits(policy(jnp.asarray(ids, jnp.int32), positions)[0]))


def same(got, want):
    np.testing.assert_allclose(got, want, atol=2e-4 * max(1.0, np.abs(want).max()))


@pytest.mark.parity
@pytest.mark.parametrize("limit", [5_000, 1 << 30], ids=["shards", "one"])
@pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)
def test_transformers_loads_ours_whole_and_agrees(cfg, limit, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra: pip install sage-jax[parity]")
    from transformers import AutoModelForCausalLM

    graph, params = randomised(cfg)
    save_hf(tmp_path / "m", cfg, params, None, "float32", max_shard_bytes=limit)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    ids = np.random.default_rng(0).integers(0, 64, (2, 19))
    same(ours(graph, params, ids), theirs(model, ids))


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Qwen3Moe"])
def test_ours_loads_what_transformers_writes(kind, mesh, tmp_path):
    """The whole model, its body alone (names without prefix), and many files; experts are fused in memory and apart in files."""
    torch = pytest.importorskip("torch", reason="needs the extra: pip install sage-jax[parity]")
    import transformers

    tied = kind == "Qwen3"
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    if kind == "Qwen3Moe":
        sizes |= {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    config = getattr(transformers, f"{kind}Config")(**sizes, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, std=0.3) if name.endswith("weight") and p.ndim > 1 else torch.nn.init.normal_(p, mean=0.5, std=0.2)
    ids = np.random.default_rng(0).integers(0, 64, (2, 19))
    model.save_pretrained(tmp_path / "whole", max_shard_size="5KB")
    assert (tmp_path / "whole/model.safetensors.index.json").exists()
    _, graph, params = load_hf(tmp_path / "whole", mesh)
    same(ours(graph, params, ids), theirs(model, ids))
    model.model.save_pretrained(tmp_path / "body")
    _, _, body = load_hf(tmp_path / "body", mesh, tie_embeddings=True)
    for name, value in body.layers.items():
        np.testing.assert_array_equal(value[...], params.layers[name][...])

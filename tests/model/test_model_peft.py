"""Adapter folders: names and numbers of the peft package, what is refused, and the package itself where it is installed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model import transfer
from sage_jax.model.config import ModelConfig
from sage_jax.model.hf import load_hf, save_hf
from sage_jax.model.lora import LoraParam, split_trainable
from sage_jax.model.peft import load_peft, save_peft
from sage_jax.model.sharding import abstract_params, make_mesh

BASE = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24, rope_theta=1e4, max_position=64
)  # fmt: skip
QWEN2 = BASE.replace(qk_norm=False, attention_bias=True, tie_embeddings=False, head_dim=4)
MOE = BASE.replace(num_experts=4, experts_per_token=2, expert_size=12)
LORA = {"lora_rank": 3, "lora_alpha": 5.0}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({}, devices=jax.devices()[:1])


def drawn(cfg, seed=0):
    """(graphdef, random parameters, adapters' B too)"""
    rng = np.random.default_rng(seed)
    graph, abstract = abstract_params(cfg)
    return graph, jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.3, a.dtype), abstract)


def base_of(cfg, params):
    return cfg.replace(lora_rank=0, lora_alpha=16.0), split_trainable(params)[1]


def changed(folder, **changes):
    raw = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**raw, **changes}))


def test_names_and_numbers_are_those_of_peft(tmp_path):
    cfg = BASE.replace(**LORA)
    _, params = drawn(cfg)
    save_peft(tmp_path / "a", cfg, params, "Qwen/Qwen3-0.6B")
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert set(tensors) == {f"base_model.model.model.layers.{n}.{m}.lora_{s}.weight" for n in range(2) for m in modules for s in "AB"}
    w = {name: np.asarray(v[...]) for name, v in params.layers.items()}
    rng = np.random.default_rng(1)
    for module, name, inputs in (("self_attn.q_proj", "q", 16), ("self_attn.o_proj", "o", 32), ("mlp.down_proj", "down", 24)):
        x = rng.normal(size=inputs).astype(np.float32)
        a, b = (tensors[f"base_model.model.model.layers.1.{module}.lora_{s}.weight"] for s in "AB")
        assert a.shape == (3, inputs)
        if name == "o":
            want = np.einsum("nh,nhr,rd->d", x.reshape(4, 8), w["o_lora_a"][1], w["o_lora_b"][1])
        else:
            want = np.tensordot(x @ w[f"{name}_lora_a"][1], w[f"{name}_lora_b"][1], 1).reshape(-1)
        np.testing.assert_allclose(b @ (a @ x), want, rtol=1e-4, atol=1e-5)
    raw = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (raw["r"], raw["lora_alpha"], raw["base_model_name_or_path"]) == (3, 5.0, "Qwen/Qwen3-0.6B")
    assert raw["target_modules"] == [m.split(".")[1] for m in modules]
    with pytest.raises(ConfigError, match="lora_rank=0"):
        save_peft(tmp_path / "b", *base_of(cfg, params), "x")


@pytest.mark.parametrize(
    "cfg", [BASE.replace(**LORA), QWEN2.replace(**LORA, lora_targets=("v", "down")), MOE.replace(**LORA, lora_targets=("q", "o"))]
)
def test_round_trip_is_exact(cfg, mesh, tmp_path, monkeypatch):
    graph, params = drawn(cfg)
    for size in (1, 1 << 24) if cfg.num_experts else (1 << 24,):
        monkeypatch.setattr(transfer, "AT_ONCE", size)
        save_peft(tmp_path / "a", cfg, params, "x")
        got_cfg, got_graph, got = load_peft(tmp_path / "a", mesh, *base_of(cfg, params))
        assert got_cfg == cfg and got_graph == graph
        assert jax.tree.structure(got) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, got, params)
    assert all(isinstance(v, LoraParam) == ("_lora_" in path[-1]) for path, v in got.flat_state())


def test_what_is_not_supported_is_named(mesh, tmp_path):
    cfg = BASE.replace(**LORA, lora_targets=("q", "v"))
    _, params = drawn(cfg)
    base = base_of(cfg, params)
    for change in (
        {"peft_type": "IA3"}, {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 8}}, {"r": None},
        {"init_lora_weights": "pissa"}, {"fan_in_fan_out": True}, {"layers_to_transform": [0]}, {"target_modules": ["q_proj", "embed_tokens"]},
        {"something_new": {"on": True}},
    ):  # fmt: skip
        (key, value), = change.items()
        save_peft(tmp_path / "a", cfg, params, "x")
        changed(tmp_path / "a", **change)
        with pytest.raises(ConfigError) as error:
            load_peft(tmp_path / "a", mesh, *base)
        assert key in str(error.value) and (repr(value) in str(error.value) or "embed_tokens" in str(error.value))
    with pytest.raises(ConfigError, match="adapters of rank 3 already"):
        load_peft(tmp_path / "a", mesh, cfg, params)


def test_faults_are_in_one_error(mesh, tmp_path):
    cfg = BASE.replace(**LORA, lora_targets=("q", "v"))
    _, params = drawn(cfg)
    base = base_of(cfg, params)
    save_peft(tmp_path / "a", cfg, params, "x")
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    at = "base_model.model.model.layers"
    del tensors[f"{at}.0.self_attn.q_proj.lora_A.weight"]
    tensors[f"{at}.2.self_attn.q_proj.lora_A.weight"] = np.zeros((3, 16), np.float32)
    tensors[f"{at}.1.self_attn.v_proj.lora_B.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, tmp_path / "a/adapter_model.safetensors")
    wanted = r"3 faults: missing .*layers\.0.*q_proj.*surplus .*layers\.2.*wrong shape .*layers\.1.*v_proj.* \[3, 3\] instead of \[16, 3\]"
    with pytest.raises(CheckpointError, match=wanted):
        load_peft(tmp_path / "a", mesh, *base)
    (tmp_path / "a/adapter_model.safetensors").unlink()
    changed(tmp_path / "a", target_modules=".*_proj")
    with pytest.raises(CheckpointError, match=r"neither adapter_model\.safetensors nor"):
        load_peft(tmp_path / "a", mesh, *base)
    with pytest.raises(CheckpointError, match=r"it holds a PEFT adapter: load its base model"):
        load_hf(tmp_path / "a", mesh)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        load_peft(tmp_path, mesh, *base)


def test_patterns_paths_and_rank_stabilised_scales(mesh, tmp_path):
    cfg = BASE.replace(**LORA, lora_targets=("q", "v"))
    _, params = drawn(cfg)
    save_peft(tmp_path / "a", cfg, params, "x")
    for targets in (".*(q|v)_proj", ["self_attn.q_proj", "layers.0.self_attn.v_proj"], None):
        changed(tmp_path / "a", target_modules=targets)
        assert load_peft(tmp_path / "a", mesh, *base_of(cfg, params))[0] == cfg
    changed(tmp_path / "a", use_rslora=True)
    assert load_peft(tmp_path / "a", mesh, *base_of(cfg, params))[0].lora_alpha == pytest.approx(5 * 3**0.5)


@pytest.mark.parity
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("cfg", [BASE.replace(**LORA), QWEN2.replace(**LORA), MOE.replace(**LORA, lora_targets=("q", "k", "v", "o"))])
def test_the_package_loads_ours_and_ours_loads_the_packages(cfg, rslora, mesh, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the extra: pip install sage-jax[parity]")
    peft = pytest.importorskip("peft", reason="needs the extra: pip install sage-jax[parity]")
    from transformers import AutoModelForCausalLM

    graph, params = drawn(cfg)
    save_hf(tmp_path / "base", *base_of(cfg, params), None, "float32")
    save_hf(tmp_path / "merged", cfg, params, None, "float32")
    save_peft(tmp_path / "adapter", cfg, params, str(tmp_path / "base"))
    ids = np.random.default_rng(0).integers(0, 64, (2, 19))
    positions = jnp.broadcast_to(jnp.arange(19, dtype=jnp.int32), (2, 19))

    def theirs(model):
        with torch.no_grad():
            return model.eval()(torch.tensor(ids)).logits.numpy()

    def ours(graph, params):
        policy = nnx.merge(graph, params)
        return np.asarray(policy.logits(policy(jnp.asarray(ids, jnp.int32), positions)[0]))

    def same(got, want):
        np.testing.assert_allclose(got, want, atol=2e-4 * max(1.0, np.abs(want).max()))

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = theirs(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    want = theirs(loaded)
    assert np.abs(want - plain).max() > 0.1  # the adapters do something
    same(ours(graph, params), want)
    same(theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)), want)
    assert {n for n, _ in loaded.named_parameters() if "lora" in n} == {
        n.replace(".weight", ".default.weight") for n in load_file(tmp_path / "adapter/adapter_model.safetensors")
    }
    # and the other way
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    targets = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    model = peft.get_peft_model(
        fresh, peft.LoraConfig(r=2, lora_alpha=3, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, use_rslora=rslora)
    )
    model.save_pretrained(tmp_path / "theirs")
    got_cfg, got_graph, got = load_peft(tmp_path / "theirs", mesh, *base_of(cfg, params))
    assert got_cfg.lora_rank == 2 and got_cfg.lora_targets == cfg.lora_targets
    same(ours(got_graph, got), theirs(model))

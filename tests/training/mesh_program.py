"""Run by test_meshes on 8 fake devices: logits, one update, sampled ids and placements of every mesh against one device."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sage_jax.model.config import ModelConfig
from sage_jax.model.lora import join, split_trainable
from sage_jax.model.rules import on
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.rl.batch import RowShape, Sample, pack
from sage_jax.rl.losses import LossConfig
from sage_jax.rl.update import PolicyUpdate, policy_logprobs
from sage_jax.sampling.engine import Engine
from sage_jax.sampling.request import Sampling
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

DENSE = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, mlp_size=64, embed_init_std=0.3)
QWEN2 = DENSE.replace(qk_norm=False, attention_bias=True, tie_embeddings=False, num_kv_heads=4)
MOE = DENSE.replace(num_experts=4, experts_per_token=2, expert_size=32)
LORA = DENSE.replace(lora_rank=4, lora_targets=("q", "o", "down"))
MESHES = {
    "data": {"data": 8}, "fsdp": {"fsdp": 8}, "all": {"data": 2, "fsdp": 2, "tensor": 2}, "tensor": {"fsdp": 2, "tensor": 4},
    "expert": {"fsdp": 2, "tensor": 2, "expert": 2}, "sequence": {"data": 2, "tensor": 2, "sequence": 2},
}  # fmt: skip
CASES = [
    *((DENSE, name) for name in ("data", "fsdp", "all", "tensor", "sequence")), (QWEN2, "tensor"),
    (LORA, "all"), (DENSE.replace(attention="chunked"), "sequence"),
]  # fmt: skip
TOKENIZER = types.SimpleNamespace(vocab_size=60, token_bytes=lambda token: bytes([token]))


def items():
    rng = np.random.default_rng(0)
    for r in range(12):
        length = int(rng.integers(6, 16))
        mask = np.zeros(length, np.float32)
        mask[length // 2 :] = 1
        yield Sample((r // 4, r % 4, 0), rng.integers(0, 60, length).astype(np.int32), mask, np.zeros(length, np.float32), float(rng.normal()))


def results(cfg: ModelConfig, shape: dict) -> dict:
    mesh = make_mesh(shape, jax.devices()[: 8 if shape else 1])
    graph, params = create_params(cfg, mesh, 0)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 60, (8, 12)), jnp.int32)
    where = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32), (8, 12))
    logits = on(mesh, jax.jit(lambda p: (lambda m: m.logits(m(ids, where)[0]))(nnx.merge(graph, p))))(params)

    with Engine(graph, cfg, mesh, TOKENIZER, slots=8, context=32, extend_buckets=(8,), decode_chunk=4) as engine:
        engine.set_params(params, version=0)
        key = lambda n: types.SimpleNamespace(seed=7, path=(0, n))  # noqa: E731
        futures = [engine.submit(f"c{n}", [1 + n // 2, 5, 9, 2], Sampling(temperature=1.0, max_new_tokens=12), key(n)) for n in range(10)]
        sampled = []
        for n, future in enumerate(futures):
            sampled.append(list(future.result(timeout=300).ids))
            engine.release(f"c{n}")
        cache = jax.tree.leaves(engine._cache)

    tx = make_optimizer(make_schedule("constant", 1e-2, 0, 10), eps=1e-3)
    trainable, frozen = split_trainable(params) if cfg.lora_rank else (params, None)
    state = TrainState(trainable, init_opt_state(tx, trainable, mesh))
    before = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    update = PolicyUpdate(policy_logprobs(graph, temperature=1.0, vocab_size_real=60), tx, state, mesh, LossConfig(), frozen=frozen)
    state, metrics = update(state, [pack(list(items()), [RowShape(8, 32)])])
    assert before == jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state)), "shardings moved"
    whole = state.params if frozen is None else join(state.params, frozen)
    if cfg.lora_rank:
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
        assert len(moments) == 2 * len(jax.tree.leaves(trainable)), "optimizer state of frozen weights"
    return {
        "logits": np.asarray(logits), "sampled": sampled, "grad_norm": metrics["update/grad_norm"],
        "params": {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(whole)},
        "placed": (jax.tree.leaves((whole, state.opt_state)), cache),
    }  # fmt: skip


def check_placed(cfg: ModelConfig, shape: dict, leaves: list, cache: list) -> None:
    """No array of a parameter's size is larger on a device than the rules say, moments included."""
    split = shape.get("fsdp", 1) * shape.get("tensor", 1)
    for leaf in leaves:
        if leaf.size < 1024 or cfg.lora_rank in leaf.shape[1:]:  # norms, biases, routers, adapters
            continue
        parts = leaf.size // leaf.addressable_shards[0].data.size
        kv = leaf.ndim == 4 and leaf.shape[2] == cfg.num_kv_heads and cfg.num_kv_heads < shape.get("tensor", 1)
        expert = shape.get("expert", 1) if cfg.num_experts in leaf.shape[1:2] and cfg.num_experts else 1
        want = shape.get("fsdp", 1) if kv else split * expert
        assert parts == want, (shape, leaf.shape, leaf.sharding, parts, want)
    for leaf in cache:
        tensor, rows = shape.get("tensor", 1), shape.get("data", 1) * shape.get("fsdp", 1)
        assert leaf.size // leaf.addressable_shards[0].data.size == rows * (tensor if cfg.num_kv_heads % tensor == 0 else 1), leaf.sharding


def main() -> None:
    assert jax.device_count() == 8
    alone: dict[ModelConfig, dict] = {}
    for cfg, name in CASES:
        plain = cfg.replace(attention="auto")
        if plain not in alone:
            alone[plain] = results(plain, {})
        want, got = alone[plain], results(cfg, MESHES[name])
        np.testing.assert_allclose(got["logits"], want["logits"], atol=1e-4)
        assert got["sampled"] == want["sampled"], (name, got["sampled"], want["sampled"])
        np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-4)
        for path, value in want["params"].items():
            off = np.linalg.norm(got["params"][path] - value) / max(np.linalg.norm(value), 1e-3)
            assert off < 1e-5, (name, path, off)
        check_placed(cfg, MESHES[name], *got["placed"])
        print("same:", name, f"experts={cfg.num_experts} rank={cfg.lora_rank} {cfg.attention}", flush=True)
    print("cases", len(CASES))


if __name__ == "__main__":
    sys.exit(main())

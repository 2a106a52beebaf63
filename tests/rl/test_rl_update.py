"""The whole update with a real (tiny) policy: against numpy, invariances, skipped updates, retraces, several epochs."""

import dataclasses
import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sage_jax.errors import ConfigError
from sage_jax.model.config import ModelConfig
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.rl.accumulate import Stats, UpdateStep, batch_sharding, put_batch
from sage_jax.rl.batch import RowShape, Sample, pack, split_by_rollout
from sage_jax.rl.losses import LossConfig
from sage_jax.rl.update import PolicyUpdate, policy_logprobs
from sage_jax.training.optimizer import decay_mask, init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

V = 24  # ids of the tokenizer; the embedding has more rows
CFG = ModelConfig(vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32, embed_init_std=0.3)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({}, jax.devices()[:1])


@pytest.fixture(scope="module")
def policy(mesh):
    return create_params(CFG, mesh, 0)


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def state_of(policy, mesh, tx):
    params = copy(policy[1])
    return TrainState(params, init_opt_state(tx, params, mesh))


def samples(n=6, seed=0):
    rng = np.random.default_rng(seed)
    result = []
    for i in range(n):
        t = int(rng.integers(6, 15))
        mask = (rng.random(t) < 0.5).astype(np.float32)
        mask[0], mask[-1] = 0, 1
        result.append(Sample((i // 2, i % 2, 0), rng.integers(0, V, t).astype(np.int32), mask, -rng.random(t).astype(np.float32), float(rng.normal())))
    return result


@functools.cache
def jitted_logprobs(temperature):
    """Log-probs [N, 15] of N unpacked episodes, one a row: the reference that packing must agree with."""
    graphdef = create_params(CFG, make_mesh({}, jax.devices()[:1]), 0)[0]
    f = policy_logprobs(graphdef, temperature=temperature, vocab_size_real=V)
    return jax.jit(lambda params, batch: f(params, batch)[0])


def unpacked(items):
    batches = [pack([s], [RowShape(1, 16)]).micro_batches[0] for s in items]
    return jax.tree.map(lambda *rows: np.concatenate(rows), *batches)


def with_true_logprobs(policy, items, temperature=1.0):
    rows = np.asarray(jitted_logprobs(temperature)(policy[1], unpacked(items)))
    return [
        dataclasses.replace(s, logprobs=np.concatenate([[0], row[: len(s.ids) - 1]]).astype(np.float32)) for s, row in zip(items, rows)
    ]


def bigram(params, batch):
    """The smallest policy: logits of the next token are a row of a table. For what does not depend on the network."""
    logp = jax.nn.log_softmax(params["w"][batch.ids[:, :-1]])
    return jnp.take_along_axis(logp, batch.ids[:, 1:, None], -1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)


@pytest.fixture
def table(mesh):
    w = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
    return {"w": jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))}


def bigram_update(table, mesh, tx, **kw):
    state = TrainState(copy(table), init_opt_state(tx, table, mesh))
    return state, PolicyUpdate(bigram, tx, state, mesh, LossConfig(), **kw)


UPDATES = {}  # compiled once a session


def sgd(policy, mesh, packed, temperature=1.0, **kw):
    """(params after one SGD step of rate 1, metrics): the gradient is start - result."""
    tx = optax.sgd(1.0)
    state = state_of(policy, mesh, tx)
    key = (temperature, tuple(kw.items()))
    if key not in UPDATES:
        loss = LossConfig(old_logprobs=kw.pop("old_logprobs", "recomputed"))
        UPDATES[key] = PolicyUpdate(policy_logprobs(policy[0], temperature=temperature, vocab_size_real=V), tx, state, mesh, loss, **kw)
    state, metrics = UPDATES[key](state, packed)
    return state.params, metrics


def close(a, b, atol=2e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


@pytest.mark.parametrize("normaliser, expected", [("sequence", 2.5), ("token", 1.6), ("constant", 1.0)])
def test_three_normalisers(mesh, normaliser, expected):
    """Rows of 2 and 8 tokens with losses 4 and 1 a token, in any width and any number of micro-batches."""
    items = []
    for r, (tokens, loss) in enumerate([(2, 4.0), (8, 1.0)]):
        mask = np.array([0] + [1] * tokens, np.float32)
        items.append(Sample((0, r, 0), np.ones(tokens + 1, np.int32), mask, np.zeros(tokens + 1, np.float32), -loss))
    tx = optax.sgd(0.0)
    for shapes in ([RowShape(1, 9)], [RowShape(2, 64)], [RowShape(1, 12)]):
        params = {"w": jax.device_put(jnp.zeros(()), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))}
        state = TrainState(params, init_opt_state(tx, params, mesh))
        def flat(p, b):
            return (jnp.zeros(b.ids[:, 1:].shape) + p["w"], jnp.zeros(b.ids[:, 1:].shape))
        update = PolicyUpdate(flat, tx, state, mesh, LossConfig(normaliser=normaliser))
        _, metrics = update(state, [pack(items, shapes, normaliser=normaliser, constant=8.0)])
        assert metrics["update/loss"] == pytest.approx(expected)


@pytest.mark.parametrize("normaliser", ["sequence", "token", "constant"])
def test_gradient_is_the_formula_s(policy, mesh, normaliser):
    """On-policy: sum_t w_t A grad(log p_t) / denominator, one unpacked episode at a time."""
    items = samples()
    packed = pack(items, [RowShape(2, 32)], normaliser=normaliser, constant=10.0)
    after, metrics = sgd(policy, mesh, [packed])
    denominator = {"sequence": len(items), "token": sum(s.trained for s in items), "constant": 10.0 * len(items)}[normaliser]
    rows = unpacked(items)
    w = np.stack([s.advantage * rows.mask[i, 1:] / (s.trained if normaliser == "sequence" else 1) for i, s in enumerate(items)])

    def surrogate(params):
        return -(jitted_logprobs(1.0)(params, rows) * w).sum() / denominator

    want = jax.tree.map(lambda p, g: p - g, policy[1], jax.grad(surrogate)(policy[1]))
    close(after, want)
    expected = -sum(s.advantage * (1.0 if normaliser == "sequence" else s.trained) for s in items) / denominator
    assert metrics["update/loss"] == pytest.approx(expected, abs=1e-5)


def test_packing_padding_order_and_micro_batches_change_nothing(policy, mesh):
    items = with_true_logprobs(policy, samples(5))
    reference, m0 = sgd(policy, mesh, [pack(items, [RowShape(5, 16)])])
    for shapes in ([RowShape(1, 16)], [RowShape(1, 64)], [RowShape(2, 32)]):
        packed = pack(items[::-1], shapes)
        after, m = sgd(policy, mesh, [packed])
        close(after, reference)
        for name in ("update/loss", "update/grad_norm", "update/entropy_nats", "update/gap_max_nats", "update/trained_tokens"):
            assert m[name] == pytest.approx(m0[name], abs=1e-5), name


def test_masked_garbage_changes_nothing(policy, mesh):
    items = samples(4)
    dirty = []
    for s in items:
        logprobs = np.where(s.mask > 0, s.logprobs, np.nan)
        dirty.append(dataclasses.replace(s, logprobs=logprobs.astype(np.float32)))
    packed = pack(dirty, [RowShape(2, 32)])
    batches = []
    for b in packed.micro_batches:  # also what packing would have zeroed, and ids of padding
        off = b.mask == 0
        def spoil(a, x, off=off):
            return np.where(off, x, a).astype(a.dtype)
        batches.append(dataclasses.replace(
            b, logprobs=spoil(b.logprobs, np.inf), old_logprobs=spoil(b.old_logprobs, np.nan), advantages=spoil(b.advantages, np.nan),
            weights=spoil(b.weights, np.inf), ids=np.where(b.segment_ids == 0, 17, b.ids).astype(np.int32)))  # fmt: skip
    clean, m0 = sgd(policy, mesh, [pack(items, [RowShape(2, 32)])])
    after, m = sgd(policy, mesh, [dataclasses.replace(packed, micro_batches=tuple(batches))])
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
    drop = {k for k in m if k.startswith("time/") or k.endswith("_per_s")}
    assert {k: v for k, v in m.items() if k not in drop} == {k: v for k, v in m0.items() if k not in drop}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ratio_one_and_no_gap_before_the_first_update(policy, mesh, temperature):
    items = with_true_logprobs(policy, samples(4), temperature)
    packed = [pack(items, [RowShape(2, 32)])]
    _, m = sgd(policy, mesh, packed, temperature=temperature)
    assert m["update/ratio_min"] == m["update/ratio_mean"] == m["update/ratio_max"] == 1.0
    assert m["update/clip_share"] == 0 and m["update/gap_max_nats"] < 1e-5
    assert m["update/gap_mean_nats"] <= m["update/gap_max_nats"] and m["update/gap_p99_nats"] <= m["update/gap_max_nats"]
    if temperature == 1.0:
        return
    _, m = sgd(policy, mesh, packed, temperature=temperature, old_logprobs="sampler")
    assert abs(m["update/ratio_max"] - 1) < 1e-5 and abs(m["update/ratio_min"] - 1) < 1e-5


def test_truncated_sampling_shows_in_the_gap_and_not_in_the_ratio(policy, mesh):
    """top_p that keeps mass 0.8: the sampler's log-probs are higher by -log 0.8."""
    items = with_true_logprobs(policy, samples(4))
    kept = [dataclasses.replace(s, logprobs=(s.logprobs - np.log(0.8)).astype(np.float32)) for s in items]
    _, m = sgd(policy, mesh, [pack(kept, [RowShape(2, 32)])])
    assert m["update/ratio_max"] == 1.0
    assert m["update/gap_mean_nats"] == pytest.approx(-np.log(0.8), abs=1e-5)


def test_several_mini_batches_and_epochs_are_ppo(table, mesh):
    items = samples(6)
    parts = split_by_rollout(items, 2, seed=0)
    packed = [pack(p, [RowShape(2, 32)]) for p in parts]
    state, update = bigram_update(table, mesh, optax.sgd(1.0), epochs=2, mini_batches=2)
    state, m = update(state, packed)
    assert m["update/applied"] == 4 and m["update/ratio_max"] > 1.0 > m["update/ratio_min"]
    rows = unpacked(items)
    old = bigram(table, rows)[0]
    advantage = np.array([[s.advantage] for s in items])

    def loss(params, part):
        ratio = jnp.exp(bigram(params, rows)[0] - old)
        token = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage) * rows.mask[:, 1:]
        chosen = [i for i, s in enumerate(items) if s.key in {x.key for x in part}]
        return sum(token[i].sum() / items[i].trained for i in chosen) / len({items[i].key[:2] for i in chosen})

    params = table
    for _ in range(2):
        for part in parts:
            params = jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, part))
    close(state.params, params)
    with pytest.raises(ValueError, match="2 mini-batches"):
        update(state, packed[:1])


def test_non_finite_updates_and_empty_batches_are_skipped(table, mesh):
    tx = make_optimizer(make_schedule("constant", 1e-2, 0, 10))
    state, update = bigram_update(table, mesh, tx)
    good, bad = samples(4), samples(4, seed=1)
    bad = [dataclasses.replace(bad[0], advantage=float("nan")), *bad[1:]]
    before = jax.device_get((state.params, state.opt_state))
    state, m = update(state, [pack(bad, [RowShape(2, 32)])])
    assert m["update/skipped"] == 1 and (state.updates, state.skipped, state.skipped_in_row) == (0, 1, 1)
    state, m = update(state, [pack([], [RowShape(2, 32)])])
    assert m["update/skipped"] == 1 and state.skipped_in_row == 2
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves((state.params, state.opt_state)), strict=True):
        np.testing.assert_array_equal(x, y)
    state, m = update(state, [pack(good, [RowShape(2, 32)])])
    assert m["update/applied"] == 1 and (state.updates, state.skipped, state.skipped_in_row) == (1, 2, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_one_program_a_row_shape_and_everything_donated(table, mesh):
    tx = make_optimizer(make_schedule("constant", 1e-2, 0, 10))
    state, update = bigram_update(table, mesh, tx)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*donated.*")
        state, _ = update(state, [pack(samples(2), [RowShape(1, 16)])])
        compiled = update.compiled()
        for n in (1, 3, 6):
            old = state
            state, _ = update(state, [pack(samples(n, seed=n), [RowShape(1, 16)])])
            assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
    assert update.compiled() == compiled


def test_clip_by_global_norm_over_all_micro_batches(table, mesh):
    tx = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    state, update = bigram_update(table, mesh, tx)
    _, m = update(state, [pack(samples(5), [RowShape(1, 16)])])
    assert m["update/grad_norm"] > 1e-3 and m["update/update_norm"] == pytest.approx(1e-3, rel=1e-3)


def test_master_weights_move_by_less_than_16_bits_can_hold(mesh):
    def place(x):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    params = {"w": place(jnp.float32(1.0))}
    tx = optax.sgd(6e-4)
    state = TrainState(params, init_opt_state(tx, params, mesh))
    def loss(p, b):
        return (p["w"].astype(jnp.bfloat16).astype(jnp.float32), Stats({}, {}, {}))
    step = UpdateStep(loss, tx, state, mesh)
    batch = pack(samples(1), [RowShape(1, 16)]).micro_batches
    for _ in range(100):
        state, _, _ = step(state, batch)
    assert float(state.params["w"]) == pytest.approx(0.94, abs=0.005)
    with pytest.raises(ConfigError, match="float32"):
        init_opt_state(tx, {"w": place(jnp.bfloat16(1.0))}, mesh)


def test_optimizer_state_is_float32_and_norms_do_not_decay(policy, mesh):
    tx = make_optimizer(make_schedule("cosine", 1e-2, 2, 10), weight_decay=0.1)
    opt = init_opt_state(tx, policy[1], mesh)
    assert {str(x.dtype) for x in jax.tree.leaves(opt)} == {"float32", "int32"}
    paths = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_flatten_with_path(decay_mask(policy[1]))[0]}
    assert {k for k, v in paths.items() if not v} == {k for k in paths if "norm" in k} and any(paths.values())


def test_schedules():
    s = make_schedule("cosine", 1.0, 4, 10, final_share=0.1)
    np.testing.assert_allclose([float(s(i)) for i in (0, 2, 4, 7, 10, 50)], [0.2, 0.6, 1.0, 0.55, 0.1, 0.1], atol=1e-6)
    s = make_schedule("constant", 1.0, 0, 10)
    assert float(s(0)) == float(s(99)) == 1.0
    with pytest.raises(ConfigError, match="cosine"):
        make_schedule("linear", 1.0, 0, 10)
    with pytest.raises(ConfigError, match="warmup"):
        make_schedule("cosine", 1.0, 10, 10)


def test_rows_must_divide_over_the_data_axes():
    four = jax.sharding.AbstractMesh((2, 2), ("data", "fsdp"))
    batch = pack(samples(2), [RowShape(6, 16)]).micro_batches[0]
    with pytest.raises(ConfigError, match=r"6 rows .* 4 devices"):
        put_batch(batch, batch_sharding(four))


ON_MESHES = """
import sys
import jax, numpy as np
from sage_jax.model.config import ModelConfig
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.rl.batch import RowShape, Sample, pack
from sage_jax.rl.losses import LossConfig
from sage_jax.rl.update import PolicyUpdate, policy_logprobs
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

cfg = ModelConfig(vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=32, embed_init_std=0.3)
rng = np.random.default_rng(0)
items = []
for r in range(7):
    mask = np.zeros(12, np.float32)
    mask[6:] = 1
    items.append(Sample((0, r, 0), rng.integers(0, 24, 12).astype(np.int32), mask, np.zeros(12, np.float32), float(rng.normal())))
results = []
for shape in ({}, {"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(list(shape.values()) or [1]))])
    graphdef, params = create_params(cfg, mesh, 0)
    tx = make_optimizer(make_schedule("constant", 1e-2, 0, 10))
    state = TrainState(params, init_opt_state(tx, params, mesh))
    placed = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    update = PolicyUpdate(policy_logprobs(graphdef, temperature=1.0, vocab_size_real=24), tx, state, mesh, LossConfig())
    for _ in range(2):
        state, metrics = update(state, [pack(items, [RowShape(8, 16)])])
    now = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a == b, placed, now))), "shardings moved"
    big = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 2]
    if shape:
        assert big and all(not x.sharding.is_fully_replicated for x in big), "moments are not sharded"
    results.append((jax.device_get(jax.tree.leaves(state.params)), metrics["update/grad_norm"]))
for params, norm in results[1:]:
    np.testing.assert_allclose(norm, results[0][1], rtol=1e-4)
    for a, b in zip(params, results[0][0]):
        np.testing.assert_allclose(a, b, atol=1e-4)
print("same on", len(results), "meshes")
"""


@pytest.mark.slow
def test_one_and_eight_devices_agree_and_keep_shardings():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", ON_MESHES], env=env, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr[-3000:]
    assert "same on 3 meshes" in out.stdout

"""Training with adapters: what moves and what does not, checkpoints, the hand-over to the sampler, export, evaluation of a checkpoint."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from qwen_chat import TEMPLATES

from configs import evaluate, sage_demo
from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model.hf import load_hf, save_hf
from sage_jax.model.lora import LoraParam, join, merged
from sage_jax.model.peft import load_peft
from sage_jax.model.presets import preset
from sage_jax.model.sharding import abstract_params, create_params, make_mesh
from sage_jax.model.tokenizer import train_bpe
from sage_jax.rl.accumulate import UpdateStep
from sage_jax.rl.batch import RowShape, Sample, pack
from sage_jax.sft.step import supervised_loss
from sage_jax.training import setup
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.training.data import scenario_iterator
from sage_jax.training.experiment import _export
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

IDS = jnp.asarray(np.random.default_rng(0).integers(0, 290, (2, 9)), jnp.int32)
WHERE = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder of a small policy."""
    folder = tmp_path_factory.mktemp("base") / "policy"
    tokenizer = train_bpe(["alpha beta"] * 9, 300)
    tokenizer.fast.chat_template = TEMPLATES["qwen3"]
    cfg = preset("tiny", vocab_size=320, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16)
    save_hf(folder, cfg, create_params(cfg, make_mesh({}, jax.devices()[:1]), 0)[1], tokenizer, dtype="float32")
    return folder


def settings(base, **lora):
    config = sage_demo.get_config()
    config.model.update(source=str(base), thinking=False)
    config.lora.update({"rank": 2, "alpha": 4.0, "targets": ("q", "v", "down")} | lora)
    return config


def start(config):
    """(policy, state, jitted update, frozen weights)"""
    loaded = setup.load_policy(config, adapters=True)
    trainable, frozen = setup.trained_part(loaded)
    tx = make_optimizer(make_schedule("constant", 0.05, 0, 10))
    state = TrainState(trainable, init_opt_state(tx, trainable, loaded.mesh))
    return loaded, state, UpdateStep(supervised_loss(loaded.graphdef, 300), tx, state, loaded.mesh, frozen), frozen


def batch(seed):
    rng = np.random.default_rng(seed)
    mask = (np.arange(12) > 3).astype(np.float32)
    return pack([Sample((0, r, 0), rng.integers(0, 290, 12).astype(np.int32), mask, mask * 0, 1.0) for r in range(3)], [RowShape(2, 16)]).micro_batches


def logits(cfg, params):
    return np.asarray(jax.jit(lambda p: (lambda m: m.logits(m(IDS, WHERE)[0]))(nnx.merge(abstract_params(cfg)[0], p)))(params))


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def test_only_adapters_move_and_have_gradients_and_moments(base):
    loaded, state, update, frozen = start(settings(base))
    adapters = [v for _, v in state.params.flat_state()]
    assert len(adapters) == 6 and all(isinstance(v, LoraParam) for v in adapters) and arrays(frozen)
    sizes = sorted(x.size for x in jax.tree.leaves(state.params))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sorted(x.size for x in moments) == sorted(sizes * 2)
    gradients = jax.eval_shape(update._zero, state.params, frozen, batch(0)[0]).grads
    assert sorted(x.size for x in jax.tree.leaves(gradients)) == sizes

    before, weights = (jax.tree.map(jnp.copy, t) for t in (state.params, frozen))  # numpy's views would keep the first from being donated
    old = state
    state, values, _ = update(state, batch(0))
    assert values["applied"] == 1 and values["grad_norm"] > 0
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state))) and not any(x.is_deleted() for x in jax.tree.leaves(frozen))
    assert same(weights, frozen)
    state, _, _ = update(state, batch(1))  # A moves from the second update on: B is zero in the first
    assert all(np.abs(a - b).max() > 0 for a, b in zip(arrays(before), arrays(state.params), strict=True))
    assert np.abs(logits(loaded.cfg, join(state.params, frozen)) - logits(*load_hf(base, loaded.mesh)[::2])).max() > 1e-3


def test_frozen_weights_may_be_smaller_and_adapters_stay_float32(base):
    config = settings(base, base_dtype="bfloat16")
    _, state, update, frozen = start(config)
    assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")} and {x.dtype for x in arrays(state.params)} == {np.dtype("float32")}
    assert update(state, batch(0))[1]["applied"] == 1
    config.lora.base_dtype = "bf16"
    with pytest.raises(ConfigError, match="param_dtype='bf16': valid are float32, bfloat16, float16"):
        setup.check_policy(config, source=str(base))


def test_checkpoints_hold_adapters_resume_and_are_evaluated(base, tmp_path):
    config = settings(base)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(setup.digest(config)))
    loaded, state, update, frozen = start(config)
    state, _, _ = update(state, batch(0))
    iterator = scenario_iterator(["a", "b"], 1, 0)
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(1, state.next_step(), iterator, {})
        checkpoints.wait()
        stored = sum(f.stat().st_size for f in (run / "checkpoints" / "last" / "1" / "params").rglob("*") if f.is_file())
        _, fresh, again, weights = start(config)
        restored, _ = checkpoints.restore_latest(fresh, iterator)
    assert stored < sum(x.nbytes for x in arrays(frozen)), "the frozen weights are in it too"
    assert same(restored.params, state.params) and same(restored.opt_state, state.opt_state)
    resumed, unbroken = again(restored, batch(1))[0], update(state, batch(1))[0]
    assert same(resumed.params, unbroken.params) and same(weights, frozen)

    last = str(run / "checkpoints" / "last")
    read = setup.load_policy(evaluate.get_config(), source=last)
    with Checkpoints(run / "checkpoints") as checkpoints:
        trained = checkpoints.restore_params(resumed.params, "1")[0].params
    np.testing.assert_allclose(logits(read.cfg, read.params), logits(loaded.cfg, join(trained, frozen)), atol=1e-4)
    assert read.cfg.lora_rank == 0 and read.identity.endswith("step 1")

    # New adapters on what that run trained, and its checkpoints in turn.
    second = settings(last, targets=("o",))
    onto = setup.load_policy(second, adapters=True)
    assert {path[-1] for path, _ in setup.trained_part(onto)[0].flat_state()} == {"o_lora_a", "o_lora_b"}
    np.testing.assert_allclose(logits(onto.cfg, onto.params), logits(read.cfg, read.params), atol=1e-5)
    other = json.loads((run / "config.json").read_text())
    other["lora"]["rank"] = 3
    (run / "config.json").write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"another model: .*lora_a"):
        setup.load_policy(evaluate.get_config(), source=last)


def test_the_sampler_gets_the_weights_themselves_or_one_merged_copy(base):
    config = settings(base)
    loaded, state, update, frozen = start(config)
    state, _, _ = update(state, batch(0))
    plain, weights = setup.for_sampling(config, loaded)
    given = weights(state.params)
    assert plain.cfg == loaded.cfg
    assert {id(x) for x in jax.tree.leaves(given)} == {id(x) for x in jax.tree.leaves((state.params, frozen))}

    config.lora.merge_for_sampling = True
    plain, weights = setup.for_sampling(config, loaded)
    assert plain.cfg == loaded.cfg.replace(lora_rank=0)
    want = merged(loaded.cfg, join(state.params, frozen))[1]
    for a, b in zip(jax.tree.leaves(weights(state.params)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for c, w in ((loaded.cfg, given), (plain.cfg, weights(state.params))):
        with setup.sampler(config, dataclasses.replace(loaded, cfg=c, graphdef=abstract_params(c)[0], params=w)) as engine:
            assert engine.retraces == 0


def test_a_run_leaves_the_merged_policy_and_its_adapters(base, tmp_path):
    config = settings(base)
    loaded, state, update, frozen = start(config)
    for seed in (0, 1):
        state, _, _ = update(state, batch(seed))
    want = logits(loaded.cfg, join(state.params, frozen))
    written = _export(config, tmp_path, loaded, state.params)
    cfg, _, params = load_hf(tmp_path / "policy", loaded.mesh)
    np.testing.assert_allclose(logits(cfg, params), want, atol=1e-4)
    assert written.cfg.lora_rank == 0 and same(written.params, params)  # a run started again measures these same weights
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    cfg, _, whole = load_peft(tmp_path / "adapter", loaded.mesh, *load_hf(about["base_model_name_or_path"], loaded.mesh)[::2])
    np.testing.assert_array_equal(logits(cfg, whole), want)

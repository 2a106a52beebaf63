"""The supervised step and loop with a tiny policy: formula, learning, resume."""

import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

from sage_jax.errors import ConfigError
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.config import ModelConfig, pad_vocab
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.model.tokenizer import train_bpe
from sage_jax.rl.accumulate import UpdateStep
from sage_jax.rl.batch import RowShape, pack
from sage_jax.sft.dataset import encode, write_dataset
from sage_jax.sft.loop import run_sft
from sage_jax.sft.short import short_forms
from sage_jax.sft.step import Evaluation, supervised_loss
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.training.metrics import is_time_metric, read_metrics
from sage_jax.training.optimizer import init_opt_state
from sage_jax.training.state import TrainState

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["alpha", "beta", "gamma", "delta"]


def records():
    result = []
    for i in range(16):
        a, b = WORDS[i % 4], WORDS[i // 4]
        messages = [{"role": "user", "content": f"{a} {b}"}, {"role": "assistant", "content": f"{b} {a}" if i % 2 else b}]
        result.append({"messages": messages, "meta": {"scenario_id": f"s{i % 8}", "mode": "call" if i < 12 else "inline", "instruction": f"{a} {b}"}})
    return result


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe([" ".join(WORDS), "user assistant"] * 20, 300)


def load(tokenizer):
    mesh = make_mesh({}, jax.devices()[:1])
    cfg = ModelConfig(vocab_size=pad_vocab(tokenizer.vocab_size), hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=32, embed_init_std=0.1)
    graphdef, params = create_params(cfg, mesh, 0)
    return types.SimpleNamespace(cfg=cfg, graphdef=graphdef, params=params, tokenizer=tokenizer, mesh=mesh)


def config(**changes):
    c = ConfigDict({"seed": 0, "sft": dict(
        steps=6, batch=4, held_out=0.2, renamed_copies=0, weights={}, short_steps=0, normaliser="sequence", row_tokens=(64,), rows=2, lr=3e-3, schedule="cosine", warmup=1, b1=0.9, b2=0.99,
        eps=1e-8, weight_decay=0.0, clip_norm=1.0, eval_every=3, checkpoint_every=2, keep=2, max_bad_updates=3)})  # fmt: skip
    c.sft.update(changes)
    return c


@nnx.jit
def forward(policy, ids):
    return policy.logits(policy(ids, jnp.arange(ids.shape[1])[None])[0])


def plain(loaded, sample):
    """-log p of each label and whether it is the most probable token, by the unpacked forward in numpy."""
    policy = nnx.merge(loaded.graphdef, loaded.params)
    ids = np.pad(sample.ids, (0, 64 - len(sample.ids)))[None]  # what comes later is not seen
    logits = np.asarray(forward(policy, jnp.asarray(ids)))[0, : len(sample.ids) - 1, : loaded.tokenizer.vocab_size].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at = sample.mask[1:] > 0
    target = sample.ids[1:]
    return -logp[np.arange(len(target)), target][at], (logits.argmax(-1) == target)[at]


def test_loss_and_accuracy_against_numpy(tokenizer):
    loaded = load(tokenizer)
    samples = encode(records()[:5], ChatRenderer(tokenizer), 64).samples
    per = [plain(loaded, s) for s in samples]
    losses = [p[0] for p in per]
    evaluate = Evaluation(loaded.graphdef, tokenizer.vocab_size, loaded.mesh)
    tx = optax.sgd(0.0)
    state = TrainState(loaded.params, init_opt_state(tx, loaded.params, loaded.mesh))
    step = UpdateStep(supervised_loss(loaded.graphdef, tokenizer.vocab_size), tx, state, loaded.mesh)
    for normaliser, want in (("sequence", np.mean([x.mean() for x in losses])), ("token", np.concatenate(losses).mean())):
        for shape in (RowShape(2, 64), RowShape(1, 128)):
            packed = pack(samples, [shape], normaliser=normaliser)
            m = evaluate(state.params, packed)
            assert m["loss_nats"] == pytest.approx(want, rel=1e-5)
            assert m["token_accuracy"] == pytest.approx(np.concatenate([p[1] for p in per]).mean())
            assert m["sequence_accuracy"] == pytest.approx(np.mean([p[1].all() for p in per]))
        state, one, _ = step(state, pack(samples, [RowShape(2, 64)], normaliser=normaliser).micro_batches)
        assert one["loss"] == pytest.approx(want, rel=1e-5)


def test_it_learns_and_writes_what_it_says(tokenizer, tmp_path):
    write_dataset(tmp_path / "d.jsonl", records())
    run_sft(config(steps=12, lr=1e-2), load(tokenizer), tmp_path / "d.jsonl", tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    assert [r["step"] for r in lines] == list(range(12))
    assert lines[-1]["sft/loss_nats"] < 0.8 * lines[0]["sft/loss_nats"]
    assert [r["step"] for r in lines if "sft/held_out_token_accuracy" in r] == [2, 5, 8, 11]
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert not [k for k in lines[-1] if k.startswith("sft/") and f"`{k}`" not in documented]


@pytest.mark.slow
def test_resumed_run_equals_unbroken_run(tokenizer, tmp_path):
    write_dataset(tmp_path / "d.jsonl", records())
    whole = run_sft(config(short_steps=5), load(tokenizer), tmp_path / "d.jsonl", tmp_path / "a")
    broken = config(short_steps=5, checkpoint_every=2, max_bad_updates=3)
    # The run dies after its 4th step's checkpoint: what later steps left is removed, as if they had not happened.
    run_sft(broken, load(tokenizer), tmp_path / "d.jsonl", tmp_path / "b")
    with Checkpoints(tmp_path / "b/checkpoints", keep=2) as c:
        assert c.steps() == [6, 4]
    (tmp_path / "b/checkpoints/last/6/MANIFEST.json").unlink()
    with pytest.warns(UserWarning):
        again = run_sft(broken, load(tokenizer), tmp_path / "d.jsonl", tmp_path / "b")
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    def strip(d):
        return [{k: v for k, v in r.items() if not is_time_metric(k)} for r in read_metrics(d)]
    assert strip(tmp_path / "a") == strip(tmp_path / "b")


def test_a_batch_without_labels_leaves_the_policy_as_it_is(tokenizer):
    loaded = load(tokenizer)
    before = jax.device_get(loaded.params)
    sample = encode(records()[:1], ChatRenderer(tokenizer), 64).samples[0]
    empty = dataclasses.replace(sample, mask=np.zeros_like(sample.mask))
    tx = optax.sgd(1.0)
    state = TrainState(loaded.params, init_opt_state(tx, loaded.params, loaded.mesh))
    step = UpdateStep(supervised_loss(loaded.graphdef, tokenizer.vocab_size), tx, state, loaded.mesh)
    state, one, _ = step(state, pack([empty], [RowShape(2, 64)], normaliser="token").micro_batches)
    assert one["applied"] == 0 and state.skipped == 1
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_refusals(tokenizer, tmp_path):
    write_dataset(tmp_path / "d.jsonl", records())
    with pytest.raises(ConfigError, match=r"batch=99"):
        run_sft(config(batch=99), load(tokenizer), tmp_path / "d.jsonl", tmp_path / "run")
    for changes, message in ({"mode": "inline"}, "there is none"), ({"instruction": None}, "collect again"):
        records_ = [{**r, "meta": {k: v for k, v in (r["meta"] | changes).items() if v is not None}} for r in records()]
        write_dataset(tmp_path / "e.jsonl", records_)
        with pytest.raises(ConfigError, match=message):
            run_sft(config(short_steps=2), load(tokenizer), tmp_path / "e.jsonl", tmp_path / "run")


def test_conversations_without_a_mode_are_copied_as_often_as_asked(tokenizer, tmp_path):
    own = [{**r, "meta": {} if i < 12 else r["meta"]} for i, r in enumerate(records())]
    write_dataset(tmp_path / "d.jsonl", own)
    run = config(held_out=0.0, renamed_copies=2, weights={"inline": 0.5}, batch=29)
    with pytest.raises(ConfigError, match=r"batch=29 is larger than the 28 usable"):  # 12 twice and 4 once
        run_sft(run, types.SimpleNamespace(tokenizer=tokenizer), tmp_path / "d.jsonl", tmp_path / "run")


def test_the_first_steps_see_the_short_forms_only(tokenizer, tmp_path):
    long = [{**r, "messages": [{"role": "system", "content": "alpha beta " * 3}, *r["messages"]]} for r in records()]
    assert [[m["content"] for m in r["messages"]] for r in short_forms(long)] == [[m["content"] for m in r["messages"]] for r in records()[:12]]
    write_dataset(tmp_path / "d.jsonl", long)
    run_sft(config(short_steps=3, row_tokens=(128,)), load(tokenizer), tmp_path / "d.jsonl", tmp_path / "run")
    padding = [r["sft/padding_share"] for r in read_metrics(tmp_path / "run")]
    assert min(padding[:3]) > max(padding[3:])

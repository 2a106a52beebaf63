"""Supervised fine-tuning of a policy on a chat dataset, with held-out evaluation, checkpoints and resume."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_collections import ConfigDict

from sage_jax.errors import ConfigError, SageError
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.lora import join, split_trainable
from sage_jax.report.progress import bar
from sage_jax.rl.accumulate import UpdateStep
from sage_jax.rl.batch import Packed, RowShape, Sample, pack
from sage_jax.sft.dataset import encode, held_out, read_dataset
from sage_jax.sft.rename import renamed
from sage_jax.sft.short import short_forms
from sage_jax.sft.step import Evaluation, supervised_loss
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.training.data import shuffled_batches
from sage_jax.training.metrics import MetricsWriter
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

if TYPE_CHECKING:
    from sage_jax.training.setup import Loaded


def run_sft(config: ConfigDict, loaded: Loaded, dataset: Path, workdir: Path) -> Any:
    """Trains for `config.sft.steps` updates and returns the parameters. The same call resumes from workdir/checkpoints.

    Args:
      config: reads `seed` and `sft`.
      loaded: the start policy (cfg, graphdef, params, tokenizer, mesh); its parameters are donated.
      dataset: see `sft.dataset`.
      workdir: gets metrics.jsonl, TensorBoard events and checkpoints.

    Raises:
      ConfigError: nothing to train on, or an impossible combination.
      SageError: `config.sft.max_bad_updates` updates in a row were not finite.
    """
    c = config.sft
    train_records, test_records = held_out(read_dataset(dataset), c.held_out)
    renderer = ChatRenderer(loaded.tokenizer)
    shapes = [RowShape(c.rows, length) for length in c.row_tokens]
    longest = max(c.row_tokens)
    rng = np.random.default_rng(config.seed)
    if c.renamed_copies:
        modes = [r["meta"].get("mode") for r in train_records]  # datasets of others name none
        weights = dict.fromkeys(modes, 1.0) | c.weights.to_dict()
        copies = [round(c.renamed_copies * weights[mode]) for mode in modes]
        train_records = [renamed(r, rng) for k in range(max(copies)) for r, n in zip(train_records, copies) if k < n]
    train, test = (encode(r, renderer, longest) for r in (train_records, test_records))
    short = encode(short_forms(train_records), renderer, longest).samples if c.short_steps else ()
    for what, samples in (("conversations", train.samples), *([("short forms", short)] if c.short_steps else [])):
        if len(samples) < c.batch:
            raise ConfigError(f"sft.batch={c.batch} is larger than the {len(samples)} usable {what} of {dataset}")

    tx = make_optimizer(
        make_schedule(c.schedule, c.lr, c.warmup, c.steps), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, clip_norm=c.clip_norm,
    )  # fmt: skip
    trainable, frozen = split_trainable(loaded.params) if loaded.cfg.lora_rank else (loaded.params, None)
    state = TrainState(trainable, init_opt_state(tx, trainable, loaded.mesh))
    update = UpdateStep(supervised_loss(loaded.graphdef, loaded.tokenizer.vocab_size), tx, state, loaded.mesh, frozen)
    evaluation = Evaluation(loaded.graphdef, loaded.tokenizer.vocab_size, loaded.mesh)
    test_packed = pack(test.samples, shapes, normaliser=c.normaliser) if test.samples else None
    iterator = shuffled_batches(list(range(len(train.samples))), c.batch, config.seed)

    def whole(state: TrainState) -> Any:
        return state.params if frozen is None else join(state.params, frozen)

    with Checkpoints(workdir / "checkpoints", keep=c.keep, best_metric="") as checkpoints:
        if checkpoints.latest_step() is not None:
            state, _ = checkpoints.restore_latest(state, iterator)
        with MetricsWriter(workdir, resume_step=state.step) as metrics, bar("sft", c.steps, state.step) as advance:
            while state.step < c.steps:
                step = state.step
                if step < c.short_steps:
                    places = np.random.default_rng((config.seed, step)).choice(len(short), c.batch, replace=False)
                    packed = _batch(short, places, shapes, c.normaliser)
                else:
                    packed = _batch(train.samples, next(iterator), shapes, c.normaliser)
                state, values = _step(update, state, packed)
                values |= {"sft/skipped_conversations": train.skipped, "sft/cut_conversations": train.cut}
                last = state.step == c.steps
                if test_packed is not None and (state.step % c.eval_every == 0 or last):
                    values |= {f"sft/held_out_{k}": v for k, v in evaluation(whole(state), test_packed).items()}
                metrics.write(step, values)
                if state.step % c.checkpoint_every == 0 or last:
                    checkpoints.save(state.step, state, iterator, meta={"seed": config.seed})
                if state.skipped_in_row >= c.max_bad_updates:
                    raise SageError(f"updates of steps {step - state.skipped_in_row + 1} to {step} were not finite; see {workdir}/metrics.jsonl")
                shown = {k: values[f"sft/held_out_{k}"] for k in ("loss_nats", "token_accuracy") if f"sft/held_out_{k}" in values}
                advance(1, loss=values["sft/loss_nats"], tokens_per_s=values["sft/tokens_per_s"], **shown)
    return whole(state)


def _batch(samples: Sequence[Sample], places: Sequence[int], shapes: Sequence[RowShape], normaliser: str) -> Packed:
    chosen = [samples[int(i)] for i in places]
    return pack(chosen, shapes, normaliser=normaliser)


def _step(update: UpdateStep, state: TrainState, packed: Packed) -> tuple[TrainState, dict[str, float]]:
    started = time.perf_counter()
    state, one, _ = update(state, packed.micro_batches)
    seconds = time.perf_counter() - started
    return state.next_step(), {
        "sft/loss_nats": one["loss"],
        "sft/grad_norm": one["grad_norm"],
        "sft/update_norm": one["update_norm"],
        "sft/skipped": 1 - one["applied"],
        "sft/trained_tokens": packed.trained_tokens,
        "sft/padding_share": packed.padding_share,
        "sft/tokens_per_s": packed.tokens / seconds,
        "time/update_s": seconds,
    }

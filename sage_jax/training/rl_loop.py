"""SAGE's outer loop. The whole step reads from top to bottom in `_step`.

In: a config, a workdir, a start policy. Out: metrics, checkpoints (parameters, optimizer, step, data iterator; the best by
dev SGC kept), the trained parameters. A killed run is started again by the same command: the step that broke is done
again from the last checkpoint, with the same noise, and gives what not stopping would have given.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from sage_jax.agent.chain import Rollout, run_chains
from sage_jax.agent.trajectory import End, Episode, TokenRecord
from sage_jax.errors import InfrastructureError, SageError
from sage_jax.report.episodes import write_episodes
from sage_jax.report.progress import step_bar
from sage_jax.report.tables import score
from sage_jax.rl.advantages import chain_advantages
from sage_jax.rl.batch import RowShape, Sample, pack, split_by_rollout
from sage_jax.rl.losses import LossConfig
from sage_jax.rl.rewards import chain_record, rewards
from sage_jax.rl.update import PolicyUpdate, policy_logprobs
from sage_jax.training import chains as chain_sources
from sage_jax.training import setup
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.training.data import scenario_iterator
from sage_jax.training.evaluation import Run, evaluate
from sage_jax.training.metrics import MetricsWriter
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.rollout_metrics import rollout_metrics
from sage_jax.training.state import TrainState
from sage_jax.world.roots import DataRoot


@dataclasses.dataclass
class Parts:
    """What the loop works with; made once."""

    config: ConfigDict
    root: DataRoot
    engine: object
    loaded: setup.Loaded
    update: PolicyUpdate
    chains: Callable
    session: setup.Session
    weights: Callable  # parameters that train -> weights for the engine


def train(
    config: ConfigDict, workdir: Path, root: DataRoot, loaded: setup.Loaded, session: setup.Session, report: Callable[[int, dict], None],
    profile: tuple[int, int] | None = None,
) -> TrainState:
    """Trains for `config.rl.steps` steps, resuming from workdir/checkpoints if there are any.

    Args:
      loaded: the start policy; its parameters are donated.
      session: an open pool over `root`.
      report: called after every step with (step, metrics), for progress lines.
      profile: first and last step (0-based) of which a JAX profile goes to workdir/profile.

    Raises:
      SageError: several non-finite updates in a row, or a step without a single valid rollout.
    """
    rl, o = config.rl, config.optim
    updates = o.horizon or rl.steps * rl.epochs * rl.mini_batches
    tx = make_optimizer(
        make_schedule(o.schedule, o.lr, o.warmup, updates), b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm,
    )
    trainable, frozen = setup.trained_part(loaded)
    state = TrainState(trainable, init_opt_state(tx, trainable, loaded.mesh))
    logprobs = policy_logprobs(loaded.graphdef, temperature=config.sampler.temperature, vocab_size_real=loaded.tokenizer.vocab_size)
    loss = LossConfig(
        clip_low=rl.clip_low, clip_high=rl.clip_high, normaliser=rl.normaliser, constant=rl.constant, old_logprobs=rl.old_logprobs,
    )
    update = PolicyUpdate(logprobs, tx, state, loaded.mesh, loss, epochs=rl.epochs, mini_batches=rl.mini_batches, frozen=frozen)
    iterator = scenario_iterator(list(root.scenarios(rl.split)), rl.scenarios_per_step, config.seed)
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.checkpoint.keep, best_metric="eval_dev/sgc")
    if checkpoints.latest_step() is not None:
        state, _ = checkpoints.restore_latest(state, iterator)
    metrics = MetricsWriter(workdir, resume_step=state.step)

    sampled_from, weights = setup.for_sampling(config, loaded)
    engine = setup.sampler(config, dataclasses.replace(sampled_from, params=weights(state.params)))
    parts = Parts(config, root, engine, loaded, update, chain_sources.source(config, root), session, weights)
    try:
        while state.step < rl.steps:
            step = state.step
            engine.set_params(weights(state.params), version=step)
            if profile is not None and step == profile[0]:
                jax.profiler.start_trace(str(workdir / "profile"))
            state, values = _step(parts, state, next(iterator), workdir)
            if profile is not None and step == profile[1]:
                jax.profiler.stop_trace()
            last = state.step == rl.steps
            if config.eval.every and (state.step % config.eval.every == 0 or last):
                values |= _dev(parts, state)
            metrics.write(step, values)
            if state.step % config.checkpoint.every == 0 or last:
                checkpoints.save(state.step, state, iterator, meta={"seed": config.seed, "config": setup.digest(config)}, metrics=values)
            report(step, values)
            if state.skipped_in_row >= rl.max_bad_updates:
                raise SageError(f"updates of steps {step - state.skipped_in_row + 1} to {step} were not finite; the run stops. See {workdir}/metrics.jsonl")
    finally:
        engine.close()
        checkpoints.close()
        metrics.close()
    return state


def _step(parts: Parts, state: TrainState, scenarios: list[str], workdir: Path) -> tuple[TrainState, dict]:
    config, rl, step = parts.config, parts.config.rl, state.step
    started = time.monotonic()

    # Sequential rollouts: the same chain of tasks for the rollouts of a group, each with a library of its own.
    chains = [parts.chains(step, s) for s in scenarios]
    a = config.agent
    policy = setup.jax_policy(config, parts.engine, parts.loaded, temperature=config.sampler.temperature)
    sampled = dataclasses.replace(parts.engine.stats)
    with step_bar(f"step {step + 1}", rl.group * sum(map(len, chains))) as advance:
        rollouts = parts.session.run(
            run_chains(
                chains, rl.group, policy, parts.session.pool, setup.episode_spec(config, keep_outputs=False), seed=config.seed, path=(step,),
                name=f"step{step}", count=lambda text: len(parts.loaded.tokenizer.encode(text)),
                early_stop=(a.early_stop_turn, a.early_stop_share) if a.early_stop_turn else None,
                on_progress=lambda p: advance(success=bool(p.episode.s)),
            )
        )
    rolled = time.monotonic()

    # Rewards, and advantages within (chain, position) over the valid rollouts.
    valid = [is_sample(r, a.early_stopped) for r in rollouts]
    records = [chain_record(r.episodes, rl.detector) if ok else None for r, ok in zip(rollouts, valid)]
    paid = [rewards(rec, rl.reward, rl.no_code_reward) if rec is not None else np.zeros(len(r.tasks)) for rec, r in zip(records, rollouts)]
    advantages = chain_advantages(paid, [r.chain for r in rollouts], valid, rl.advantage, rl.negative_weight)
    values = rollout_metrics(rollouts, valid, records, paid, advantages)
    values |= parts.engine.stats.metrics(sampled) | {"sampler/retraces": parts.engine.retraces}
    if not any(valid):
        errors = {e.error for r in rollouts for e in r.episodes if e.error}
        raise InfrastructureError(f"step {step}: none of {len(rollouts)} rollouts is a sample. First errors: {sorted(errors)[:3]}")

    # One clipped update on the sampled tokens, or several on mini-batches of whole rollouts.
    samples = _samples(rollouts, valid, advantages)
    shapes = [RowShape(rl.rows, length) for length in rl.row_tokens]
    mini_batches = split_by_rollout(samples, rl.mini_batches, seed=config.seed + step)
    packed = [pack(part, shapes, normaliser=rl.normaliser, constant=rl.constant) for part in mini_batches]
    state, update = parts.update(state, packed)
    values |= update
    values["update/skipped_total"] = state.skipped
    done = time.monotonic()

    write_episodes(workdir / "episodes" / "train" / f"step_{step:05d}.jsonl", [e for r in rollouts for e in r.episodes])
    generated = sum(e.generated for r in rollouts for e in r.episodes)
    values |= {
        "time/rollout_s": rolled - started, "time/step_s": done - started,
        "time/world_s": sum(t.seconds_world for r in rollouts for e in r.episodes for t in e.turns),
        "time/tokens_per_s": generated / max(rolled - started, 1e-9),
    }
    return state.next_step(), values


def is_sample(rollout: Rollout, early_stopped: str) -> bool:
    """Whether a rollout is trained; with `early_stopped` "drop", one of whose episodes was stopped is not (LOOP)."""
    return rollout.valid and not (early_stopped == "drop" and any(e.end is End.EARLY_STOPPED for e in rollout.episodes))


def _samples(rollouts: list[Rollout], valid: list[bool], advantages: list[np.ndarray]) -> list[Sample]:
    samples = []
    for rollout, ok, advantage in zip(rollouts, valid, advantages):
        if not ok:
            continue
        for k, episode in enumerate(rollout.episodes):
            # A prompt that did not fit the context has no tokens: it counts in the denominators and trains nothing.
            samples.append(Sample.of((rollout.chain, rollout.index, k), episode.tokens or TokenRecord(), advantage[k]))
    return samples


def _dev(parts: Parts, state: TrainState) -> dict:
    """The evaluation agent on dev, greedy: `eval_dev/...`, which also chooses the best checkpoint."""
    config = parts.config
    started = time.monotonic()
    parts.engine.set_params(parts.weights(state.params), version=state.step)
    policy = setup.jax_policy(config, parts.engine, parts.loaded, temperature=0.0)
    split = config.eval.dev_split
    asked = len(parts.root.task_ids(split))
    with step_bar(split, asked) as advance:
        runs = parts.session.run(
            evaluate(
                parts.root, split, [Run(0, policy)], parts.session.pool, setup.episode_spec(config, keep_outputs=False),
                seed=config.seed, name=f"dev{state.step}", count=lambda text: len(parts.loaded.tokenizer.encode(text)),
                on_progress=lambda p: advance(success=bool(p.episode.s)),
            )
        )
    return dev_metrics(runs, asked) | {"time/eval_dev_s": time.monotonic() - started}


def dev_metrics(runs: list[list[Episode]], asked: int) -> dict[str, float]:
    """What `eval_dev/...` says. Without a score for each of the `asked` tasks of a run there is no SGC, so that an
    evaluation that lost some never makes a checkpoint the best one."""
    row = score(runs, "dev", asked=asked)
    values = {f"eval_dev/{k}": v for k, v in row.values.items() if not math.isnan(v) and (k != "sgc" or row.complete)}
    return values | {"eval_dev/infrastructure_errors": row.errors}


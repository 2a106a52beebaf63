"""What can be known to be wrong with a config before anything is built, evaluated or trained.

`check_*` construct what the run will construct, or look a name up where the run will, so that a wrong name or an
impossible combination raises in the first second and not after an hour.
"""

from __future__ import annotations

from collections.abc import Iterable

from ml_collections import ConfigDict

from sage_jax.agent.early_stop import EarlyStop
from sage_jax.agent.scripted import ScriptedPolicy
from sage_jax.errors import ConfigError, DataRootError
from sage_jax.model.hf import DTYPES
from sage_jax.model.tokenizer import Tokenizer
from sage_jax.rl.advantages import ADVANTAGES
from sage_jax.rl.losses import LossConfig, check_sampling
from sage_jax.rl.rewards import REWARDS
from sage_jax.sft.step import NORMALISERS as SFT_NORMALISERS
from sage_jax.skills.usage import DETECTORS
from sage_jax.training import chains, setup
from sage_jax.training.evaluation import LIBRARIES
from sage_jax.training.optimizer import make_optimizer, make_schedule
from sage_jax.world.roots import DataRoot


def check_train(config: ConfigDict) -> None:
    """Everything that `sage_jax.train` reads, as far as it needs no data root.

    Raises:
      ConfigError: a combination that cannot run or would train something else than asked.
    """
    rl, s, o, a, r = config.rl, config.sampler, config.optim, config.agent, config.run
    check_sampling(s.temperature, s.top_k, s.top_p, old_logprobs=rl.old_logprobs)
    check_episodes(config)
    check_evaluation(config)
    _known("rl.reward", rl.reward, REWARDS)
    _known("rl.advantage", rl.advantage, ADVANTAGES)
    _known("rl.detector", rl.detector, DETECTORS)
    _known("chain.source", config.chain.source, chains.SOURCES)
    LossConfig(clip_low=rl.clip_low, clip_high=rl.clip_high, normaliser=rl.normaliser, constant=rl.constant, old_logprobs=rl.old_logprobs)
    at_least_one = {name: rl[name] for name in ("steps", "group", "scenarios_per_step", "epochs", "mini_batches", "rows")}
    at_least_one |= {"chain.length": config.chain.length, "checkpoint.every": config.checkpoint.every, "checkpoint.keep": config.checkpoint.keep}
    for name, value in at_least_one.items():
        if value < 1:
            raise ConfigError(f"{name if '.' in name else f'rl.{name}'}={value} must be at least 1")
    make_optimizer(
        make_schedule(o.schedule, o.lr, o.warmup, o.horizon or rl.steps * rl.epochs * rl.mini_batches),
        b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, clip_norm=o.clip_norm,
    )
    _known("agent.early_stopped", a.early_stopped, EARLY_STOPPED)
    if a.early_stop_turn:
        EarlyStop(1, a.early_stop_turn, a.early_stop_share)
    if max(rl.row_tokens) < s.context:
        raise ConfigError(f"rl.row_tokens={tuple(rl.row_tokens)}: the longest must hold a whole episode, sampler.context={s.context}")
    _divides("rl.rows", rl.rows, config)
    names = ["base", r.start_name, r.name]
    if len(set(names)) != len(names) or any("/" in n or "memory" in n for n in names):
        raise ConfigError(f"rows base, run.start_name={r.start_name!r} and run.name={r.name!r} need three different names without '/' and 'memory'")
    if r.from_scratch:
        check_collect(config)
        check_sft(config)


def check_episodes(config: ConfigDict) -> None:
    """The rules of episodes and their prompts."""
    setup.episode_spec(config, keep_outputs=False)


def check_evaluation(config: ConfigDict) -> None:
    """Raises ConfigError for runs that measure nothing, or an unknown library."""
    e = config.eval
    _known("eval.library", e.library, LIBRARIES)
    if not e.greedy and e.runs < 1:
        raise ConfigError("eval.greedy=False and eval.runs=0: there is nothing to evaluate")
    if e.runs and e.temperature <= 0:
        raise ConfigError(f"eval.runs={e.runs} sampled runs need eval.temperature above 0, got {e.temperature}")


def check_collect(config: ConfigDict) -> None:
    """The rules of episodes and the demonstrations."""
    check_episodes(config)
    ScriptedPolicy(config.collect.modes.to_dict(), reuse=config.collect.reuse, seed=config.seed, first_page=config.collect.first_page)


def check_sft(config: ConfigDict) -> None:
    """Names and sizes of supervised training."""
    c = config.sft
    _known("sft.save_dtype", c.save_dtype, DTYPES)
    _known("sft.normaliser", c.normaliser, SFT_NORMALISERS)
    _divides("sft.rows", c.rows, config)
    weighted = {mode: weight for mode, weight in c.weights.items() if weight != 1.0}
    if weighted and not c.renamed_copies:
        raise ConfigError(f"sft.weights {weighted} are numbers of copies relative to sft.renamed_copies, which is 0; give it, or set them to 1.0")
    for steps, lr in ((c.steps, c.lr), (c.second_steps, c.second_lr)):
        if steps:
            make_optimizer(
                make_schedule(c.schedule, lr, c.warmup, steps), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, clip_norm=c.clip_norm,
            )


def check_splits(config: ConfigDict, root: DataRoot, splits: Iterable[str]) -> None:
    """Raises DataRootError for a split that the root does not have, ConfigError for chains that it cannot give."""
    for split in splits:
        if not root.scenarios(split):
            raise DataRootError(f"split {split!r} of {root.path} is empty")
    chains.source(config, root)


def check_prompts(config: ConfigDict, root: DataRoot, split: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if the first task's prompt leaves no room for a response: every episode would end at once."""
    task_id = next(iter(root.scenarios(split).values()))[0]
    tokens = setup.opening_tokens(config, root.task(task_id), tokenizer)
    context = config.sampler.context
    if tokens + MIN_ROOM > context:
        raise ConfigError(
            f"the prompt of task {task_id} has {tokens} tokens and sampler.context={context}: no room for a response. Raise "
            f"sampler.context (and rl.row_tokens), or choose agent.style='short' or fewer agent.demonstrations"
        )


EARLY_STOPPED = ("zero", "drop")
MIN_ROOM = 16  # tokens; no response that calls an API is shorter


def _known(key: str, value: str, names: Iterable[str]) -> None:
    if value not in names:
        raise ConfigError(f"{key}={value!r} is unknown; choices: {', '.join(names)}")


def _divides(key: str, rows: int, config: ConfigDict) -> None:
    parts = config.mesh.data * config.mesh.fsdp
    if rows % parts:
        raise ConfigError(f"{key}={rows} rows of a micro-batch do not divide by mesh.data * mesh.fsdp = {parts}; use a multiple, e.g. {key}={parts}")

"""What can be known to be wrong with a config before anything is built, evaluated or trained.

`check_*` construct what the run will construct, or look a name up where the run will, so that a wrong name or an
impossible combination raises in the first second and not after an hour.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.agent.early_stop import EarlyStop
from sage_jax.errors import ConfigError, DataRootError
from sage_jax.model.hf import DTYPES
from sage_jax.model.tokenizer import SMALLEST_BPE, Tokenizer
from sage_jax.rl.advantages import ADVANTAGES
from sage_jax.rl.losses import LossConfig, check_sampling
from sage_jax.rl.rewards import REWARDS
from sage_jax.sft.step import NORMALISERS as SFT_NORMALISERS
from sage_jax.skills.usage import DETECTORS
from sage_jax.training import chains, setup
from sage_jax.training.evaluation import LIBRARIES
from sage_jax.training.optimizer import make_optimizer, make_schedule
from sage_jax.world.miniworld.tasks import split_sizes
from sage_jax.world.roots import KINDS, SPLITS, DataRoot, split_levels


def check_train(config: ConfigDict) -> None:
    """Everything that `sage_jax.train` reads, as far as it needs no data root.

    Raises:
      ConfigError: a combination that cannot run or would train something else than asked.
    """
    rl, s, o, a, r = config.rl, config.sampler, config.optim, config.agent, config.run
    check_evaluation(config)
    check_sampling(s.temperature, s.top_k, s.top_p, old_logprobs=rl.old_logprobs)
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
    if not 0 <= rl.negative_weight <= 1:
        raise ConfigError(f"rl.negative_weight={rl.negative_weight} must be in [0, 1]")
    if rl.mini_batches > rl.scenarios_per_step * rl.group:
        raise ConfigError(f"rl.mini_batches={rl.mini_batches} is more than the rl.scenarios_per_step * rl.group = {rl.scenarios_per_step * rl.group} rollouts")
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
    _divides_sequence("rl.row_tokens", rl.row_tokens, config)
    names = ["base", r.start_name, r.name]
    if len(set(names)) != len(names) or any("/" in n or "memory" in n for n in names):
        raise ConfigError(f"rows base, run.start_name={r.start_name!r} and run.name={r.name!r} need three different names without '/' and 'memory'")
    if r.from_scratch:
        check_collect(config)
        check_sft(config)
        if config.sft.start == "random" and config.model.tokenizer == "workdir" and not config.collect.vocab_size:
            raise ConfigError("model.tokenizer='workdir' is trained by collecting: it needs collect.vocab_size")


def check_episodes(config: ConfigDict) -> None:
    """The rules of episodes and their prompts, and the size of the mini world."""
    setup.episode_spec(config, keep_outputs=False)
    w = config.world
    _known("world.kind", w.kind, KINDS)
    if w.kind == "miniworld" and not w.path:
        try:
            split_sizes(w.scenarios)
        except ValueError as error:
            raise ConfigError(f"world.scenarios={w.scenarios}: {error}") from error


def check_evaluation(config: ConfigDict) -> None:
    """What `sage_jax.evaluate` reads. Raises ConfigError for runs that measure nothing, a library or a sampler that cannot be."""
    check_episodes(config)
    e, s = config.eval, config.sampler
    _known("eval.library", e.library, LIBRARIES)
    if (e.reuse or e.library == "reference") and config.world.kind != "miniworld":
        raise ConfigError("eval.reuse and eval.library='reference' need reference functions, and only the mini world has them (world.kind=miniworld)")
    for name in ("slots", "decode_chunk", "max_new_tokens"):
        if s[name] < 1:
            raise ConfigError(f"sampler.{name}={s[name]} must be at least 1")
    _divides("sampler.slots", s.slots, config)
    if not 0 < s.top_p <= 1:
        raise ConfigError(f"sampler.top_p={s.top_p} must be above 0 and at most 1 (off)")
    if s.top_k < 0:
        raise ConfigError(f"sampler.top_k={s.top_k} must not be negative (0: off)")
    if not e.greedy and e.runs < 1:
        raise ConfigError("eval.greedy=False and eval.runs=0: there is nothing to evaluate")
    if e.runs and e.temperature <= 0:
        raise ConfigError(f"eval.runs={e.runs} sampled runs need eval.temperature above 0, got {e.temperature}")


def check_collect(config: ConfigDict) -> None:
    """The rules of episodes and the demonstrations."""
    check_episodes(config)
    c = config.collect
    setup.scripted_policy(config)
    if config.world.kind != "miniworld":
        raise ConfigError("only the mini world has solutions to collect from (world.kind=miniworld)")
    if c.vocab_size and c.vocab_size < SMALLEST_BPE:
        raise ConfigError(f"collect.vocab_size={c.vocab_size} must be 0 (no tokenizer) or at least {SMALLEST_BPE}")
    check_split_names(config, [c.split])


def check_sft(config: ConfigDict) -> None:
    """Names and sizes of supervised training."""
    c = config.sft
    _known("sft.save_dtype", c.save_dtype, DTYPES)
    _known("sft.normaliser", c.normaliser, SFT_NORMALISERS)
    _divides("sft.rows", c.rows, config)
    _divides_sequence("sft.row_tokens", c.row_tokens, config)
    weighted = {mode: weight for mode, weight in c.weights.items() if weight != 1.0}
    if weighted and not c.renamed_copies:
        raise ConfigError(f"sft.weights {weighted} are numbers of copies relative to sft.renamed_copies, which is 0; give it, or set them to 1.0")
    for steps, lr in ((c.steps, c.lr), (c.second_steps, c.second_lr)):
        if steps:
            make_optimizer(
                make_schedule(c.schedule, lr, c.warmup, steps), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay, clip_norm=c.clip_norm,
            )


def check_split_names(config: ConfigDict, splits: Iterable[str]) -> None:
    """As `check_splits`, as far as it can be known without building a mini world, which takes minutes."""
    if config.world.kind != "miniworld" or config.world.path:
        check_splits(setup.data_root(config), splits)
        return
    for split in splits:
        name, _ = split_levels(split)
        if name not in SPLITS and not Path(name).is_file():
            raise DataRootError(f"no split {split!r}: the mini world has {', '.join(SPLITS)}; a file of scenario ids is taken too")


def check_splits(root: DataRoot, splits: Iterable[str]) -> None:
    """Raises DataRootError for a split that the root does not have."""
    for split in splits:
        if not root.scenarios(split):
            raise DataRootError(f"split {split!r} of {root.path} is empty")


def check_chains(config: ConfigDict, root: DataRoot) -> None:
    """Raises ConfigError for chains or batches that the root's training split cannot give."""
    chains.source(config, root)
    rl = config.rl
    there = len(root.scenarios(rl.split))
    if rl.scenarios_per_step > there:
        raise ConfigError(f"rl.scenarios_per_step={rl.scenarios_per_step} is more than the {there} scenarios of split {rl.split!r}: a step takes none twice")


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
        raise ConfigError(f"{key}={rows} rows do not divide by mesh.data * mesh.fsdp = {parts}; use a multiple, e.g. {key}={parts}")


def _divides_sequence(key: str, lengths: Iterable[int], config: ConfigDict) -> None:
    parts = config.mesh.sequence
    if wrong := [n for n in lengths if n % parts]:
        raise ConfigError(f"{key}={tuple(lengths)}: rows of {wrong[0]} tokens do not divide by mesh.sequence = {parts}")

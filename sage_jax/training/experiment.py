"""The main job: (collect, SFT,) evaluate the start, train, evaluate again, one table and one report.

Each phase leaves its result on disk and is skipped when it is there, so that the same command resumes anywhere.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time
from pathlib import Path

from flax import nnx
from ml_collections import ConfigDict

from sage_jax.entry import check_workdir, write_config
from sage_jax.model.hf import save_hf
from sage_jax.model.lora import join
from sage_jax.model.peft import save_peft
from sage_jax.report.curves import curves_png
from sage_jax.report.episodes import read_episodes, write_text
from sage_jax.report.html import write_report
from sage_jax.report.progress import terminal
from sage_jax.report.tables import difference_text, markdown, rich_table, score
from sage_jax.sft.loop import run_sft
from sage_jax.training import checks, setup
from sage_jax.training.arms import Arm, measure, paired_by_kind
from sage_jax.training.collecting import collect
from sage_jax.training.metrics import read_metrics
from sage_jax.training.rl_loop import train
from sage_jax.world.roots import DataRoot

TRAINING_SHOWN = 2000  # training episodes at most in the report's viewer, the last ones; all are in workdir/episodes


def run_experiment(config: ConfigDict, workdir: Path, profile: tuple[int, int] | None = None) -> None:
    """Everything that `python -m sage_jax.train` does. Writes below workdir; prints a table at the end.

    `profile`: first and last step (0-based) of which a JAX profile goes to workdir/profile.
    """
    source, splits = config.model.source, [config.rl.split, *([config.eval.dev_split] if config.eval.every else []), *config.run.splits]
    check_workdir(config, workdir)
    checks.check_train(config)
    checks.check_split_names(config, splits)
    if config.run.from_scratch:
        setup.check_policy(config, source=config.sft.start, tokenizer_folder=workdir / "sft" / "tokenizer")
    else:
        setup.check_policy(config, source=source)
    phases = Phases(workdir)
    with phases("mini world" if config.world.kind == "miniworld" else "data root"):
        root = setup.data_root(config)
    checks.check_splits(root, splits)
    checks.check_chains(config, root)
    if config.run.from_scratch:
        write_config(config, workdir)
        with phases("collect"):
            dataset = collect(config, workdir / "sft")
        with phases("sft"):
            source = str(supervised(config, dataset, workdir / "sft"))
    loaded = setup.load_policy(config, source=source, adapters=True)
    checks.check_prompts(config, root, config.rl.split, loaded.tokenizer)
    print(setup.describe(config, loaded))

    with setup.Session(config, root, workdir if config.eval.keep_outputs else None) as session:
        write_config(config, workdir)
        arms = _arms(config, workdir, root, loaded, session, phases, profile)
    report(config, workdir, root, arms, phases.seconds, session.isolation)


def _arms(config: ConfigDict, workdir: Path, root: DataRoot, loaded: setup.Loaded, session: setup.Session, phases: Phases,
          profile: tuple[int, int] | None) -> list[Arm]:
    """Evaluates, trains, evaluates."""
    arms: list[Arm] = []
    for split in config.run.splits:
        if config.run.base:
            with phases(f"evaluate base on {split}"):
                arms.append(measure(config, workdir, root, setup.untrained(config, loaded), "base", split, session))
        if config.run.start:
            with phases(f"evaluate {config.run.start_name} on {split}"):
                arms.append(measure(config, workdir, root, loaded, config.run.start_name, split, session))
    final = workdir / "policy"
    if not (final / "config.json").exists():
        with phases("train"):
            state = train(config, workdir, root, loaded, session, StepLines(config.rl.steps), profile)
        loaded = _export(config, workdir, loaded, state.params)
    else:
        print(f"train: {final} is there, used again")
        loaded = setup.load_policy(config, source=str(final))
    gc.collect()
    for split in config.run.splits:
        with phases(f"evaluate {config.run.name} on {split}"):
            arms.append(measure(config, workdir, root, loaded, config.run.name, split, session))
    return arms


def _export(config: ConfigDict, workdir: Path, loaded: setup.Loaded, trained: nnx.State) -> setup.Loaded:
    """Writes the trained policy to workdir/policy, adapters merged, and these by themselves to workdir/adapter for peft. Returns what it wrote."""
    final = workdir / "policy"
    _, frozen = setup.trained_part(loaded)
    if frozen is None:
        loaded = dataclasses.replace(loaded, params=trained)
    else:
        loaded = dataclasses.replace(loaded, params=join(trained, frozen))
        save_peft(workdir / "adapter", loaded.cfg, loaded.params, base_name=setup.base_name(config, workdir))
        loaded = setup.without_adapters(loaded)
    save_hf(final, loaded.cfg, loaded.params, loaded.tokenizer, dtype="float32")
    return dataclasses.replace(loaded, identity=setup.folder_identity(final))


def supervised(config: ConfigDict, dataset: Path, workdir: Path) -> Path:
    """SFT on a chat dataset, in one stage or two; returns the folder of the trained policy (made once)."""
    folder = workdir / "policy"
    if (folder / "config.json").exists():
        print(f"sft: {folder} is there, used again")
        return folder
    c = config.sft
    first = workdir / "first" / "policy" if c.second_steps else folder
    if not (first / "config.json").exists():
        loaded = setup.load_policy(config, source=c.start, tokenizer_folder=dataset.parent / "tokenizer", adapters=True)
        params = run_sft(config, loaded, dataset, first.parent)
        save_hf(first, loaded.cfg, params, loaded.tokenizer, dtype=c.save_dtype)
    if c.second_steps:
        config = config.copy_and_resolve_references()
        config.seed += 1  # other names in the renamed copies
        config.sft.update(steps=c.second_steps, lr=c.second_lr, short_steps=0)
        loaded = setup.load_policy(config, source=str(first), adapters=True)
        params = run_sft(config, loaded, dataset, workdir)
        save_hf(folder, loaded.cfg, params, loaded.tokenizer, dtype=c.save_dtype)
    return folder


def report(config: ConfigDict, workdir: Path, root: DataRoot, arms: list[Arm], seconds: dict[str, float], isolation: str) -> None:
    """table.md, curves.png, report.html, and the table in the terminal."""
    order = ["base", config.run.start_name, config.run.name]
    arms = sorted(arms, key=lambda a: (list(config.run.splits).index(a.split) if a.split in config.run.splits else 0, order.index(a.name)))
    rows = [score(runs, label, asked=a.asked, split=a.split) for a in arms for label, runs in a.rows()]
    differences = []
    for split in dict.fromkeys(a.split for a in arms):
        pair = {a.name: a for a in arms if a.split == split}
        if config.run.start_name in pair and config.run.name in pair:
            found = paired_by_kind(pair[config.run.start_name], pair[config.run.name], ("tgc", "sgc", "solved_with_skill"))
            differences += [(f"{split}: {label}", d) for label, d in found]
    text = markdown(rows, differences)
    times = "\n".join(f"- {name}: {s:.0f} s" for name, s in seconds.items())
    write_text(workdir / "table.md", f"{text}\n{isolation}\n\nSeconds of this run:\n{times}\n")
    curves = curves_png(read_metrics(workdir), config.run.name)
    write_text(workdir / "curves.png", curves)
    episodes = {f"{a.name} · {a.split}" + (f" · run {i}" if i else ""): run for a in arms for i, run in zip(a.indices, a.runs)}
    training, held = {}, 0
    for path in sorted((workdir / "episodes" / "train").glob("step_*.jsonl"), reverse=True):
        step = read_episodes(path).episodes
        held += len(step)
        if held > TRAINING_SHOWN:
            break
        training[f"training · {path.stem}"] = step
    episodes |= dict(reversed(training.items()))
    write_report(
        workdir / "report.html", title=f"{config.run.name} on the {root.kind} root", rows=rows, differences=differences, curves=curves,
        note=isolation, episodes=episodes, config=json.dumps(setup.digest(config), indent=1),
    )
    console = terminal()
    console.print(rich_table(rows))
    for label, d in differences:
        console.print(f"{label}: {difference_text(d)}", highlight=False)
    print(f"Report: {workdir}/report.html   curves: {workdir}/curves.png   metrics: {workdir}/metrics.jsonl")


class Phases:
    """Says what is running and how long it took; totals over resumed runs are kept in workdir/seconds.json."""

    def __init__(self, workdir: Path):
        self._path = workdir / "seconds.json"
        self.seconds: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def __call__(self, name: str) -> Phases:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._started = time.monotonic()
        print(f"== {self._name}", flush=True)

    def __exit__(self, *_) -> None:
        took = time.monotonic() - self._started
        self.seconds[self._name] = round(self.seconds.get(self._name, 0.0) + took, 1)
        write_text(self._path, json.dumps(self.seconds, indent=1) + "\n")
        print(f"== {self._name}: {took:.1f} s", flush=True)


class StepLines:
    """One line a step: what a person watching wants to know, with the time left."""

    def __init__(self, steps: int):
        self._steps, self._started, self._first = steps, time.monotonic(), None

    def __call__(self, step: int, m: dict) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = step
            self._started = now - m["time/step_s"]
        left = (now - self._started) / (step + 1 - self._first) * (self._steps - step - 1)
        dev = f"  dev SGC {m['eval_dev/sgc']:.0%}" if "eval_dev/sgc" in m else ""
        print(
            f"step {step + 1:>3}/{self._steps}  reward {m.get('reward/mean', float('nan')):+.3f}  success {m.get('success/mean', float('nan')):4.0%}"
            f"  skill use {m.get('skill/called_share', 0.0):4.0%}  {m['time/tokens_per_s']:5.0f} tokens/s  {m['time/step_s']:5.1f} s"
            f"  {_minutes(left)} left{dev}",
            file=sys.stdout, flush=True,
        )


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

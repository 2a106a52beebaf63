"""Arms of an experiment: one policy evaluated on one split, its episodes kept on disk, so that nothing is measured twice.

Layout: workdir/eval/<arm>/<split>/run<i>.jsonl, and arm.json, which is written last and says that the arm is complete
and of what. Until then begun.json says of what, and part<i>.jsonl holds the scenarios that are finished: a killed
evaluation goes on from there. With `keep_outputs` the engine's own files lie in
workdir/experiments/outputs/<arm>-run<i>_<split>/tasks/ID; the names end as the engine's leaderboard tools want them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.agent.chain import Progress, Rollout
from sage_jax.agent.prompts import rough_tokens
from sage_jax.agent.trajectory import Episode
from sage_jax.errors import ConfigError
from sage_jax.report.episodes import append_episodes, read_episodes, write_episodes, write_text
from sage_jax.report.progress import bar
from sage_jax.report.tables import Difference, paired_difference
from sage_jax.training import setup
from sage_jax.training.evaluation import Run, evaluate
from sage_jax.world.roots import DataRoot, split_levels

KINDS = ("greedy", "sampled")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A measured arm: episodes of each run, and how many tasks each run was to have."""

    name: str
    split: str
    runs: list[list[Episode]]
    asked: int
    indices: tuple[int, ...]  # of the runs: 0 is the greedy one

    @property
    def kinds(self) -> dict[str, list[list[Episode]]]:
        """Runs by kind: a greedy run and a mean over sampled ones are different figures and share no row."""
        return {k: runs for k in KINDS if (runs := [run for i, run in zip(self.indices, self.runs) if (i == 0) == (k == "greedy")])}

    def rows(self) -> list[tuple[str, list[list[Episode]]]]:
        """(label, runs) of each kind; the arm's name alone where there is one kind."""
        kinds = self.kinds
        return [(kind_label(self.name, kind, runs) if len(kinds) > 1 else self.name, runs) for kind, runs in kinds.items()]


def measure(
    config: ConfigDict, workdir: Path, root: DataRoot, loaded: setup.Loaded | None, name: str, split: str, session: setup.Session
) -> Arm:
    """Evaluates a policy (None: the scripted one) as `config.eval` says; what is on disk already is read instead.

    An arm with infrastructure errors is reported but not kept as complete: the same call measures what failed again.

    Raises:
      ConfigError: the folder holds an arm of this name that measured another policy, other tasks or other settings.
    """
    e = config.eval
    label = split_label(split)
    folder = workdir / "eval" / name / label
    groups = list(root.scenarios(split).items())[: e.scenarios or None]
    identity = {
        "policy": loaded.identity if loaded is not None else "scripted",
        "root": root.path.name,  # of a mini world: code version, seed and size
        "tasks": hashlib.sha256(repr(groups).encode()).hexdigest()[:16],
        "greedy": e.greedy, "runs": e.runs, "temperature": e.temperature, "library": e.library, "agent": config.agent.kind, "seed": config.seed,
    }
    for file in (folder / "arm.json", folder / "begun.json"):
        if file.exists():
            _same(identity, json.loads(file.read_text())["identity"], folder)
    if (folder / "arm.json").exists():
        return read_arm(folder)
    write_text(folder / "begun.json", json.dumps({"identity": identity}) + "\n")
    started = time.monotonic()
    indices = ([0] if e.greedy else []) + list(range(1, e.runs + 1))
    sizes = {scenario: len(ids) - (e.library == "reference") for scenario, ids in groups}
    asked = sum(sizes.values())
    done = _finished(folder, indices, sizes)
    engine = setup.sampler(config, loaded) if loaded is not None else None
    try:
        runs = session.run(_run(config, root, loaded, engine, f"{name}/{label}", split, groups, indices, asked, session.pool, folder, done))
    finally:
        if engine is not None:
            engine.close()
    for index, episodes in zip(indices, runs):
        write_episodes(folder / f"run{index}.jsonl", episodes)
    if all(episode.valid for episodes in runs for episode in episodes):
        about = {"arm": name, "split": label, "asked": asked, "runs": indices, "seconds": round(time.monotonic() - started, 1), "identity": identity}
        write_text(folder / "arm.json", json.dumps(about) + "\n")
        for file in folder.glob("part*.jsonl"):
            file.unlink()
    return Arm(name, label, runs, asked, tuple(indices))


def kind_label(name: str, kind: str, runs: Sequence) -> str:
    """E.g. "SAGE, greedy" and "SAGE, sampled (4 runs)"."""
    return f"{name}, {kind}" + (f" ({len(runs)} run{'s' * (len(runs) > 1)})" if kind == "sampled" else "")


def paired_by_kind(first: Arm, second: Arm, metrics: Sequence[str], **options) -> list[tuple[str, Difference]]:
    """(label, second - first) for each kind that both have and each metric; the kind is named where there are two. Options as
    in `paired_difference`."""
    both = [kind for kind in first.kinds if kind in second.kinds]
    return [
        (f"{second.name} - {first.name}" + (f", {kind}" if len(both) > 1 else ""), paired_difference(first.kinds[kind], second.kinds[kind], metric, seed=0, **options))
        for kind in both
        for metric in metrics
    ]


def read_arm(folder: Path) -> Arm:
    """An arm from its folder."""
    about = json.loads((folder / "arm.json").read_text())
    runs = [list(read_episodes(folder / f"run{i}.jsonl").episodes) for i in about["runs"]]
    return Arm(about["arm"], about["split"], runs, about["asked"], tuple(about["runs"]))


def split_label(split: str) -> str:
    """A split's name, or the stem of a file of scenario ids, with its difficulties: what it is called in folders and tables."""
    name, levels = split_levels(split)
    return Path(name).stem + ("@" + ",".join(map(str, levels)) if levels else "")


def _same(now: dict, before: dict, folder: Path) -> None:
    changed = [f"{k}: {before.get(k)!r} -> {now.get(k)!r}" for k in sorted(now.keys() | before.keys()) if now.get(k) != before.get(k)]
    if changed:
        raise ConfigError(f"{folder} holds another measurement ({'; '.join(changed)}). Choose another --workdir, or delete that folder.")


def _finished(folder: Path, indices: Sequence[int], sizes: Mapping[str, int]) -> dict[tuple[int, str], list[Episode]]:
    """(run, scenario) -> episodes of the scenarios that an earlier, broken call finished: as many as `sizes` says.

    What else the files hold was cut off while it was written, and is taken out of them.
    """
    found: dict[tuple[int, str], list[Episode]] = {}
    for index in indices:
        path = folder / f"part{index}.jsonl"
        if not path.exists():
            continue
        groups: dict[str, list[Episode]] = {}
        for episode in read_episodes(path).episodes:
            groups.setdefault(episode.scenario_id, []).append(episode)
        whole = {scenario: episodes for scenario, episodes in groups.items() if len(episodes) == sizes[scenario]}
        if len(whole) < len(groups):
            write_episodes(path, [episode for episodes in whole.values() for episode in episodes])
        found |= {(index, scenario): episodes for scenario, episodes in whole.items()}
    return found


async def _run(config, root, loaded, engine, name, split, groups, indices, asked, pool, folder, done) -> list[list[Episode]]:
    e = config.eval
    facts = None
    if loaded is None:
        scripted = setup.scripted_policy(config)
        facts = setup.scripts(root, [t for _, ids in groups for t in ids])
        policies = {i: scripted for i in indices}
    else:
        policies = {i: setup.jax_policy(config, engine, loaded, temperature=e.temperature if i else 0.0) for i in indices}
    count = rough_tokens if loaded is None else (lambda text: len(loaded.tokenizer.encode(text)))
    given = setup.reference_skills(root, split) if e.library == "reference" else None
    with bar(name, asked * len(indices), sum(map(len, done.values()))) as advance:

        def progress(p: Progress) -> None:
            advance(success=bool(p.episode.s))

        def keep(index: int, rollout: Rollout) -> None:
            if rollout.valid:
                append_episodes(folder / f"part{index}.jsonl", rollout.episodes)

        return await evaluate(
            root, split, [Run(i, policies[i]) for i in indices], pool, setup.episode_spec(config, keep_outputs=e.keep_outputs),
            seed=config.seed, name=name, library=e.library, given=given, scenarios=e.scenarios, facts=facts, count=count,
            done=done, on_progress=progress, on_scenario=keep,
        )

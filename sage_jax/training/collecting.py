"""Verified demonstrations: reference solutions played through the episode code, judged, and written as a chat dataset.

In: roots with references, a pool. Out: `dataset.jsonl` (one conversation a line), with `vocab_size` a tokenizer trained on
it, and `collect.json` (what was asked, kept and refused, by mode). Only episodes that the judge passes are kept; a refused one is counted, never repaired by hand.
"""

from __future__ import annotations

import collections
import json
import time
from pathlib import Path

from ml_collections import ConfigDict

from sage_jax.agent.chain import Progress, run_chains
from sage_jax.agent.trajectory import Episode
from sage_jax.errors import SageError
from sage_jax.report.episodes import read_episodes, write_episodes, write_text
from sage_jax.report.progress import bar
from sage_jax.sft.dataset import write_dataset
from sage_jax.training import setup
from sage_jax.training.data import draw_chain
from sage_jax.training.vocabulary import private_text, train_tokenizer
from sage_jax.world.pool import WorldPool
from sage_jax.world.roots import DataRoot


def collect(config: ConfigDict, workdir: Path) -> Path:
    """Writes the dataset of `config.collect` and returns its path. An existing, complete dataset is used again."""
    path, summary = workdir / "dataset.jsonl", workdir / "collect.json"
    if summary.exists():  # written last
        print(f"collect: {path} is complete, used again")
        return path
    c = config.collect
    started = time.monotonic()
    # A world that is only collected in needs no build-time checks: what does not pass its judge is not kept.
    roots = [setup.data_root(config, seed=seed, check=seed == config.world.seed) for seed in c.seeds or (config.world.seed,)]
    records, tally, asked = [], collections.Counter(), 0
    for number, root in enumerate(roots):
        part = workdir / f"episodes_{number}.jsonl"  # a root is played once, also over a stop
        if part.exists():
            print(f"collect: {part} is complete, used again")
            episodes = read_episodes(part).episodes
        else:
            print(f"collect: root {number + 1} of {len(roots)}, {root.path}")
            with setup.Session(config, root, None) as session:
                episodes = session.run(_collect(config, root, number, session.pool))
            write_episodes(part, episodes)
        asked += len(episodes)
        for e in episodes:
            mode = e.labels["mode"] if e.labels else "none"
            tally[f"asked/{mode}"] += 1
            if e.s:
                tally[f"kept/{mode}"] += 1
                records.append(record(e, private_text(root, e.task_id), train_failed_turns=c.train_failed_turns))
            else:
                tally[f"refused/{mode}/{e.end}"] += 1
    if not records:
        raise SageError("collect: no episode passed the judge, so there is nothing to learn from. The counts: " + json.dumps(tally))
    write_dataset(path, records)
    if c.vocab_size:
        train_tokenizer(records, [r["meta"]["names"] for r in records], c.vocab_size).save(workdir / "tokenizer")
    text = {"episodes": asked, "kept": len(records), "seconds": round(time.monotonic() - started, 1), "counts": dict(sorted(tally.items()))}
    write_text(summary, json.dumps(text, indent=1) + "\n")
    print(f"collect: {len(records)} of {asked} episodes passed the judge in {text['seconds']} s -> {path}")
    return path


def record(e: Episode, names: list[str], *, train_failed_turns: bool) -> dict:
    """One episode as a conversation; a response whose step failed has `train` false unless asked otherwise.

    `names` are the strings that another task of the family would have others for; see `sft.rename`.
    """
    messages, turn = [], 0
    opening = len(e.messages) - 2 * len(e.turns) + 1 if e.turns else len(e.messages)
    for i, m in enumerate(e.messages):
        if m["role"] == "assistant" and i >= opening:
            messages.append({**m, "train": train_failed_turns or not e.turns[turn].failed})
            turn += 1
        else:
            messages.append({**m, **({"train": False} if m["role"] == "assistant" else {})})
    meta = {
        "task_id": e.task_id, "scenario_id": e.scenario_id, "rollout": e.rollout, "position": e.position,
        "mode": e.labels["mode"], "turns": len(e.turns), "difficulty": e.difficulty, "names": names,
        "instruction": e.instruction,
    }
    return {"messages": messages, "meta": meta}


async def _collect(config: ConfigDict, root: DataRoot, number: int, pool: WorldPool) -> list[Episode]:
    """All passes over one root; `number` keeps the rollouts of several roots apart."""
    c = config.collect
    groups = root.scenarios(c.split)
    plain = dict(list(groups.items())[: round(c.plain_share * len(groups))])
    facts = setup.scripts(root, [t for ids in groups.values() for t in ids])
    modes = c.modes.to_dict()
    inline = {m: w for m, w in modes.items() if m.endswith("inline")}
    passes = [("skill", modes, groups)] * c.passes + [("plain", inline, plain)]
    episodes: list[Episode] = []
    with bar("collect", sum(len(ids) for _, _, chosen in passes for ids in chosen.values())) as advance:
        for index, (kind, weights, chosen) in enumerate(passes):
            policy = setup.scripted_policy(config, weights)
            spec = setup.episode_spec(config, keep_outputs=False, kind=kind)
            chains = [
                [root.task(t) for t in draw_chain(config.seed, index, scenario, ids, len(ids))] for scenario, ids in chosen.items()
            ]

            def progress(p: Progress) -> None:
                advance(passed=bool(p.episode.s))

            rollouts = await run_chains(
                chains, 1, policy, pool, spec, seed=config.seed, path=(number, index), name=f"collect/root{number}/pass{index}/{kind}", facts=facts,
                on_progress=progress,
            )
            episodes += [e for r in rollouts for e in r.episodes]
    return episodes

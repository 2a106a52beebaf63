"""Which tasks form the chain of a step: of one scenario, or the nearest train tasks by their instructions.

A chain is a function of (seed, step, scenario): the same for the rollouts of a group and for a step that is done again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

from ml_collections import ConfigDict

from sage_jax.errors import ConfigError
from sage_jax.training.data import draw_chain
from sage_jax.world.roots import DataRoot
from sage_jax.world.types import Task

SOURCES = ("scenario", "similarity")


def source(config: ConfigDict, root: DataRoot) -> Callable[[int, str], list[Task]]:
    """(step, scenario id) -> the tasks of its chain, in order.

    "scenario": `length` distinct tasks of the scenario, without replacement, in random order. "similarity": one random task of
    the scenario, then its nearest tasks of the split (any scenario) by Jaccard overlap of word bigrams of the instructions.

    Raises:
      ConfigError: an unknown source, or a length above what there is.
    """
    c, split = config.chain, config.rl.split
    groups = root.scenarios(split)
    if c.source not in SOURCES:
        raise ConfigError(f"chain.source {c.source!r} is unknown; valid: {', '.join(SOURCES)}")
    if c.length < 1:
        raise ConfigError(f"chain.length={c.length} must be at least 1")
    if c.source == "scenario":
        small = {s: len(ids) for s, ids in groups.items() if len(ids) < c.length}
        if small:
            name, size = next(iter(small.items()))
            raise ConfigError(f"chain.length={c.length} is more than the {size} tasks of scenario {name}")
        return lambda step, scenario: [root.task(t) for t in draw_chain(config.seed, step, scenario, groups[scenario], c.length)]

    tasks = {t: root.task(t) for ids in groups.values() for t in ids}
    if len(tasks) < c.length:
        raise ConfigError(f"chain.length={c.length} is more than the {len(tasks)} tasks of split {split}")
    bigrams = {t: word_bigrams(task.instruction) for t, task in tasks.items()}

    def nearest(step: int, scenario: str) -> list[Task]:
        (first,) = draw_chain(config.seed, step, scenario, groups[scenario], 1)
        ranked = sorted((t for t in tasks if t != first), key=lambda t: (-jaccard(bigrams[first], bigrams[t]), t))
        return [tasks[t] for t in (first, *ranked[: c.length - 1])]

    return nearest


def word_bigrams(text: str) -> frozenset[tuple[str, str]]:
    """Pairs of neighbouring lower-case words."""
    words = re.findall(r"\w+", text.lower())
    return frozenset(itertools.pairwise(words))


def jaccard(a: frozenset, b: frozenset) -> float:
    """Size of the intersection over size of the union; 0 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 0.0

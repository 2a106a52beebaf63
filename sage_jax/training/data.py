"""Which scenarios a step trains on, and which tasks of a scenario form its chain. Host-side and deterministic."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import grain
import numpy as np

from sage_jax.errors import ConfigError


def scenario_iterator(scenario_ids: Sequence[str], batch: int, seed: int) -> grain.DatasetIterator:
    """Endless lists of `batch` scenarios in an order reshuffled each epoch; each at most once a list.

    An epoch's rest that does not fill a batch is left to the next epochs, which shuffle anew. Nothing is prefetched, so
    `get_state` says what has been handed out and no more; `set_state` continues exactly there.

    Returns:
      an iterator over lists of str, with `get_state`, `set_state`; save it with `grain.checkpoint.CheckpointSave`.

    Raises:
      ConfigError: for a batch larger than the number of scenarios, or ids that are not distinct.
    """
    ids = list(scenario_ids)
    if len(set(ids)) != len(ids):
        raise ConfigError("the scenario ids of a data pipeline must be distinct")
    return shuffled_batches(ids, batch, seed)


def shuffled_batches(items: Sequence, batch: int, seed: int) -> grain.DatasetIterator:
    """As `scenario_iterator`, for any items (by their place); lists of `batch` items."""
    if not 1 <= batch <= len(items):
        raise ConfigError(f"a step cannot take {batch} of {len(items)} items without taking one twice")
    dataset = grain.MapDataset.source(items).seed(seed).shuffle().batch(batch, drop_remainder=True, batch_fn=list).repeat()
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def draw_chain(seed: int, step: int, scenario_id: str, task_ids: Sequence[str], length: int) -> list[str]:
    """`length` distinct tasks of a scenario in random order, a function of (seed, step, scenario) alone.

    The order in which `task_ids` is given does not matter. The draw rests on numpy's `SeedSequence`, whose words are the same in
    all numpy versions.

    Raises:
      ConfigError: for a length below 1 or above the number of tasks.
    """
    tasks = sorted(task_ids)
    if len(set(tasks)) != len(tasks):
        raise ConfigError(f"scenario {scenario_id} lists a task twice: {tasks}")
    if not 1 <= length <= len(tasks):
        raise ConfigError(f"chain length {length} is not possible: scenario {scenario_id} has {len(tasks)} tasks")
    digest = int.from_bytes(hashlib.sha256(scenario_id.encode()).digest()[:16], "big")
    words = np.random.SeedSequence([seed, step, digest]).generate_state(len(tasks), np.uint64)
    return [tasks[i] for i in np.argsort(words, kind="stable")[:length]]

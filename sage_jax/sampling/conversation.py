"""The engine's records of a conversation and of its open request, and their form for the device."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import numpy as np

from sage_jax.sampling.kernels import Rows
from sage_jax.sampling.request import MAX_STOP_IDS, Result, Sampling


@dataclasses.dataclass
class Conversation:
    uid: str
    slot: int | None = None
    length: int = 0  # keys in the cache
    tail: list[int] = dataclasses.field(default_factory=list)  # known ids whose keys are not in the cache
    job: Job | None = None
    last: Job | None = None  # the one answered last


@dataclasses.dataclass
class Job:
    ids: list[int]
    sampling: Sampling
    key: np.ndarray
    future: concurrent.futures.Future
    submitted: float
    before: tuple[int, list[int]] = (0, [])  # the conversation's length and tail, restored if the request is cancelled
    prompt: int = 0
    cached: int = 0
    limit: int = 0
    extended: bool = False
    state: int = 0
    out: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)  # float32 [n, 2]
    versions: list[int] = dataclasses.field(default_factory=list)

    def result(self, finish: str) -> Result:
        logprobs = np.concatenate(self.logprobs)
        return Result(
            ids=tuple(self.out), logprobs=logprobs[:, 0], full_logprobs=logprobs[:, 1],
            versions=np.asarray(self.versions, np.int32), finish=finish, prompt=self.prompt, cached=self.cached,
        )  # fmt: skip


def prompt_chunks(length: int, buckets: tuple[int, ...]) -> list[tuple[int, int]]:
    """(ids, bucket) of each chunk of a prompt; buckets ascending. A function of the length alone.

    A chunk takes the next larger bucket unless more than a fifth of it would be padding; then it fills a smaller one.
    """
    chunks = []
    while length:
        above = next((b for b in buckets if b >= length), None)
        below = max((b for b in buckets if b <= length), default=None)
        bucket = above if above is not None and (below is None or 5 * length >= 4 * above) else below
        chunks.append((min(length, bucket), bucket))
        length -= chunks[-1][0]
    return chunks


def device_rows(conversations: list[Conversation], slots: int, idle_state: int) -> Rows:
    """The rows of all slots; those without one of the conversations are inactive and stay in `idle_state`."""
    rows = Rows(
        token=np.zeros(slots, np.int32), position=np.zeros(slots, np.int32), active=np.zeros(slots, bool), index=np.zeros(slots, np.int32),
        limit=np.zeros(slots, np.int32), state=np.full(slots, idle_state, np.int32), stop_ids=np.full((slots, MAX_STOP_IDS), -1, np.int32),
        key=np.zeros((slots, 2), np.uint32), temperature=np.zeros(slots, np.float32), top_k=np.zeros(slots, np.int32), top_p=np.ones(slots, np.float32),
    )  # fmt: skip
    for c in conversations:
        i, job, s = c.slot, c.job, c.job.sampling
        rows.token[i], rows.position[i], rows.active[i] = c.tail[0], c.length, True
        rows.index[i], rows.limit[i], rows.state[i] = len(job.out), job.limit, job.state
        rows.stop_ids[i, : len(s.stop_ids)] = s.stop_ids
        rows.key[i], rows.temperature[i], rows.top_k[i], rows.top_p[i] = job.key, s.temperature, s.top_k, s.top_p
    return rows

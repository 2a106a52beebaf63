"""What is asked of the sampler and what it gives back. Plain records; refused requests raise `SamplingError` here."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sage_jax.errors import SamplingError

MAX_STOP_IDS = 4  # width of the per-row array of stop ids


class NoiseKey(Protocol):
    """Names a request's noise by any integers."""

    seed: int
    path: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of one request.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off, 0 leaves the likeliest id. max_new_tokens: at least 1.
    stop_ids: sampling ends with (and includes) any of them. stop_at_accept: it also ends with the token that brings the
    engine's automaton to its accepting state.
    """

    temperature: float
    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_at_accept: bool = False

    def check(self) -> None:
        """Raises SamplingError that names the value and the rule."""
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise SamplingError(f"temperature={self.temperature} must be finite and at least 0")
        if not (0 <= self.top_p <= 1):
            raise SamplingError(f"top_p={self.top_p} must be between 0 and 1")
        if not (0 <= self.top_k < 2**31):
            raise SamplingError(f"top_k={self.top_k} must be at least 0")
        if self.max_new_tokens < 1:
            raise SamplingError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise SamplingError(f"{len(self.stop_ids)} stop ids, at most {MAX_STOP_IDS} are supported")


@dataclasses.dataclass(frozen=True)
class Result:
    """What was sampled for one request; n tokens, at least 1.

    finish: "stop_id", "accept" (the automaton) or "length" (max_new_tokens, or the context is full).
    logprobs: over the sampled support; full_logprobs: over the whole unpadded vocabulary; both at the sampling temperature.
    """

    ids: tuple[int, ...]
    logprobs: np.ndarray  # float32 [n]
    full_logprobs: np.ndarray  # float32 [n]
    versions: np.ndarray  # int32 [n], version of the weights that sampled each token
    finish: str
    prompt: int  # ids the first token was conditioned on
    cached: int  # of these, ids whose keys were already there


def key_data(seed: int, path: Sequence[int]) -> np.ndarray:
    """Raw threefry key uint32 [2] of a request, a hash of (seed, path): any integers, no device involved."""
    digest = hashlib.blake2b(repr((int(seed), *map(int, path))).encode(), digest_size=8).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)


def checked_ids(ids: Sequence[int], vocab: int) -> list[int]:
    """The ids as ints; raises SamplingError for one outside [0, vocab) or one that is no integer."""
    try:
        ids = [operator.index(i) for i in ids]
    except TypeError as error:
        raise SamplingError(f"prompt ids must be integers: {error}") from error
    for position, i in enumerate(ids):
        if not 0 <= i < vocab:
            raise SamplingError(f"id {i} at position {position} of the request is outside the vocabulary of {vocab}")
    return ids

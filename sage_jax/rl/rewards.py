"""Rewards of a rollout: pure functions over a small record of its chain. Owns no judging and no advantages.

Symbols: K tasks in the chain, k = 1..K a position, r_k in [0, 1] the outcome, s_k in {0, 1} full success, u(j, i) = 1
if episode j used a skill that episode i of the same rollout put in the library (i < j). Arrays are 0-based.
The room never imports a world: an episode is read by its fields alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sage_jax.errors import ConfigError
from sage_jax.skills.usage import DETECTORS, matrix

if TYPE_CHECKING:
    from sage_jax.agent.trajectory import Episode


@dataclasses.dataclass(frozen=True)
class ChainRecord:
    """What the rewards need of one rollout. Every field runs over the positions of the chain, in order."""

    r: tuple[float, ...]  # outcome reward, in [0, 1]
    s: tuple[int, ...]  # 1: completed and every test passed
    no_code: tuple[bool, ...]  # the episode ended as no_code
    used: np.ndarray  # bool [K, K]; used[j, i] = u(j, i), strictly lower triangular
    valid: bool = True  # False: no sample at any position

    def __post_init__(self):
        k = len(self.r)
        if not len(self.s) == len(self.no_code) == k or self.used.shape != (k, k):
            raise ValueError(
                f"a chain record over {k} positions has s {len(self.s)}, no_code {len(self.no_code)}, "
                f"used {self.used.shape}"
            )
        if np.triu(self.used).any():
            raise ValueError("u(j, i) is defined for i < j only: a skill cannot be used before it was written")

    def __len__(self) -> int:
        return len(self.r)

    @property
    def success(self) -> np.ndarray:
        """s as float64 [K]; 0 where the episode ended as no_code, whatever the judge says."""
        return np.where(self.no_code, 0.0, np.asarray(self.s, np.float64))


def usage(episodes: Sequence[Episode], detector: str = "called") -> np.ndarray:
    """u(j, i) of one rollout's episodes in the order of their positions; the detectors are those of `skills.usage`.

    A skill belongs to the episode that put its present version in the library: the same name again is a revision,
    and a later use pays the reviser and not the parent; the same text again changes nothing. A same-named function that
    j defined itself is another object and does not count.

    Args:
      episodes: positions 1..K of one rollout; fewer if it was cut.
      detector: "called" or "lexical".

    Returns:
      bool [K, K], strictly lower triangular.

    Raises:
      ConfigError: for an unknown detector.
      ValueError: episodes out of order.
    """
    if detector not in DETECTORS:
        raise ConfigError(f"unknown detector {detector!r}; choices: {', '.join(sorted(DETECTORS))}")
    if [e.position for e in episodes] != sorted(e.position for e in episodes):
        raise ValueError(f"episodes must be in the order of their positions, got {[e.position for e in episodes]}")
    return np.asarray(matrix(episodes, DETECTORS[detector](episodes)), bool).reshape(len(episodes), len(episodes))


def chain_record(episodes: Sequence[Episode], detector: str = "called") -> ChainRecord:
    """The record of one rollout's episodes, positions 1..K in order; it is valid only if every one of them is.

    Raises:
      ConfigError: for an unknown detector.
    """
    return ChainRecord(
        r=tuple(float(e.r) for e in episodes),
        s=tuple(int(e.s) for e in episodes),
        no_code=tuple(str(e.end) == "no_code" for e in episodes),
        used=usage(episodes, detector),
        valid=bool(episodes) and all(e.valid for e in episodes),
    )


def outcome(record: ChainRecord) -> np.ndarray:
    """R_k = r_k. float64 [K]. Source: the outcome reward of GRPO and LOOP on AppWorld."""
    return np.asarray(record.r, np.float64)


def skill_integrated(record: ChainRecord) -> np.ndarray:
    """R_k = r_k + s_k max_{i>k}(s_i u(i,k)) + s_k max_{i<k} u(k,i). float64 [K].

    The first task has no last term and the last one no middle term. For K = 2 this is SAGE's reward:
    R_1 = r_1 + s_1 s_2 u(2,1) and R_2 = r_2 + s_2 u(2,1). Larger K is our extension of the same idea: writing pays once
    if any later success used it, using pays once if anything earlier was used.
    """
    s, u = record.success, record.used.astype(np.float64)
    paid_writing = s * (u * s[:, None]).max(axis=0, initial=0.0)
    paid_use = s * u.max(axis=1, initial=0.0)
    return outcome(record) + paid_writing + paid_use


def chain(record: ChainRecord) -> np.ndarray:
    """R_k = r_k + prod_i s_i at every position. float64 [K]. Our reading of a chain reward; no published form was found."""
    return outcome(record) + np.prod(record.success)


REWARDS: dict[str, Callable[[ChainRecord], np.ndarray]] = {
    "skill_integrated": skill_integrated,
    "outcome": outcome,
    "chain": chain,
}


def rewards(record: ChainRecord, kind: str = "skill_integrated", no_code_reward: float = -1.0) -> np.ndarray:
    """R of every position, float64 [K]: the formula named `kind`, and `no_code_reward` where the end was no_code.

    An invalid rollout is no sample: its rewards are NaN, so that using one is seen.

    Raises:
      ConfigError: for an unknown kind.
    """
    if kind not in REWARDS:
        raise ConfigError(f"unknown reward {kind!r}; choices: {', '.join(REWARDS)}")
    if not record.valid:
        return np.full(len(record), np.nan)
    return np.where(record.no_code, no_code_reward, REWARDS[kind](record))

"""Rewards of a rollout: pure functions over a small record of its chain. Owns no judging and no advantages.

Symbols: K tasks in the chain, k = 1..K a position, r_k in [0, 1] the outcome, s_k in {0, 1} full success, u(j, i) = 1
if episode j used a skill that episode i of the same rollout put in the library (i < j). Arrays are 0-based.
The room never imports a world: an episode is read by its fields alone.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sage_jax.errors import ConfigError

if TYPE_CHECKING:
    from sage_jax.agent.trajectory import Episode

DETECTORS = ("called", "lexical")


@dataclasses.dataclass(frozen=True)
class ChainRecord:
    """What the rewards need of one rollout. Every field runs over the positions of the chain, in order."""

    r: tuple[float, ...]  # outcome reward, in [0, 1]
    s: tuple[int, ...]  # 1: completed and every test passed
    no_code: tuple[bool, ...]  # the episode ended as no_code
    used: np.ndarray  # bool [K, K]; used[j, i] = u(j, i), strictly lower triangular
    valid: tuple[bool, ...]  # False: no sample at this position; after an infrastructure error at none of them

    def __post_init__(self):
        k = len(self.r)
        if not len(self.s) == len(self.no_code) == len(self.valid) == k or self.used.shape != (k, k):
            raise ValueError(
                f"a chain record over {k} positions has s {len(self.s)}, no_code {len(self.no_code)}, "
                f"valid {len(self.valid)}, used {self.used.shape}"
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
    """u(j, i) of one rollout's episodes in the order of their positions.

    `called`: a code object that installation created for a skill of i was entered from a step of j and returned (the
    worker's flag; a same-named function that j defined is another object and is not in it). `lexical` (the
    reference's rule): in some executed step of j the skill's name occurs as a substring and `def name` does not.
    A skill belongs to the episode that put its present version in the library: the same name again is a revision,
    and a later use pays the reviser and not the parent; the same text again changes nothing.

    Args:
      episodes: positions 1..K of one rollout; fewer if it was cut.
      detector: "called" or "lexical".

    Returns:
      bool [K, K], strictly lower triangular.

    Raises:
      ConfigError: for an unknown detector.
    """
    if detector not in DETECTORS:
        raise ConfigError(f"unknown detector {detector!r}; choices: {', '.join(DETECTORS)}")
    used = np.zeros((len(episodes), len(episodes)), bool)
    current: dict[str, tuple[str, int]] = {}  # name -> (id of its present version, position that owns it)
    owner: dict[str, int] = {}  # id -> position
    for j, episode in enumerate(episodes):
        if detector == "called":
            owners = {owner[c] for c in episode.called if c in owner}
        else:
            steps = [t.code for t in episode.turns if t.code is not None]
            owners = {i for name, (_, i) in current.items() if _occurs(name, steps)}
        for i in owners:
            used[j, i] = True
        for skill in episode.defined:
            if current.get(skill.name, ("", -1))[0] != skill.id:
                current[skill.name] = (skill.id, j)
                owner[skill.id] = j
    return used


def _occurs(name: str, steps: Sequence[str]) -> bool:
    return any(name in code and f"def {name}" not in code for code in steps)


def load_score(spec: str) -> Callable[[Episode], float]:
    """The user's function `module:function`: Episode -> outcome reward. It replaces r_k and leaves s_k to the judge.

    Raises:
      ConfigError: if it is not written like that, or cannot be imported.
    """
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"a score is given as 'module:function', got {spec!r}")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load the score {spec!r}: {error}") from error
    if not callable(function):
        raise ConfigError(f"the score {spec!r} is a {type(function).__name__}, not a function of an episode")
    return function


def chain_record(
    episodes: Sequence[Episode],
    detector: str = "called",
    score: Callable[[Episode], float] | None = None,
    early_stopped_samples: bool = True,
) -> ChainRecord:
    """The record of one rollout.

    Args:
      episodes: positions 1..K in order.
      detector: see `usage`.
      score: replaces the judge's share of passed tests (see `load_score`); not asked for episodes that are no samples.
      early_stopped_samples: False makes an early-stopped episode no sample (LOOP) instead of one with r = 0.

    Raises:
      ConfigError: for an unknown detector, or a score that is no finite number.
    """
    whole = all(e.valid for e in episodes)
    valid = tuple(whole and (early_stopped_samples or str(e.end) != "early_stopped") for e in episodes)
    r = [float(e.r if score is None or not ok else score(e)) for e, ok in zip(episodes, valid)]
    if not np.isfinite(r).all():
        raise ConfigError(f"the score {score} gave {r}: it must give finite numbers")
    return ChainRecord(
        r=tuple(r),
        s=tuple(int(e.s) for e in episodes),
        no_code=tuple(str(e.end) == "no_code" for e in episodes),
        used=usage(episodes, detector),
        valid=valid,
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
    "skill": skill_integrated,
    "outcome": outcome,
    "chain": chain,
}


def rewards(record: ChainRecord, kind: str = "skill", no_code_reward: float = -1.0) -> np.ndarray:
    """R of every position, float64 [K]: the formula named `kind`, and `no_code_reward` where the end was no_code.

    Where the episode is no sample the reward is NaN, so that using it is seen.

    Raises:
      ConfigError: for an unknown kind.
    """
    if kind not in REWARDS:
        raise ConfigError(f"unknown reward {kind!r}; choices: {', '.join(REWARDS)}")
    values = np.where(record.no_code, no_code_reward, REWARDS[kind](record))
    return np.where(record.valid, values, np.nan)

"""Group advantages. A group is an explicit id (a chain and a position), never a stride in the batch.

With n valid rollouts in a group and m the mean of their rewards:
  mean  A = R - m                     (SAGE; the reference's flag for it is `loop`)
  loo   A = (R - m) n / (n - 1)       (leave-one-out, LOOP)
  std   A = (R - m) / (std + 1e-6)    (GRPO; std with ddof 1)
n < 2 gives 0. A group whose rewards are equal in float32 gives exactly 0, whatever the constant.

A weight w in [0, 1] of the negative ones (A < 0 -> w A) decides how much is learned from failures: 1 is all of the above; 0 learns from
what was better than its group only. Pushing down the tokens of failures, most of them right, is what raises the entropy of small
policies (W-REINFORCE weighs the positive side instead; Zhu et al. 2025, arXiv 2506.01347).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from sage_jax.errors import ConfigError

ADVANTAGES = ("mean", "loo", "std")
STD_EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], valid: Sequence[bool] | None = None, kind: str = "mean"
) -> np.ndarray:
    """Advantage of each row within its group.

    Args:
      rewards: float [N]; what stands in invalid rows is never read.
      groups: N hashable ids.
      valid: bool [N]; invalid rows are in no mean and get 0. Default: all valid.
      kind: one of ADVANTAGES.

    Returns:
      float32 [N].

    Raises:
      ConfigError: for an unknown kind.
      ValueError: for lengths that differ or a non-finite reward in a valid row.
    """
    if kind not in ADVANTAGES:
        raise ConfigError(f"unknown advantage {kind!r}; choices: {', '.join(ADVANTAGES)}")
    values = np.asarray(rewards, np.float32)
    ok = np.ones(len(values), bool) if valid is None else np.asarray(valid, bool)
    if not len(values) == len(groups) == len(ok):
        raise ValueError(f"{len(values)} rewards, {len(groups)} group ids and {len(ok)} valid flags")
    if not np.isfinite(values[ok]).all():
        raise ValueError(f"rewards of valid rows must be finite, got {values[ok]}")
    members: dict[Hashable, list[int]] = {}
    for row in np.flatnonzero(ok):
        members.setdefault(groups[row], []).append(int(row))
    result = np.zeros(len(values), np.float32)
    for rows in members.values():
        result[rows] = _centred(values[rows], kind)
    return result


def _centred(values: np.ndarray, kind: str) -> np.ndarray:
    n = len(values)
    if n < 2 or (values == values[0]).all():  # a mean of equal float32 numbers need not be that number
        return np.zeros(n, np.float32)
    x = np.sort(values.astype(np.float64))  # one order of summation, whatever the order of the rows
    centred = values - x.mean()
    if kind == "loo":
        centred = centred * (n / (n - 1))
    elif kind == "std":
        centred = centred / (x.std(ddof=1) + STD_EPSILON)
    return centred.astype(np.float32)


def chain_advantages(
    rewards: Sequence[np.ndarray], chains: Sequence[Hashable], valid: Sequence[bool], kind: str = "mean", negative_weight: float = 1.0
) -> list[np.ndarray]:
    """Advantages per chain position.

    Args:
      rewards: N arrays float [K_n], one a rollout.
      chains: N ids; rollouts of one id form the groups, one group a position.
      valid: bool [N], whole rollouts.
      negative_weight: factor of the negative advantages, in [0, 1].

    Returns:
      N arrays float32 [K_n].
    """
    places = [(n, k) for n, row in enumerate(rewards) for k in range(len(row))]
    flat = group_advantages(
        [rewards[n][k] for n, k in places], [(chains[n], k) for n, k in places], [valid[n] for n, _ in places], kind
    )
    result = [np.zeros(len(row), np.float32) for row in rewards]
    for (n, k), value in zip(places, flat, strict=True):
        result[n][k] = value if value >= 0 else np.float32(negative_weight) * value
    return result


def signal_share(advantages: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Share of groups in which some advantage is not 0; 0.0 if there is no group."""
    signal: dict[Hashable, bool] = {}
    for value, group in zip(advantages, groups, strict=True):
        signal[group] = signal.get(group, False) or value != 0
    return sum(signal.values()) / len(signal) if signal else 0.0

"""Metrics of one step's rollouts: what was tried, what was rewarded, what skills did. Pure functions over records.

Names carry units where they have one. Every metric is over valid rollouts unless its name says otherwise; a metric that
has nothing to average over is left out rather than written as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sage_jax.agent.chain import Rollout
from sage_jax.agent.trajectory import End
from sage_jax.rl.advantages import signal_share
from sage_jax.rl.rewards import ChainRecord


def rollout_metrics(rollouts: Sequence[Rollout], samples: Sequence[bool], records: Sequence[ChainRecord], rewards: Sequence[np.ndarray], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """Args run in parallel over the step's rollouts; `samples` says which of them are samples (records of others are not read)."""
    valid = [i for i, ok in enumerate(samples) if ok]
    episodes = [e for i in valid for e in rollouts[i].episodes]
    m: dict[str, float] = {
        "rollouts/asked": len(rollouts),
        "rollouts/valid": len(valid),
        "rollouts/infrastructure_errors": sum(e.end is End.INFRASTRUCTURE_ERROR for r in rollouts for e in r.episodes),
    }
    if not valid:
        return m
    m["reward/mean"] = float(np.mean([x for i in valid for x in rewards[i]]))
    m["reward/outcome_mean"] = float(np.mean([e.r for e in episodes]))
    m["success/mean"] = float(np.mean([e.s for e in episodes]))
    positions = max(len(rollouts[i].episodes) for i in valid)
    for k in range(positions):
        here = [rollouts[i].episodes[k] for i in valid if len(rollouts[i].episodes) > k]
        m[f"success/position_{k + 1}"] = float(np.mean([e.s for e in here]))
        m[f"reward/position_{k + 1}"] = float(np.mean([rewards[i][k] for i in valid if len(rewards[i]) > k]))
    later = [e for e in episodes if e.position > 1]
    m["skill/defined_share"] = float(np.mean([bool(e.kept) for e in episodes]))
    if later:
        m["skill/offered_share"] = float(np.mean([bool(e.offered) for e in later]))
        m["skill/called_share"] = float(np.mean([bool(e.called) for e in later]))
        paid = [bool(records[i].used[k].any() and records[i].s[k]) for i in valid for k in range(1, len(records[i].s))]
        m["skill/paid_share"] = float(np.mean(paid))
        offered = [e for e in later if e.offered]
        if offered:
            m["skill/called_when_offered_share"] = float(np.mean([bool(e.called) for e in offered]))
    ends = Counter(e.end for e in episodes)
    for end in End:
        if end is not End.INFRASTRUCTURE_ERROR:
            m[f"end/{end}_share"] = ends[end] / len(episodes)
    m["turns/mean"] = float(np.mean([len(e.turns) for e in episodes]))
    m["turns/failed_share"] = float(np.mean([t.failed for e in episodes for t in e.turns] or [0.0]))
    m["tokens/generated_mean"] = float(np.mean([e.generated for e in episodes]))
    lengths = [len(e.tokens.ids) for e in episodes if e.tokens is not None]
    m["tokens/episode_max"] = max(lengths, default=0)
    places = [(i, k) for i in valid for k in range(len(advantages[i]))]
    m["groups/signal_share"] = signal_share([advantages[i][k] for i, k in places], [(rollouts[i].chain, k) for i, k in places])
    return m

"""Early stopping of the episodes of one position: counted in turns, never in seconds, and so repeatable.

Let len(e) be the number of turns that episode e would take. The last turn T* is the smallest T >= `turn` such that at
most `share` of the episodes are longer than T; episodes longer than T* end there. While episodes run, only a bound of
T* is known: an episode that has passed the bound stops at once, one that has ended after turn `turn` waits until the rest has
ended or passed it, and is cut to T* then. Arrival order changes how much is computed in vain, never the result.
"""

from __future__ import annotations

import asyncio

from sage_jax.errors import ConfigError


class EarlyStop:
    """Shared by the `total` episodes of a position.

    Args:
      total: number of episodes.
      turn: no episode is stopped before it has finished this many turns; at least 1.
      share: share of episodes that may be left behind, in [0, 1).
    """

    def __init__(self, total: int, turn: int, share: float):
        if turn < 1 or not 0.0 <= share < 1.0:
            raise ConfigError(f"early_stop: turn={turn} must be at least 1 and share={share} in [0, 1)")
        self._total, self._turn, self._share = total, turn, share
        self._turns: dict[str, int] = {}  # turns begun so far, of running episodes
        self._lengths: dict[str, int] = {}  # of ended ones; a stopped one counts as longer than where it stopped
        self._stopped: set[str] = set()
        self._changed = asyncio.Event()

    def should_stop(self, rollout: str, turns: int) -> bool:
        """Called before a turn: True if the episode has passed every possible last turn."""
        self._turns[rollout] = turns
        self._wake()
        bound = self._bound()
        if bound is not None and turns >= bound and turns >= self._turn:
            self._stopped.add(rollout)
            return True
        return False

    def restarted(self, rollout: str) -> None:
        """The episode is run again from its start."""
        self._turns.pop(rollout, None)
        self._stopped.discard(rollout)

    def ended(self, rollout: str, turns: int) -> None:
        """The episode is over after so many turns (0: it was no sample)."""
        self._turns.pop(rollout, None)
        self._lengths[rollout] = turns + 1 if rollout in self._stopped else turns
        self._wake()

    async def last_turn(self, rollout: str, turns: int) -> int | None:
        """T*, once it is certain for an episode that took `turns` turns; None if it is not cut."""
        self.ended(rollout, turns)
        if turns <= self._turn and rollout not in self._stopped:
            return None
        while True:
            bound = self._bound()
            # An open episode can lower the bound only while it is below it.
            if self._settled(bound, turns):
                return bound if bound is not None and (turns > bound or rollout in self._stopped) else None
            self._changed.clear()
            await self._changed.wait()

    def _bound(self) -> int | None:
        """The smallest T >= turn that is certain to leave at most `share` behind, from what has ended so far."""
        allowed = int(self._share * self._total)
        lengths = sorted(self._lengths.values())
        need = self._total - allowed  # so many must be no longer than T
        if len(lengths) < need:
            return None
        return max(self._turn, lengths[need - 1])

    def _settled(self, bound: int | None, turns: int) -> bool:
        if len(self._lengths) == self._total:
            return True
        if bound is None:
            return False
        unseen = self._total - len(self._lengths) - len(self._turns)
        return unseen == 0 and all(t >= bound for t in self._turns.values())

    def _wake(self) -> None:
        self._changed.set()

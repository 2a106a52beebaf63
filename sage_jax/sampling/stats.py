"""Counters of the slot engine, and the throughput that they give."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Stats:
    """Sums since the start. Written by the engine thread; a reader may see a round half counted."""

    slots: int
    requests: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # computed by extend
    shared_tokens: int = 0  # copied from a conversation with the same first prompt
    decode_steps: int = 0  # each for all slots
    busy_s: float = 0.0  # wall time with work at hand
    wait_s: float = 0.0  # of conversations for a slot, summed
    waiting: int = 0  # conversations without a slot, now

    @property
    def occupancy(self) -> float:
        """Share of decoded rows that gave a token, in [0, 1]."""
        return self.sampled_tokens / max(1, self.decode_steps * self.slots)

    def metrics(self, since: Stats | None = None) -> dict[str, float]:
        """Named figures of the time since `since` (a `dataclasses.replace` copy taken earlier), or of all time."""
        then = since or Stats(self.slots)
        d = Stats(self.slots, **{f.name: getattr(self, f.name) - getattr(then, f.name) for f in dataclasses.fields(self)[1:]})
        busy = max(d.busy_s, 1e-9)
        return {
            "sampler/requests": d.requests,
            "sampler/sampled_tokens": d.sampled_tokens,
            "sampler/prefilled_tokens": d.prefilled_tokens,
            "sampler/shared_tokens": d.shared_tokens,
            "sampler/tokens_per_s": d.sampled_tokens / busy,
            "sampler/prefill_tokens_per_s": d.prefilled_tokens / busy,
            "sampler/busy_s": d.busy_s,
            "sampler/slot_wait_s": d.wait_s,
            "sampler/occupancy": d.occupancy,
        }

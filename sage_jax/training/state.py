"""What training carries from step to step."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters and optimizer state live on devices and are donated to each update; counters live on the host."""

    params: Any  # pytree of float32 master weights
    opt_state: Any  # optax state, float32 moments sharded like the parameters
    step: int = 0  # outer steps done
    updates: int = 0  # optimizer updates applied
    skipped: int = 0  # updates not applied: non-finite loss or gradient, or nothing to train on
    skipped_in_row: int = 0  # of these, since the last applied one

    def counters(self) -> dict[str, int]:
        """The host part, as it goes into a checkpoint."""
        return {k: getattr(self, k) for k in ("step", "updates", "skipped", "skipped_in_row")}

    def after_update(self, params: Any, opt_state: Any, applied: bool) -> TrainState:
        """The state after one optimizer update that was applied or skipped."""
        return dataclasses.replace(
            self,
            params=params,
            opt_state=opt_state,
            updates=self.updates + applied,
            skipped=self.skipped + (not applied),
            skipped_in_row=0 if applied else self.skipped_in_row + 1,
        )

    def next_step(self) -> TrainState:
        """The state at the start of the next outer step."""
        return dataclasses.replace(self, step=self.step + 1)

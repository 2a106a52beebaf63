"""Records of what an agent did: turns, token records, episodes. Plain data and numpy; no jax, no engine.

A token record grows in lockstep: ids, mask and log-probs are appended together and sampled ids are never decoded
and encoded again.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from sage_jax.skills.record import Skill
from sage_jax.world.types import InstallVerdict, Judgement


class End(enum.StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    MAX_TURNS = "max_turns"
    TURN_LENGTH = "turn_length"
    CONTEXT_LENGTH = "context_length"
    NO_CODE = "no_code"
    EARLY_STOPPED = "early_stopped"
    BUDGET = "budget"
    WORLD_LOST = "world_lost"
    INFRASTRUCTURE_ERROR = "infrastructure_error"


@dataclasses.dataclass
class TokenRecord:
    """Token ids of an episode with what RL needs of each (all lists have the same length T)."""

    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)  # 1 = sampled by the policy
    logprobs: list[float] = dataclasses.field(default_factory=list)  # as sampled, over the support; 0.0 where mask is 0
    turn_starts: list[int] = dataclasses.field(default_factory=list)  # index of the first sampled id of each turn
    versions: list[int] = dataclasses.field(default_factory=list)  # policy version, one a turn

    def append(self, ids, mask: int, logprobs=None) -> None:
        """Appends ids with one mask value; log-probs are needed exactly where mask is 1."""
        ids = [int(i) for i in ids]
        if mask and (logprobs is None or len(logprobs) != len(ids)):
            raise ValueError(f"{len(ids)} sampled ids need as many log-probs, got {logprobs}")
        self.ids.extend(ids)
        self.mask.extend([mask] * len(ids))
        self.logprobs.extend([float(x) for x in logprobs] if mask else [0.0] * len(ids))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids int32 [T], mask float32 [T], logprobs float32 [T])."""
        return (np.asarray(self.ids, np.int32), np.asarray(self.mask, np.float32), np.asarray(self.logprobs, np.float32))

    @property
    def sampled(self) -> int:
        return sum(self.mask)


@dataclasses.dataclass
class Turn:
    """One response and what the world answered."""

    response: str  # the assistant's text as sampled
    code: str | None  # what was executed; None if the response held no code that may run
    observation: str  # as shown to the agent (cut, reminder included)
    failed: bool
    completed: bool
    skill_calls: tuple[str, ...]
    finish: str  # "block" | "end_of_turn" | "length" | "context"
    generated: int  # tokens the policy sampled in this turn
    limit: str | None = None
    dropped: int = 0
    seconds_policy: float = 0.0
    seconds_world: float = 0.0


@dataclasses.dataclass
class Episode:
    """One task attempted once."""

    task_id: str
    scenario_id: str
    split: str
    difficulty: int
    instruction: str
    rollout: str  # names the rollout inside its run: "step12/chain3/rollout1" or "eval/test_normal/run0/<scenario>"
    position: int  # 1-based place in the chain
    messages: list[dict]  # the whole conversation, role and content
    turns: list[Turn]
    end: End
    judgement: Judgement | None  # None: not scored (differs from a score of 0)
    offered: tuple[Skill, ...]  # skills shown in the prompt
    verdicts: tuple[InstallVerdict, ...]
    defined: tuple[Skill, ...]  # functions of its steps that did not fail, checked or (verified None) not
    tokens: TokenRecord | None  # None for policies without ids
    error: str = ""
    seconds: float = 0.0
    labels: dict = dataclasses.field(default_factory=dict)  # what the policy said of the episode, e.g. a script's mode

    @property
    def completed(self) -> bool:
        """Whether complete_task was accepted. Not for code that then ended its own world: it is paid nothing, whatever the judge found."""
        return self.judgement is not None and self.judgement.completed and self.end is not End.WORLD_LOST

    @property
    def r(self) -> float:
        """Outcome reward in [0, 1]: share of tests passed if complete_task was accepted and the world is not lost, else 0."""
        j = self.judgement
        return j.passed / j.total if j is not None and self.completed and j.total else 0.0

    @property
    def s(self) -> int:
        """1 if completed and every test passed."""
        return int(self.judgement is not None and self.completed and self.judgement.success)

    @property
    def kept(self) -> tuple[Skill, ...]:
        """What of `defined` may be offered later: not what the check refused."""
        return tuple(s for s in self.defined if s.verified is not False)

    @property
    def called(self) -> tuple[str, ...]:
        """Ids of the skills that returned from at least one call, in order of first call."""
        return tuple(dict.fromkeys(c for t in self.turns for c in t.skill_calls))

    @property
    def generated(self) -> int:
        return sum(t.generated for t in self.turns)

    @property
    def valid(self) -> bool:
        """False: no sample (an infrastructure error, or never run)."""
        return self.end not in (End.INFRASTRUCTURE_ERROR,)

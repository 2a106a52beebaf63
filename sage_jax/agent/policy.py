"""What an agent asks of a policy. The JAX sampler, an endpoint and a scripted policy are interchangeable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from sage_jax.agent.trajectory import TokenRecord


@dataclasses.dataclass
class Conversation:
    """An episode's dialogue. The agent appends messages; a policy that works on ids keeps `tokens` in step.

    `uid` names the episode: a policy may hold state (a cache slot) under it until `release`.
    `rendered` counts the messages that `tokens` already covers.
    """

    uid: str
    messages: list[dict] = dataclasses.field(default_factory=list)  # {"role": system|user|assistant, "content": str}
    tokens: TokenRecord | None = None
    rendered: int = 0
    facts: dict = dataclasses.field(default_factory=dict)  # what a scripted policy needs
    labels: dict = dataclasses.field(default_factory=dict)  # what a policy says of the episode, kept in its record

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one response."""

    prompt: int = 0  # ids the response was conditioned on
    cached: int = 0  # of these, ids that were not computed again
    generated: int = 0


@dataclasses.dataclass(frozen=True)
class Response:
    """One assistant turn.

    finish: "block" the closing fence of the first Python block was completed; "end_of_turn" the policy ended the
    turn itself; "length" the turn's token cap; "context" nothing could be sampled because the prompt (plus at least one new
    token) does not fit the context.
    """

    text: str
    finish: str
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    usage: Usage = Usage()
    cost: float = 0.0  # in dollars, for endpoints
    version: int = 0


@dataclasses.dataclass(frozen=True)
class Key:
    """Names a turn's noise: a function of the run and of the place of the turn in it, never of slot or time."""

    seed: int
    path: Sequence[int]  # (step, chain, rollout, position, turn)


class Policy(Protocol):
    """`respond` appends the assistant message to the conversation itself and returns it."""

    has_ids: bool  # False: episodes can be judged, collected and used for SFT, but not for RL

    async def respond(self, conversation: Conversation, key: Key) -> Response: ...

    def release(self, conversation: Conversation) -> None: ...

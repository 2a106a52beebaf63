"""One episode: a task, a world and a policy in, an `Episode` record out.

Owns the turn loop and how it ends. Whose fault a failure is follows one rule: what the agent's code does is in
`StepResult` and is trained; an `InfrastructureError` means that the whole episode is run again in a new world with the
same key, and nothing of the failed try is kept.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sage_jax.agent import prompts
from sage_jax.agent.code_blocks import first_block
from sage_jax.agent.early_stop import EarlyStop
from sage_jax.agent.policy import Conversation, Key, Policy
from sage_jax.agent.prompts import rough_tokens
from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.errors import ConfigError, InfrastructureError
from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin, Skill
from sage_jax.skills.verify import defines
from sage_jax.world.types import InstallVerdict, Judgement, Task, World


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """The rules of an episode.

    max_turns: responses at most; the last one is executed too. max_no_code_turns: the n-th response without code ends
    the episode. episode_tokens: the turn in which the sampled tokens of all turns reach this number is the last, 0 for no limit (end
    reason `budget`).
    episode_retries: further tries after an infrastructure error. keep_outputs: leave the engine's output folder.
    """

    prompt: prompts.PromptSpec
    max_turns: int
    max_no_code_turns: int
    episode_tokens: int
    episode_retries: int
    keep_outputs: bool

    def __post_init__(self):
        for name in ("max_turns", "max_no_code_turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("episode_tokens", "episode_retries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")


class Worlds(Protocol):
    """What the agent needs of an executor pool."""

    async def open(self, task_id: str, *, experiment: str, keep: bool) -> World: ...


async def run_episode(
    task: Task,
    policy: Policy,
    worlds: Worlds,
    spec: EpisodeSpec,
    *,
    key: Key,
    rollout: str,
    position: int,
    experiment: str,
    skills: Sequence[Skill] = (),
    facts: dict | None = None,
    count: Callable[[str], int] = rough_tokens,
    early: EarlyStop | None = None,
) -> Episode:
    """Runs one task to its end and has it judged.

    Args:
      key: names the noise; (…, position) so far, the turn is added here.
      rollout, position: where in the run this episode stands; recorded, never used for decisions.
      experiment: name of the engine's output folder; unique per rollout.
      skills: the rollout's library at this point.
      facts: handed to the policy with the conversation (scripted policies read the reference from it).
      count: text -> tokens, for the budget of the rendered library.
      early: shared by the episodes of one position; None when early stopping is off.

    Returns:
      The episode. Only after `episode_retries` failed tries is its end INFRASTRUCTURE_ERROR; it is then no sample.
    """
    started = time.monotonic()
    errors = []
    for attempt in range(spec.episode_retries + 1):
        if attempt and early is not None:
            early.restarted(rollout)
        conversation = Conversation(uid=f"{rollout}/p{position}/try{attempt}", facts={**(facts or {}), "position": position})
        try:
            episode = await _attempt(task, policy, worlds, spec, conversation, key, rollout, position, experiment, skills, count, early)
            episode.seconds = time.monotonic() - started
            return episode
        except InfrastructureError as error:
            errors.append(f"{type(error).__name__}: {error}")
            logging.warning("%s position %d, try %d of %d: %s", rollout, position, attempt + 1, spec.episode_retries + 1, errors[-1])
        finally:
            policy.release(conversation)
    if early is not None:
        early.ended(rollout, 0)
    episode = _record(task, rollout, position, Conversation(uid=rollout), [], End.INFRASTRUCTURE_ERROR, None, (), ())
    episode.error, episode.seconds = " | ".join(errors), time.monotonic() - started
    return episode


async def _attempt(task, policy, worlds, spec, conversation, key, rollout, position, experiment, skills, count, early) -> Episode:
    world = await worlds.open(task.task_id, experiment=experiment, keep=spec.keep_outputs)
    try:
        verdicts: list[InstallVerdict] = await world.install(skills) if skills else []
        ok = {v.skill_id for v in verdicts if v.ok}
        messages, offered = prompts.opening(task, [s for s in skills if s.id in ok], spec.prompt, count)
        conversation.messages.extend(messages)
        turns, end = await _turns(world, policy, spec, conversation, key, rollout, early, ok)
        judgement: Judgement | None = await world.evaluate()
        if spec.keep_outputs:
            await world.record_lm_calls(_lm_calls(conversation.messages, turns))
        origin = Origin(task_id=task.task_id, turn=0, rollout=rollout, position=position)
        written = _written(turns, origin)
        # After a loss they stay unchecked until the next world installs them; a plain agent keeps none.
        if end is not End.WORLD_LOST and spec.prompt.agent == "skill":
            written = (await defines(written, world)).skills
    finally:
        await world.close()
    policy.release(conversation)  # a waiting episode must hold neither a slot nor a world
    if early is not None:
        last = await early.last_turn(rollout, len(turns))
        if last is not None and len(turns) > last:
            turns, end = turns[:last], End.EARLY_STOPPED
            _cut(conversation, len(messages), last)
            checked = {s.id: s.verified for s in written}
            written = tuple(dataclasses.replace(s, verified=checked.get(s.id)) for s in _written(turns, origin))
    if end is End.EARLY_STOPPED:
        judgement = None  # whether it was stopped at once or cut afterwards
    return _record(task, rollout, position, conversation, turns, end, judgement, offered, tuple(verdicts), written)


def _lm_calls(messages: Sequence[dict], turns: Sequence[Turn]) -> list[dict]:
    """What went to the policy and came from it, turn by turn."""
    responses = [i for i, m in enumerate(messages) if m["role"] == "assistant"][-len(turns) :] if turns else []
    return [
        {"id": n, "input": {"messages": messages[:at]}, "output": {"message": messages[at], "finish_reason": turn.finish, "completion_tokens": turn.generated}}
        for n, (at, turn) in enumerate(zip(responses, turns, strict=True))
    ]


def _written(turns: Sequence[Turn], origin: Origin) -> tuple[Skill, ...]:
    """Functions defined in the steps that did not fail."""
    return extract([(i, t.code) for i, t in enumerate(turns) if t.code is not None and not t.failed], origin).skills


async def _turns(world, policy, spec, conversation, key, rollout, early, installed) -> tuple[list[Turn], End]:
    turns: list[Turn] = []
    without_code = 0
    while True:
        if early is not None and early.should_stop(rollout, len(turns)):
            return turns, End.EARLY_STOPPED
        t0 = time.monotonic()
        response = await policy.respond(conversation, Key(key.seed, (*key.path, len(turns))))
        t1 = time.monotonic()
        if response.finish == "context":
            return turns, End.CONTEXT_LENGTH
        code, closed = first_block(response.text)
        # An unclosed block is code if the policy ended the turn itself; the token cap cut it otherwise.
        runnable = code is not None and (closed or response.finish == "end_of_turn")
        turn = Turn(
            response=response.text, code=code if runnable else None, observation="", failed=False, completed=False, skill_calls=(),
            finish=response.finish, generated=response.usage.generated, seconds_policy=t1 - t0,
        )
        turns.append(turn)
        if response.finish == "length" and not runnable:
            return turns, End.TURN_LENGTH
        if runnable:
            step = await world.execute(code)
            text, cut = prompts.observation(step.text, spec.prompt)
            turn.failed, turn.completed, turn.limit = step.failed, step.completed, step.limit
            turn.skill_calls = tuple(c for c in step.skill_calls if c in installed)  # code can forge what its own step says
            turn.observation, turn.dropped, turn.seconds_world = text, cut + step.dropped, time.monotonic() - t1
            if step.world_lost:
                return turns, End.WORLD_LOST
            if step.completed:
                return turns, End.COMPLETED
        else:
            without_code += 1
            turn.observation, _ = prompts.observation(prompts.NO_CODE, spec.prompt)
            if without_code >= spec.max_no_code_turns:
                return turns, End.NO_CODE
        if len(turns) >= spec.max_turns:
            return turns, End.MAX_TURNS
        if spec.episode_tokens and sum(t.generated for t in turns) >= spec.episode_tokens:
            return turns, End.BUDGET
        conversation.add("user", turn.observation)


def _cut(conversation: Conversation, opening: int, turns: int) -> None:
    """Takes all that follows the given number of turns out of a conversation and its token record."""
    responses = [i for i, m in enumerate(conversation.messages) if m["role"] == "assistant" and i >= opening]
    if turns < len(responses):
        conversation.messages = conversation.messages[: responses[turns]]
    tokens = conversation.tokens
    if tokens is not None and turns < len(tokens.turn_starts):
        at = tokens.turn_starts[turns]
        del tokens.ids[at:], tokens.mask[at:], tokens.logprobs[at:], tokens.turn_starts[turns:], tokens.versions[turns:]


def _record(task, rollout, position, conversation, turns, end, judgement, offered, verdicts, defined=()) -> Episode:
    return Episode(
        task_id=task.task_id, scenario_id=task.scenario_id, split=task.split, difficulty=task.difficulty,
        instruction=task.instruction, rollout=rollout, position=position, messages=conversation.messages, turns=turns,
        end=end, judgement=judgement, offered=tuple(offered), verdicts=tuple(verdicts), defined=tuple(defined),
        tokens=conversation.tokens, labels=conversation.labels,
    )

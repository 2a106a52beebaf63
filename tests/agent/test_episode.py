"""Episodes and chains on the real engine, with scripted policies."""

import asyncio
import dataclasses
import os
import signal
import types

import pytest

from sage_jax.agent.chain import run_chains
from sage_jax.agent.episode import EpisodeSpec
from sage_jax.agent.policy import Conversation, Key, Response, Usage
from sage_jax.agent.prompts import NO_CODE, PromptSpec, observation, opening
from sage_jax.agent.scripted import MODES, Script, ScriptedPolicy
from sage_jax.agent.trajectory import End
from sage_jax.errors import ConfigError
from sage_jax.training.rl_loop import is_sample
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool

PROMPT = PromptSpec(agent="skill", style="short", demonstrations=0, skill_tokens=2000, skill_style="source", observation_chars=400, reminder="")
SPEC = EpisodeSpec(prompt=PROMPT, max_turns=3, max_no_code_turns=1, episode_tokens=0, episode_retries=1, keep_outputs=False)


class Says:
    """A policy that says given texts, whatever it sees."""

    has_ids = False

    def __init__(self, *texts, finish="block"):
        self.texts, self.finish, self.asked = texts, finish, 0

    async def respond(self, conversation: Conversation, key: Key) -> Response:
        text = self.texts[min(len(conversation.facts.setdefault("said", [])), len(self.texts) - 1)]
        if callable(text):
            text = text()
            await asyncio.sleep(0.5)  # as long as a policy thinks: a death before the step is no death in it
        conversation.facts["said"].append(text)
        self.asked += 1
        conversation.add("assistant", text)
        return Response(text=text, finish=self.finish, usage=Usage(generated=7))

    def release(self, conversation):
        pass


def code(text):
    return f"```python\n{text}\n```"


def scripts(root, ids):
    out = {}
    for t in ids:
        r = load_reference(root.path, t)
        out[t] = {"script": Script(r.function, r.function_name, r.call, r.inline, r.lookup, r.kind)}
    return out


class Bench:
    """One pool for all tests of this file: warming its server is what takes long."""

    def __init__(self, root):
        self.root, self.loop = root, asyncio.new_event_loop()
        self.pool = WorldPool(root.path, limits=Limits(), outputs=None, max_open=4)
        self.loop.run_until_complete(self.pool.start())

    def close(self):
        self.loop.run_until_complete(self.pool.close())
        self.loop.close()

    def worlds(self):
        return list(self.pool._worlds)


@pytest.fixture(scope="module")
def bench(mini_root):
    bench = Bench(mini_root)
    yield bench
    bench.close()


def play(bench, policy, spec=SPEC, scenarios=1, group=1, split="train", **options):
    groups = list(bench.root.scenarios(split).values())[:scenarios]
    chains = [[bench.root.task(t) for t in ids] for ids in groups]
    facts = scripts(bench.root, [t for ids in groups for t in ids])
    job = run_chains(chains, group, policy, bench.pool, spec, seed=0, path=(0,), name="test", facts=facts, **options)
    return bench.loop.run_until_complete(job)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_the_scripted_policy_passes_the_judge(bench, mode):
    rollouts = play(bench, ScriptedPolicy({mode: 1.0}, reuse=1.0, seed=0), scenarios=2)
    episodes = [e for r in rollouts for e in r.episodes]
    assert [e.s for e in episodes] == [1] * len(episodes), [(e.end, e.judgement) for e in episodes if not e.s]
    assert all(e.end is End.COMPLETED for e in episodes)
    first, *later = rollouts[0].episodes
    if mode.endswith("function"):
        assert first.defined and not first.offered
        for e in later:
            assert e.offered and e.called == (first.defined[-1].id,), "the function of task 1 is offered and called"
            assert f"def {first.defined[-1].name}(" in e.messages[1]["content"]
    else:
        assert not any(e.defined or e.offered for e in rollouts[0].episodes)
    if mode.startswith("repair"):
        assert first.turns[0].failed and not first.turns[-1].failed
        assert all(s.origin.turn > 0 for s in first.defined), "a failed step leaves no skill"


def test_the_plain_agent_keeps_nothing(bench):
    spec = dataclasses.replace(SPEC, prompt=dataclasses.replace(PROMPT, agent="plain"))
    (rollout,) = play(bench, ScriptedPolicy({"function": 1.0}, reuse=1.0, seed=0), spec)
    assert all(not e.offered and e.s for e in rollout.episodes) and len(rollout.library) == 0


def test_the_last_allowed_turn_is_executed(bench):
    (rollout,) = play(bench, Says(code("n = globals().get('n', 0) + 1\nprint(n)")), keep=False)
    for e in rollout.episodes:
        assert e.end is End.MAX_TURNS and e.r == 0.0 and e.valid
        assert [t.observation for t in e.turns] == ["1", "2", "3"]


def test_no_code_ends_at_the_configured_response(bench):
    (rollout,) = play(bench, Says("I do not know."), keep=False)
    assert all(e.end is End.NO_CODE and len(e.turns) == 1 and e.turns[0].observation == NO_CODE for e in rollout.episodes)
    (rollout,) = play(bench, Says("Well.", "Hm."), dataclasses.replace(SPEC, max_no_code_turns=2), keep=False)
    assert all(e.end is End.NO_CODE and len(e.turns) == 2 for e in rollout.episodes)


def test_an_unclosed_block_runs_only_if_the_policy_ended_the_turn(bench):
    text = "```python\nprint('ran')"
    (rollout,) = play(bench, Says(text, finish="length"), keep=False)
    assert all(e.end is End.TURN_LENGTH and e.turns[0].code is None for e in rollout.episodes)
    (rollout,) = play(bench, Says(text, finish="end_of_turn"), keep=False)
    assert all(e.turns[0].observation == "ran" for e in rollout.episodes)


def test_a_policy_that_kills_its_world_is_scored_zero_and_trained(bench):
    (rollout,) = play(bench, Says(code("__import__('posix')._exit(3)")), keep=False)
    assert rollout.valid
    for e in rollout.episodes:
        assert e.end is End.WORLD_LOST and e.r == 0.0 and len(e.turns) == 1


def test_completing_and_then_ending_the_world_pays_nothing(bench):
    task_id = next(iter(bench.root.scenarios("train").values()))[0]
    script = scripts(bench.root, [task_id])[task_id]["script"]
    answer = "answer=answer" if script.kind == "question" else ""
    text = f"{script.inline}\napis.supervisor.complete_task({answer})\n__import__('posix')._exit(3)"
    (rollout,) = play(bench, Says(code(text)), keep=False)
    e = rollout.episodes[0]
    assert e.task_id == task_id and e.end is End.WORLD_LOST and e.judgement.completed and e.judgement.success
    assert (e.r, e.s, e.completed) == (0.0, 0, False) and e.valid


def test_calls_of_skills_that_were_not_installed_are_not_believed(bench):
    """The step's own process says what it called; an id that nobody knows ends no run and pays nothing."""

    class Forging:
        def __init__(self, world):
            self.world = world

        def __getattr__(self, name):
            return getattr(self.world, name)

        async def execute(self, code):
            step = await self.world.execute(code)
            return dataclasses.replace(step, skill_calls=("forged@00000000", *step.skill_calls))

    class Pool:
        async def open(self, *args, **options):
            return Forging(await bench.pool.open(*args, **options))

    spec = dataclasses.replace(SPEC, max_turns=1)
    (rollout,) = play(types.SimpleNamespace(root=bench.root, pool=Pool(), loop=bench.loop), ScriptedPolicy({"function": 1.0}, reuse=1.0, seed=0), spec)
    first, *later = rollout.episodes
    assert first.called == () and all(e.called == (first.defined[-1].id,) for e in later)
    assert rollout.library[first.defined[-1].id].uses == len(later)


def test_a_worker_killed_from_outside_is_not_the_agents_fault(bench):
    """The episode is run again in a new world; the second try succeeds and nothing of the first one is kept."""
    def kill_once():
        if len(policy.killed) < 1:
            policy.killed.append(1)
            for world in bench.worlds():
                os.kill(world.pid, signal.SIGKILL)
        return code("print('again')")

    policy = Says(kill_once)
    policy.killed = []
    (rollout,) = play(bench, policy, dataclasses.replace(SPEC, max_turns=1), keep=False)
    assert rollout.valid and [len(e.turns) for e in rollout.episodes] == [1, 1, 1]
    assert policy.asked == 4


def test_when_tries_run_out_the_rollout_is_no_sample(bench):
    def kill():
        for world in bench.worlds():
            os.kill(world.pid, signal.SIGKILL)
        return code("print(1)")

    (rollout,) = play(bench, Says(kill), keep=False)
    assert not rollout.valid and len(rollout.episodes) == 1
    (e,) = rollout.episodes
    assert e.end is End.INFRASTRUCTURE_ERROR and e.judgement is None and "WorkerDied" in e.error and not e.turns


def test_the_turn_that_reaches_the_budget_is_the_last(bench):
    (rollout,) = play(bench, Says(code("print(1)")), dataclasses.replace(SPEC, episode_tokens=14), keep=False)  # 7 tokens a turn
    for e in rollout.episodes:
        assert e.end is End.BUDGET and len(e.turns) == 2 and e.turns[-1].observation == "1" and e.r == 0.0 and e.valid


def test_an_episode_that_the_others_left_behind_is_stopped(bench):
    """It is scored 0 and trained, or its rollout is no sample, as the config says."""

    class FirstIsQuick(Says):
        async def respond(self, conversation, key):
            self.texts = (code("apis.supervisor.complete_task()"),) if "rollout0" in conversation.uid else (code("print(1)"),)
            return await super().respond(conversation, key)

    rollouts = play(bench, FirstIsQuick(), group=2, keep=False, early_stop=(1, 0.5))
    quick, slow = ([(e.end, len(e.turns), e.r) for e in r.episodes] for r in rollouts)
    assert [end for end, _, _ in quick] == [End.COMPLETED] * 3 and slow == [(End.EARLY_STOPPED, 1, 0.0)] * 3
    assert all(e.judgement is None for e in rollouts[1].episodes)
    assert [[is_sample(r, how) for r in rollouts] for how in ("zero", "drop")] == [[True, True], [True, False]]


def test_rollouts_come_back_in_order(bench):
    rollouts = play(bench, ScriptedPolicy({"inline": 1.0}, reuse=0.0, seed=0), scenarios=2, group=2)
    assert [(r.chain, r.index) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [e.position for r in rollouts for e in r.episodes] == [1, 2, 3] * 4


def test_observations_are_cut_in_the_middle_and_addresses_are_blank():
    text, dropped = observation("a" * 900 + "END", PROMPT)
    assert dropped == 503 and text.startswith("aaa") and text.endswith("END") and "503 characters cut" in text
    assert observation("<function f at 0x7f2a1b3c4d5e>", PROMPT)[0] == "<function f at 0x0>"
    full = dataclasses.replace(PROMPT, style="full", reminder="Go on.")
    text, _ = observation("```python\nx\n```", full)
    assert text == "Output:\n````\n```python\nx\n```\n````\nGo on."


@pytest.mark.parametrize("agent", ["skill", "plain"])
@pytest.mark.parametrize("style", ["short", "full"])
def test_prompts_hold_what_the_agent_must_know(mini_root, agent, style):
    task = mini_root.task(mini_root.task_ids("train")[0])
    spec = dataclasses.replace(PROMPT, agent=agent, style=style, demonstrations=1)
    messages, shown = opening(task, [], spec, len)
    text = "\n".join(m["content"] for m in (messages[0], messages[-1]))
    person = task.supervisor
    for fact in (task.instruction, person.email, person.phone_number, "apis.api_docs", *task.app_descriptions):
        assert fact in text
    assert style == "short" or f"{person.first_name} {person.last_name}" in text
    assert ("self-contained" in text) == (agent == "skill") and shown == ()
    assert messages[0]["role"] == "system" and messages[1]["role"] == "user" and messages[-1]["role"] == "user"


def test_wrong_names_raise_with_the_choices():
    with pytest.raises(ConfigError, match="skill, plain"):
        dataclasses.replace(PROMPT, agent="skil")
    with pytest.raises(ConfigError, match="short, full"):
        dataclasses.replace(PROMPT, style="long")
    with pytest.raises(ConfigError, match="0 to"):
        dataclasses.replace(PROMPT, demonstrations=9)
    with pytest.raises(ConfigError, match="inline"):
        ScriptedPolicy({"inlined": 1.0}, reuse=1.0, seed=0)

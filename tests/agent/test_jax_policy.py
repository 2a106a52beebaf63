"""The policy over the engine: ids stay in lockstep with the template, turns end where the rule says, nothing is lost."""

import asyncio

import jax
import numpy as np
import pytest
from flax import nnx
from qwen_chat import TEMPLATES

from sage_jax.agent.code_blocks import first_block
from sage_jax.agent.jax_policy import JaxPolicy
from sage_jax.agent.policy import Conversation, Key
from sage_jax.errors import ConfigError
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.config import ModelConfig
from sage_jax.model.qwen import token_logprobs
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.model.tokenizer import train_bpe
from sage_jax.sampling.engine import Engine

CONTEXT = 160
TEXTS = ["```python\nprint(apis.music.show(x))\n```\n", "The answer is 12.\n"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 320)


@pytest.fixture(scope="module")
def weights(tokenizer):
    """(graphdef, cfg, mesh, params) of a random policy with a liking for fences: every hidden state has a large first feature, and their
    logits follow it; those of rows without a token most of all."""
    cfg = ModelConfig(vocab_size=tokenizer.vocab_size + 4, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
                      mlp_size=64, tie_embeddings=False)  # fmt: skip
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    graphdef, params = create_params(cfg, mesh, 0)
    embed, head = params["embed"], params["head"]
    embed[...] = embed[...].at[:, 0].set(3.0)
    for token, weight in (("```python\n", 2.5), ("```", 2.5), ("\n", 2.5)):
        (i,) = tokenizer.encode(token)
        head[...] = head[...].at[0, i].set(weight)
    head[...] = head[...].at[0, tokenizer.end_of_turn_id].set(1.5)
    head[...] = head[...].at[0, tokenizer.vocab_size :].set(9.0)
    return graphdef, cfg, mesh, params


@pytest.fixture(scope="module")
def engine(weights, tokenizer):
    *parts, params = weights
    with Engine(*parts, tokenizer, slots=4, context=CONTEXT, extend_buckets=(64, 160), decode_chunk=8) as engine:
        engine.set_params(params, version=7)
        yield engine


def policy_of(engine, tokenizer, **changes):
    return JaxPolicy(engine, tokenizer, **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24, **changes})


def opening(i=0):
    return [{"role": "system", "content": "You write code."}, {"role": "user", "content": f"Task {i}: ```python\nx\n``` <|im_end|>"}]


async def dialogue(policy, uid, i=0, turns=3):
    conversation, responses = Conversation(uid=uid), []
    conversation.messages.extend(opening(i))
    for turn in range(turns):
        responses.append(await policy.respond(conversation, Key(0, (i, turn))))
        if responses[-1].finish == "context":
            break
        conversation.add("user", f"Output {turn}")
    policy.release(conversation)
    return conversation, responses


def test_ids_mask_and_text_are_in_lockstep_with_the_template(engine, tokenizer):
    policy, renderer = policy_of(engine, tokenizer), ChatRenderer(tokenizer)
    finishes = set()

    async def run():
        return await asyncio.gather(*(dialogue(policy, f"lock{i}", i) for i in range(24)))

    for conversation, responses in asyncio.run(run()):
        record = conversation.tokens
        given = [m for m in conversation.messages if m["role"] != "assistant"]
        expected, mask, starts = renderer.open_turn(given[:2], first=True), [], []
        for turn, response in enumerate(r for r in responses if r.finish != "context"):
            finishes.add(response.finish)
            if turn:
                ended = expected[-1] == tokenizer.end_of_turn_id
                expected = expected + renderer.close_turn(ended) + renderer.open_turn([given[1 + turn]])
            mask += [0] * (len(expected) - len(mask)) + [1] * len(response.ids)
            starts.append(len(expected))
            assert response.usage.prompt == len(expected)
            if turn:
                assert response.usage.cached == starts[-2] + len(responses[turn - 1].ids) - 1
            expected = expected + list(response.ids)
            assert response.version == 7 and response.usage.generated == len(response.ids) == len(response.logprobs)
            text = tokenizer.decode(response.ids)
            _, closed = first_block(text)
            if response.finish == "block":
                assert closed and response.text == text
                assert not first_block(tokenizer.decode(response.ids[:-1]))[1]
            elif response.finish == "end_of_turn":
                assert response.ids[-1] in tokenizer.stop_ids and response.text == tokenizer.decode(response.ids[:-1])
            else:
                assert response.finish == "length" and not closed and len(response.ids) == min(24, CONTEXT - response.usage.prompt)
            assert conversation.messages[2 + 2 * turn] == {"role": "assistant", "content": response.text}
        assert record.ids == expected and record.mask == mask and record.turn_starts == starts
        assert len(record.logprobs) == len(record.ids) and record.versions == [7] * len(starts)
        assert all((lp == 0.0) == (m == 0) or m for lp, m in zip(record.logprobs, record.mask))
    assert finishes == {"block", "end_of_turn", "length"}


def test_a_conversation_alone_gets_the_same_ids(engine, tokenizer):
    policy = policy_of(engine, tokenizer)

    async def together():
        return await asyncio.gather(*(dialogue(policy, f"many{i}", i) for i in range(10)))

    many = asyncio.run(together())
    for i in (0, 7):
        one, _ = asyncio.run(dialogue(policy, f"one{i}", i))
        assert one.tokens == many[i][0].tokens


def test_context_end_samples_nothing(engine, tokenizer):
    policy = policy_of(engine, tokenizer)
    conversation = Conversation(uid="full")
    conversation.messages.append({"role": "user", "content": "x" * 500})
    response = asyncio.run(policy.respond(conversation, Key(0, (0,))))
    assert (response.finish, response.text, response.ids) == ("context", "", ())
    assert conversation.tokens is None and len(conversation.messages) == 1
    policy.release(conversation)


def test_greedy_view_and_demonstrations(engine, tokenizer):
    policy = policy_of(engine, tokenizer)
    greedy = policy.with_sampling(temperature=0.0, max_new_tokens=5)
    assert greedy.engine is policy.engine and greedy.sampling.temperature == 0 and policy.sampling.temperature == 1.0
    with pytest.raises(ConfigError, match="min_p"):
        policy.with_sampling(min_p=0.1)
    with pytest.raises(ConfigError, match="temperature"):
        policy.with_sampling(temperature=float("nan"))

    async def run(uid):
        conversation = Conversation(uid=uid)
        conversation.messages.extend([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}])
        await greedy.respond(conversation, Key(0, (0,)))
        greedy.release(conversation)
        return conversation

    first, second = asyncio.run(run("d1")), asyncio.run(run("d2"))
    assert first.tokens == second.tokens
    start = first.tokens.turn_starts[0]
    assert tokenizer.decode(first.tokens.ids[:start]) == tokenizer.render(first.messages[:3], add_generation_prompt=True)


@pytest.mark.parametrize("template,thinking,system", [("qwen2_5", True, 1), ("qwen3", True, 0), ("qwen3", False, 0)])
def test_prompts_of_qwen_without_a_system_message(engine, template, thinking, system):
    """Turn k's ids are a prefix of turn k+1's, a default system prompt stands once, and an empty think block is the prompt's and not the text's."""
    tokenizer = train_bpe(TEXTS, 320)  # the engine's, with another template
    tokenizer.fast.chat_template, tokenizer.thinking = TEMPLATES[template], thinking
    policy = policy_of(engine, tokenizer, max_new_tokens=4)
    block = "" if thinking else "<think>\n\n</think>\n\n"

    async def run():
        conversation, prompts = Conversation(uid=f"{template}{thinking}", messages=[{"role": "user", "content": "a"}]), []
        for turn in range(2):
            await policy.respond(conversation, Key(0, (turn,)))
            prompts.append(conversation.tokens.ids[: conversation.tokens.turn_starts[-1]])
            conversation.add("user", "b")
        policy.release(conversation)
        return conversation, prompts

    conversation, prompts = asyncio.run(run())
    for turn, prompt in enumerate(prompts):
        text = tokenizer.decode(prompt)
        assert text.count("<|im_start|>system") == system and text.count(block or "<think>") == (0 if thinking else turn + 1)
        assert text.replace(block, "") + block == tokenizer.render(conversation.messages[: 2 * turn + 1], add_generation_prompt=True)
        assert conversation.tokens.ids[: len(prompt)] == prompt
    assert not any("<think>" in m["content"] for m in conversation.messages)


def test_a_conversation_that_lost_its_slot_goes_on_from_its_record(engine, tokenizer):
    policy = policy_of(engine, tokenizer).with_sampling(temperature=0.0, max_new_tokens=6)

    async def run(uid, lose):
        conversation = Conversation(uid=uid)
        conversation.messages.extend(opening())
        await policy.respond(conversation, Key(0, (0,)))
        conversation.add("user", "go on")
        if lose:
            policy.release(conversation)
        response = await policy.respond(conversation, Key(0, (1,)))
        policy.release(conversation)
        return conversation, response

    (kept, _), (lost, response) = asyncio.run(run("k", False)), asyncio.run(run("l", True))
    assert kept.tokens.ids == lost.tokens.ids and response.usage.cached == 0
    np.testing.assert_allclose(kept.tokens.logprobs, lost.tokens.logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def thinking(weights):
    """(policy, conversations) with the template of a model that always thinks, whose prompt ends inside a think block."""
    tokenizer = train_bpe(TEXTS, 320)
    tokenizer.fast.chat_template = TEMPLATES["qwen3_thinking"]
    *parts, params = weights
    params = jax.tree.map(lambda x: x, params)
    params["head"][...] = params["head"][...].at[0, tokenizer.special("</think>")].set(2.5)
    with Engine(*parts, tokenizer, slots=4, context=CONTEXT, extend_buckets=(64,), decode_chunk=8) as engine:
        engine.set_params(params, version=0)
        policy = policy_of(engine, tokenizer)

        async def run():
            return await asyncio.gather(*(dialogue(policy, f"think{i}", i, turns=2) for i in range(24)))

        yield policy, asyncio.run(run())


def test_fences_in_a_think_block_that_the_prompt_opened_are_no_code(thinking):
    policy, conversations = thinking
    inside = after = 0
    for _, responses in conversations:
        for r in (r for r in responses if r.finish != "context"):
            sampled = policy.tokenizer.decode(r.ids[:-1] if r.finish == "end_of_turn" else r.ids)
            assert r.text == "<think>\n" + sampled
            code, closed = first_block(r.text)
            assert closed == (r.finish == "block")
            inside += first_block(sampled)[1] and code is None
            after += closed
    assert inside and after  # both kinds were sampled


def test_ids_of_a_rollout_are_those_of_the_training_row_of_its_messages(thinking):
    policy, conversations = thinking
    tokenizer, chat, compared = policy.tokenizer, ChatRenderer(policy.tokenizer), 0
    for conversation, responses in conversations:
        record, answers = conversation.tokens, [r for r in responses if r.finish != "context"]
        text = tokenizer.decode(record.ids)
        assert text.startswith(tokenizer.render(conversation.messages[:2], add_generation_prompt=True))
        assert text.count("<|im_start|>assistant\n<think>\n") == len(answers)
        if all("</think>" in r.text for r in answers):  # else a block is left open, and as a given turn it would be closed
            full, _ = chat.full(conversation.messages[: 2 * len(answers) + 1])
            ids = [*record.ids, *chat.close_turn(record.ids[-1] == tokenizer.end_of_turn_id)]
            assert tokenizer.decode(full) == tokenizer.decode(ids)  # sampled ids need not be the shortest for their text
            compared += 1
    assert compared


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 7, "top_p": 0.9}])
def test_rows_without_a_token_are_never_sampled_and_have_no_probability(engine, weights, tokenizer, settings):
    graphdef, cfg, _, params = weights
    policy, real = policy_of(engine, tokenizer, max_new_tokens=16, **settings), tokenizer.vocab_size

    async def run():
        return await asyncio.gather(*(dialogue(policy, f"rows{settings}{i}", i, turns=2) for i in range(4)))

    records = [c.tokens for c, _ in asyncio.run(run())]
    assert max(max(r.ids) for r in records) < real < cfg.vocab_size
    if settings == {"temperature": 1.0}:  # the trainer's are over the same ids
        ids, segments = np.zeros((2, 4, CONTEXT), np.int32)
        for i, r in enumerate(records):
            ids[i, : len(r.ids)], segments[i, : len(r.ids)] = r.ids, 1
        positions = np.broadcast_to(np.arange(CONTEXT), ids.shape)
        logprobs, entropy = nnx.jit(token_logprobs, static_argnums=(5,))(nnx.merge(graphdef, params), ids, positions, segments, 1.0, real)
        for i, r in enumerate(records):
            mask = np.flatnonzero(r.mask)
            np.testing.assert_allclose(np.asarray(logprobs[i])[mask - 1], np.asarray(r.logprobs)[mask], atol=1e-4)
        assert 0 < float(entropy.max()) <= np.log(real) + 1e-5

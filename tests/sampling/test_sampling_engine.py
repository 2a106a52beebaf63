"""The slot engine on a tiny policy: exactness against the full forward, independence of neighbours, limits, errors."""

import asyncio
import concurrent.futures
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from sage_jax.agent.code_blocks import fence_automaton
from sage_jax.agent.policy import Key
from sage_jax.errors import ConfigError, InfrastructureError, SamplingError
from sage_jax.model.config import ModelConfig
from sage_jax.model.qwen import Policy, mask_padded
from sage_jax.sampling.conversation import prompt_chunks
from sage_jax.sampling.engine import Engine
from sage_jax.sampling.request import Sampling, key_data

CFG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64, embed_init_std=0.5)
CONTEXT = 97
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
KEY = Key(0, (0,))


class ByteTokenizer:
    """60 ids of CFG's 64: the bytes that code fences need."""

    pieces = [b"```", b"`", b"python", b"\n", b"x", b"``", b"\n```", b"```python\n"] + [b"%c" % (65 + i) for i in range(52)]
    vocab_size = len(pieces)

    def token_bytes(self, i):
        return self.pieces[i]


def test_prompt_chunks_cover_the_prompt_and_pad_little():
    buckets = (8, 16, 32)
    assert prompt_chunks(0, buckets) == []
    assert prompt_chunks(3, buckets) == [(3, 8)] and prompt_chunks(15, buckets) == [(15, 16)]
    assert prompt_chunks(20, buckets) == [(16, 16), (4, 8)] and prompt_chunks(70, buckets) == [(32, 32), (32, 32), (6, 8)]
    for n in range(1, 200):
        chunks = prompt_chunks(n, buckets)
        assert sum(c for c, _ in chunks) == n and all(0 < c <= b for c, b in chunks) and sum(b for _, b in chunks) - n < 8


@pytest.fixture(scope="module", autouse=True)
def compile_cache(tmp_path_factory):
    """Engines of this file compile the same programs: the second one finds them."""
    changes = {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")), "jax_persistent_cache_min_compile_time_secs": 0,
               "jax_persistent_cache_min_entry_size_bytes": -1}  # fmt: skip
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def model():
    return nnx.split(Policy(CFG, rngs=nnx.Rngs(3)))


def make_engine(model, **changes):
    options = {"slots": 4, "context": CONTEXT, "extend_buckets": (8, 16, 32), "decode_chunk": 4, **changes}
    engine = Engine(model[0], CFG, None, ByteTokenizer(), **options)
    engine.set_params(model[1], version=0)
    return engine


@pytest.fixture(scope="module")
def engine(model):
    with make_engine(model) as engine:
        yield engine


def prompt_of(n, seed=0):
    return np.random.default_rng(seed).integers(8, ByteTokenizer.vocab_size, n).tolist()


def ask(engine, uid, ids, sampling=GREEDY, key=KEY):
    return engine.submit(uid, ids, sampling, key).result(timeout=600)


def alone(engine, ids, sampling=GREEDY, key=KEY):
    uid = object().__repr__()
    result = ask(engine, uid, ids, sampling, key)
    engine.release(uid)
    return result


@pytest.fixture(scope="module")
def full_logits(model):
    """Logits [T, V] of a whole sequence without a cache, ids beyond the vocabulary masked; padded to one length."""

    @jax.jit
    def forward(params, ids):
        policy = nnx.merge(model[0], params)
        hidden, _ = policy(ids[None], jnp.arange(CONTEXT)[None])
        return mask_padded(policy.logits(hidden[0]), ByteTokenizer.vocab_size)

    return lambda ids: np.asarray(forward(model[1], jnp.asarray(list(ids) + [0] * (CONTEXT - len(ids)), jnp.int32)))[: len(ids)]


@pytest.mark.parametrize("n", [1, 2, 8, 9, 17, 33, 70])
def test_greedy_equals_the_full_forward(engine, full_logits, n):
    prompt = prompt_of(n)
    result = alone(engine, prompt)
    ids = prompt + list(result.ids)
    assert len(result.ids) == 12 and result.finish == "length" and result.prompt == n
    assert list(result.ids) == full_logits(ids).argmax(-1)[n - 1 : -1].tolist()


def test_greedy_with_neighbours_equals_alone_bit_for_bit(model, engine):
    """D5, D6: batches of 1, 2 and 5, prompts of lengths 3, 9, 17."""
    prompts = [prompt_of(n, n) for n in (3, 9, 17, 3, 30)]
    single = [alone(engine, p) for p in prompts]
    for count in (2, 5):
        futures = [engine.submit(f"together{count}-{i}", p, GREEDY, KEY) for i, p in enumerate(prompts[:count])]
        if count == 5:
            engine.release("together5-0")  # five in four slots: the last waits for a slot, and the first is taken back
        for i, (future, one) in enumerate(zip(futures, single)):
            if count == 5 and i == 0:
                with pytest.raises(concurrent.futures.CancelledError):
                    future.result(timeout=600)
                continue
            together = future.result(timeout=600)
            assert together.ids == one.ids and (together.logprobs == one.logprobs).all() and (together.full_logprobs == one.full_logprobs).all()
            engine.release(f"together{count}-{i}")


@pytest.mark.parametrize("temperature,top_k,top_p", [(0.3, 0, 1.0), (1.0, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.7, 0, 0.6), (1.3, 9, 0.8)])
def test_logprobs_equal_full_recomputation_over_turns(engine, full_logits, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, max_new_tokens=9, top_k=top_k, top_p=top_p)
    ids, uid = [], f"turns{temperature}{top_k}{top_p}"
    for turn in range(3):
        new = prompt_of(5 + 7 * turn, turn)
        result = ask(engine, uid, new, sampling, Key(1, (turn,)))
        start = len(ids) + len(new)
        assert result.prompt == start and result.cached == max(0, len(ids) - 1)
        ids += new + list(result.ids)
        logits = full_logits(ids)[start - 1 : -1].astype(np.float64) / temperature
        full = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, i, support, unrestricted in zip(full, result.ids, result.logprobs, result.full_logprobs):
            assert abs(row[i] - unrestricted) < 1e-4
            order = np.argsort(-row, kind="stable")
            kept = order[:top_k] if top_k else order
            p = np.exp(row[kept]) / np.exp(row[kept]).sum()
            if top_p < 1:
                kept = kept[np.cumsum(p) - p < top_p]
            assert i in kept
            assert abs(row[i] - np.log(np.exp(row[kept]).sum()) - support) < 1e-4
    engine.release(uid)


def test_frequencies_of_first_tokens(engine, full_logits):
    """Chi-square of 400 draws of one prompt over ids pooled to at least 5 expected."""
    prompt = prompt_of(6, 5)
    sampling = Sampling(temperature=1.5, max_new_tokens=1)
    futures = [engine.submit(f"f{i}", prompt, sampling, Key(9, (i,))) for i in range(400)]
    counts = np.zeros(64)
    for i in range(400):
        counts[futures[i].result(timeout=600).ids[0]] += 1
        engine.release(f"f{i}")
    logits = full_logits(prompt)[-1].astype(np.float64) / 1.5
    expected = 400 * np.exp(logits) / np.exp(logits).sum()
    assert counts[ByteTokenizer.vocab_size :].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    chi2, df = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert chi2 < df + 4 * np.sqrt(2 * df) + 4


def test_interleaved_requests_get_what_they_get_alone(model):
    """24 conversations of up to three turns over 4 slots, some cancelled, in random order."""
    rng = random.Random(0)
    plans = [
        [(prompt_of(rng.randint(1, 20), 100 * c + t), Sampling(temperature=rng.choice([0.0, 0.7, 1.2]), max_new_tokens=rng.randint(1, 10),
          top_k=rng.choice([0, 0, 5]), top_p=rng.choice([1.0, 0.8]))) for t in range(rng.randint(1, 3))]
        for c in range(24)
    ]  # fmt: skip

    async def conversation(engine, c, results, cancel=False):
        for t, (ids, sampling) in enumerate(plans[c]):
            if cancel and t == len(plans[c]) - 1:  # taken back and asked again
                task = asyncio.ensure_future(engine.sample(f"c{c}", ids, sampling, Key(5, (c, t))))
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if task.cancelled() is False:
                    results.append(task.result())
                    continue
            results.append(await engine.sample(f"c{c}", ids, sampling, Key(5, (c, t))))
        engine.release(f"c{c}")

    async def together(engine):
        results = [[] for _ in plans]
        order = list(range(len(plans)))
        rng.shuffle(order)
        await asyncio.gather(*(conversation(engine, c, results[c], cancel=c % 3 == 0) for c in order))
        return results

    with make_engine(model) as engine:
        mixed = asyncio.run(together(engine))
        assert engine.retraces == 0
    with make_engine(model) as engine:
        for c in range(len(plans)):
            single = []
            asyncio.run(conversation(engine, c, single))
            for a, b in zip(single, mixed[c], strict=True):
                assert a.ids == b.ids and (a.logprobs == b.logprobs).all()


def test_a_shared_first_prompt_is_copied_with_the_same_bits(model):
    sampling = Sampling(temperature=4.0, max_new_tokens=6)
    prompt = prompt_of(40)
    with make_engine(model) as engine:
        first = [engine.submit(f"g{i}", prompt, sampling, Key(0, (i,))) for i in range(4)]
        results = [f.result(timeout=600) for f in first]
        assert engine.stats.prefilled_tokens == 39 and engine.stats.shared_tokens == 3 * 39
    assert len({r.ids for r in results}) == 4
    with make_engine(model) as engine:
        for i, shared in enumerate(results):
            engine.set_params(model[1], version=i)  # forgets shared prompts
            one = alone(engine, prompt, sampling, Key(0, (i,)))
            assert one.ids == shared.ids and (one.logprobs == shared.logprobs).all()
            assert (one.versions == i).all()
        assert engine.stats.shared_tokens == 0


def test_rows_stop_by_themselves_and_the_loop_ends_early(model, engine):
    """D7: stop ids are per row; no token after them; the loop does not run to the maximum."""
    prompts = [prompt_of(7, s) for s in (1, 2)]
    free = [alone(engine, p, Sampling(temperature=0.0, max_new_tokens=10)).ids for p in prompts]
    stops = [free[0][1], free[1][4]]
    lengths = [free[0].index(stops[0]) + 1, free[1].index(stops[1]) + 1]
    before = dataclasses.replace(engine.stats)
    results = [
        engine.submit(f"s{i}", p, Sampling(temperature=0.0, max_new_tokens=60, stop_ids=(stop,)), KEY)
        for i, (p, stop) in enumerate(zip(prompts, stops))
    ]
    for i, (future, n) in enumerate(zip(results, lengths)):
        r = future.result(timeout=600)
        assert r.ids == free[i][:n] and r.finish == "stop_id" and len(r.logprobs) == n
        engine.release(f"s{i}")
    assert engine.stats.decode_steps - before.decode_steps <= sum(lengths)


def test_stop_at_the_automaton(model):
    """Sampling ends with exactly the token that completes the fence, wherever the model puts it."""
    with make_engine(model, slots=2) as engine:
        with pytest.raises(SamplingError, match="use_automaton"):
            ask(engine, "a", [8], Sampling(temperature=1.0, max_new_tokens=5, stop_at_accept=True))
        engine.use_automaton(fence_automaton())
        dfa, found = fence_automaton(), 0
        for i in range(40):
            sampling = Sampling(temperature=3.0, top_k=8, max_new_tokens=60, stop_at_accept=True)
            result = alone(engine, [7], sampling, Key(i, (0,)))
            state = dfa.start
            for n, token in enumerate(result.ids, 1):
                state = dfa.run(ByteTokenizer().token_bytes(token), state)
                assert (state == dfa.accept) == (n == len(result.ids) and result.finish == "accept")
            found += result.finish == "accept"
        assert found > 0


def test_the_context_is_never_overrun(engine, full_logits):
    prompt = prompt_of(CONTEXT - 5)
    result = ask(engine, "long", prompt, Sampling(temperature=0.0, max_new_tokens=50))
    assert len(result.ids) == 5 and result.finish == "length"
    assert list(result.ids) == full_logits(prompt + list(result.ids)).argmax(-1)[len(prompt) - 1 : -1].tolist()
    with pytest.raises(SamplingError, match="do not fit the context"):
        ask(engine, "long", [9])
    engine.release("long")
    assert len(ask(engine, "edge", prompt_of(CONTEXT - 1)).ids) == 1
    engine.release("edge")


@pytest.mark.parametrize("ids,sampling,match", [
    ([], GREEDY, "empty prompt"),
    ([1] * CONTEXT, GREEDY, "do not fit"),
    ([1, 60], GREEDY, "outside the vocabulary"),
    ([-1], GREEDY, "outside the vocabulary"),
    ([1.5], GREEDY, "integers"),
    ([1], dataclasses.replace(GREEDY, temperature=float("nan")), "temperature"),
    ([1], dataclasses.replace(GREEDY, temperature=-1.0), "temperature"),
    ([1], dataclasses.replace(GREEDY, top_p=float("nan")), "top_p"),
    ([1], dataclasses.replace(GREEDY, top_k=-1), "top_k"),
    ([1], dataclasses.replace(GREEDY, max_new_tokens=0), "max_new_tokens"),
    ([1], dataclasses.replace(GREEDY, stop_ids=(1, 2, 3, 4, 5)), "stop ids"),
])  # fmt: skip
def test_a_bad_request_fails_alone(engine, ids, sampling, match):
    good = engine.submit("good", prompt_of(4), GREEDY, KEY)
    with pytest.raises(SamplingError, match=match):
        ask(engine, "bad", ids, sampling)
    assert len(good.result(timeout=600).ids) == 12
    engine.release("good")
    engine.release("bad")


def test_no_compile_for_lengths_and_settings(model):
    """D9: an odd context, prompts of all lengths, three temperatures, two seeds."""
    with make_engine(model, context=67, extend_buckets=(16, 32, 64, 128)) as engine:
        assert engine.buckets == (16, 32, 64, 67)
        seen = []
        engine.warm_up(lambda done, total, what: seen.append((done, total)))
        assert seen == [(i, 6) for i in range(7)] and engine.compiled_shapes == 6
        for n in range(1, 65):
            for seed in (0, 1):
                alone(engine, prompt_of(n), Sampling(temperature=n % 3 / 2, max_new_tokens=1, top_p=1 - seed / 2), Key(seed, (n,)))
        assert engine.retraces == 0
        live = len(jax.live_arrays())
        for n in range(50):  # D11
            alone(engine, prompt_of(n + 1), GREEDY)
        assert len(jax.live_arrays()) <= live


def test_noise_follows_the_key(engine):
    """D10: samples of a group differ, the same key repeats, another step differs."""
    sampling = Sampling(temperature=50.0, max_new_tokens=5)
    draws = [alone(engine, [9, 10], sampling, Key(0, (0, i))).ids for i in range(8)]
    assert len(set(draws)) == 8 and all(len(set(d)) > 1 for d in draws)
    assert alone(engine, [9, 10], sampling, Key(0, (0, 3))).ids == draws[3]
    assert alone(engine, [9, 10], sampling, Key(0, (1, 3))).ids != draws[3]
    assert (key_data(1, (2, 3)) != key_data(1, (23,))).any() and (key_data(2**70, (-1,)) == key_data(2**70, (-1,))).all()


def test_weights_are_checked(model, engine):
    with pytest.raises(ConfigError, match="missing"):
        engine.set_params(nnx.State({}), version=1)
    other = nnx.split(Policy(CFG.replace(mlp_size=32), rngs=nnx.Rngs(0)))[1]
    with pytest.raises(ConfigError, match="policy float32"):
        engine.set_params(other, version=1)


def test_an_engine_that_breaks_fails_what_is_open_and_says_so(model):
    with make_engine(model) as engine:
        alone(engine, [9])
        params = jax.tree.map(jnp.copy, model[1])
        engine.set_params(params, version=1)
        jax.tree.map(lambda x: x.delete(), params)  # as if a trainer had donated them while the engine still samples
        futures = [engine.submit(f"b{i}", [9, 8], GREEDY, Key(0, (i,))) for i in range(6)]
        for future in futures:
            with pytest.raises(InfrastructureError, match="stopped"):
                future.result(timeout=600)
        with pytest.raises(InfrastructureError):
            ask(engine, "later", [9])
        engine.release("b0")


def test_close_fails_open_requests_and_may_be_called_twice(model):
    engine = make_engine(model)
    waiting = [engine.submit(f"w{i}", [9], Sampling(temperature=1.0, max_new_tokens=90), Key(0, (i,))) for i in range(9)]
    engine.close()
    engine.close()
    with pytest.raises(InfrastructureError):
        waiting[-1].result(timeout=5)
    assert not engine._thread.is_alive()


def test_one_request_at_a_time_and_one_without_weights(model):
    with make_engine(model) as engine:
        first = engine.submit("u", [9], Sampling(temperature=1.0, max_new_tokens=90), KEY)
        with pytest.raises(SamplingError, match="one at a time"):
            ask(engine, "u", [9])
        assert len(first.result(timeout=600).ids) == 90
    with Engine(model[0], CFG, None, ByteTokenizer(), slots=2, context=32, extend_buckets=(8,), decode_chunk=2) as bare:
        with pytest.raises(SamplingError, match="no weights"):
            ask(bare, "u", [9])
        with pytest.raises(ConfigError, match="no weights"):
            bare.warm_up()

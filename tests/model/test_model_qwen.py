"""The decoder against a plain numpy implementation, cached against uncached, packed and padded against alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sage_jax.model.cache import BLOCK, make_cache
from sage_jax.model.config import ModelConfig
from sage_jax.model.qwen import Policy, mask_padded, token_logprobs
from sage_jax.model.sharding import abstract_params, create_params, make_mesh

QWEN3 = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48, embed_init_std=0.5
)
QWEN2 = QWEN3.replace(qk_norm=False, attention_bias=True, tie_embeddings=False, num_layers=3, rope_theta=1e4)
CONFIGS = pytest.mark.parametrize("cfg", [QWEN3, QWEN2], ids=["qwen3", "qwen2"])


@functools.cache
def build(cfg, seed=0):
    """A policy whose norms and biases differ from their initial ones and zeros, so that leaving one out shows."""
    graph, params = create_params(cfg, make_mesh(devices=jax.devices()[:1]), seed)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda a: jnp.asarray(np.asarray(a) + 0.1 * rng.normal(size=a.shape), a.dtype), params)
    return nnx.merge(graph, params)


@nnx.jit
def forward(policy, ids, positions, cache=None, cache_lengths=None):
    return policy(ids, positions, cache=cache, cache_lengths=cache_lengths)


def reference_logits(policy, ids):
    """One sequence, float64, head by head; ids [T] -> [T, V]."""
    cfg = policy.cfg
    w = {name: np.asarray(p[...], np.float64) for name, p in policy.layers.items()}
    embed = np.asarray(policy.embed[...], np.float64)

    def rms(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * scale

    def rope(x):  # [T, H]
        half = cfg.head_dim // 2
        out = np.empty_like(x)
        for t in range(len(x)):
            for i in range(half):
                angle = t * cfg.rope_theta ** (-2 * i / cfg.head_dim)
                a, b = x[t, i], x[t, i + half]
                out[t, i], out[t, i + half] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return out

    x = embed[ids]
    for n in range(cfg.num_layers):
        h = rms(x, w["attn_norm"][n])
        for head in range(cfg.num_heads):
            kv = head // (cfg.num_heads // cfg.num_kv_heads)
            q, k, v = h @ w["q"][n][:, head], h @ w["k"][n][:, kv], h @ w["v"][n][:, kv]
            if cfg.attention_bias:
                q, k, v = q + w["q_bias"][n][head], k + w["k_bias"][n][kv], v + w["v_bias"][n][kv]
            if cfg.qk_norm:
                q, k = rms(q, w["q_norm"][n]), rms(k, w["k_norm"][n])
            q, k = rope(q), rope(k)
            s = q @ k.T / np.sqrt(cfg.head_dim)
            s[np.triu_indices(len(ids), 1)] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            x = x + (p / p.sum(-1, keepdims=True)) @ v @ w["o"][n][head]
        h = rms(x, w["mlp_norm"][n])
        gate = h @ w["gate"][n]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"][n])) @ w["down"][n]
    x = rms(x, np.asarray(policy.final_norm[...], np.float64))
    return x @ (embed.T if cfg.tie_embeddings else np.asarray(policy.head[...], np.float64))


def ids_of(rng, *shape):
    return jnp.asarray(rng.integers(0, QWEN3.vocab_size, shape), jnp.int32)


def arange(batch, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))


@CONFIGS
def test_logits_equal_numpy(cfg):
    policy = build(cfg)
    ids = ids_of(np.random.default_rng(1), 2, 17)
    hidden, cache = forward(policy, ids, arange(2, 17))
    assert cache is None
    for row in range(2):
        np.testing.assert_allclose(policy.logits(hidden)[row], reference_logits(policy, np.asarray(ids[row])), atol=2e-4)


@CONFIGS
def test_remat_changes_nothing(cfg):
    policy = build(cfg)
    graph, params = nnx.split(policy)
    remat = abstract_params(cfg.replace(remat="full"))[0]
    ids = ids_of(np.random.default_rng(1), 2, 9)

    def loss(graph):
        return lambda params: token_logprobs(nnx.merge(graph, params), ids, arange(2, 9), None, 1.0, 60)[0].sum()

    plain, again = jax.jit(jax.grad(loss(graph)))(params), jax.jit(jax.grad(loss(remat)))(params)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again)):
        np.testing.assert_allclose(a, b, atol=1e-4)


@CONFIGS
@pytest.mark.parametrize("slots", [24, BLOCK + 40])
def test_cached_equals_full_for_random_chunks(cfg, slots):
    """Rows advance by different amounts in one call; padding entries have position -1 or beyond the cache."""
    policy = build(cfg)
    rng = np.random.default_rng(slots)
    total, batch = slots, 3
    ids = np.asarray(ids_of(rng, batch, total))
    want = np.asarray(policy.logits(forward(policy, jnp.asarray(ids), arange(batch, total))[0]))
    cache = make_cache(cfg, batch, slots)
    cache = jax.tree.map(lambda a: a + 7.0, cache)  # stale content of an earlier user of the slots
    done, got = [0] * batch, np.zeros_like(want)
    width = 1
    while min(done) < total:
        width = int(rng.choice([1, 6])) if slots == 24 else int(rng.choice([1, 64]))
        i, pos = np.zeros((batch, width), np.int32), np.full((batch, width), rng.choice([-1, slots, slots + 9]), np.int32)
        taken = []
        for row in range(batch):
            n = min(int(rng.integers(0, width + 1)), total - done[row])
            left = int(rng.integers(0, width - n + 1))  # padding on both sides
            i[row, left : left + n] = ids[row, done[row] : done[row] + n]
            pos[row, left : left + n] = np.arange(done[row], done[row] + n)
            taken.append((left, n))
        hidden, cache = forward(policy, jnp.asarray(i), jnp.asarray(pos), cache)
        logits = np.asarray(policy.logits(hidden))
        assert np.isfinite(logits).all()
        for row, (left, n) in enumerate(taken):
            got[row, done[row] : done[row] + n] = logits[row, left : left + n]
            done[row] += n
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_padding_writes_nothing_and_cache_lengths_hide_slots():
    policy = build(QWEN3)
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda a: a + jnp.asarray(rng.normal(size=a.shape), a.dtype), make_cache(QWEN3, 2, 16))
    ids = ids_of(rng, 2, 3)
    _, same = forward(policy, ids, jnp.asarray([[-1, 16, 40], [-5, -1, 17]]), cache=cache)
    np.testing.assert_array_equal(same.k, cache.k)
    np.testing.assert_array_equal(same.v, cache.v)
    # with nothing visible before it, a token at position 4 is alone, as in an uncached segment of its own
    hidden, _ = forward(policy, ids[:, :1], jnp.full((2, 1), 4), cache=cache, cache_lengths=jnp.zeros(2, jnp.int32))
    alone, _ = forward(policy, ids[:, :1], jnp.full((2, 1), 4))
    np.testing.assert_allclose(hidden, alone, atol=1e-5)
    seen, _ = forward(policy, ids[:, :1], jnp.full((2, 1), 4), cache=cache, cache_lengths=jnp.full(2, 4))
    assert float(jnp.abs(seen - alone).max()) > 1e-3


def test_rewritten_position_hides_the_old_key():
    policy = build(QWEN3)
    ids = ids_of(np.random.default_rng(3), 1, 8)
    _, cache = forward(policy, ids[:, ::-1], arange(1, 8), cache=make_cache(QWEN3, 1, 8))  # other tokens first
    hidden, _ = forward(policy, ids, arange(1, 8), cache=cache)
    np.testing.assert_allclose(hidden, forward(policy, ids, arange(1, 8))[0], atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours_bit_for_bit():
    policy = build(QWEN3)
    rng = np.random.default_rng(0)
    slots = BLOCK * 2
    cache = jax.tree.map(lambda a: a + jnp.asarray(rng.normal(size=a.shape), a.dtype), make_cache(QWEN3, 4, slots))
    ids = ids_of(rng, 4, 1)
    short, _ = forward(policy, ids, jnp.asarray([[3], [5], [7], [9]]), cache)
    long, _ = forward(policy, ids.at[1:].add(1), jnp.asarray([[3], [200], [7], [255]]), cache)  # other blocks are read
    np.testing.assert_array_equal(short[0], long[0])


@CONFIGS
def test_padding_and_packing_do_not_change_logprobs(cfg):
    policy = build(cfg)
    rng = np.random.default_rng(5)
    a, b = ids_of(rng, 1, 7), ids_of(rng, 1, 9)

    compiled = nnx.jit(lambda policy, ids, pos, seg, chunk: token_logprobs(policy, ids, pos, seg, 0.7, 60, chunk), static_argnums=4)

    def logprobs(ids, pos, seg, chunk=128):
        return compiled(policy, ids, pos, seg, chunk)

    want_a, ent_a = logprobs(a, arange(1, 7), None)
    want_b, _ = logprobs(b, arange(1, 9), None)
    pad = jnp.zeros((1, 4), jnp.int32)
    left = logprobs(jnp.concatenate([pad, a], 1), jnp.concatenate([pad, arange(1, 7)], 1), jnp.asarray([[0] * 4 + [1] * 7]))
    np.testing.assert_allclose(left[0][:, 4:], want_a, atol=1e-5)
    np.testing.assert_array_equal(left[0][:, :4], 0)
    right = logprobs(jnp.concatenate([a, pad], 1), jnp.concatenate([arange(1, 7), pad], 1), jnp.asarray([[1] * 7 + [0] * 4]), 3)
    np.testing.assert_allclose(right[0][:, :6], want_a, atol=1e-5)
    np.testing.assert_allclose(right[1][:, :6], ent_a, atol=1e-5)
    np.testing.assert_array_equal(right[0][:, 6:], 0)
    packed, _ = logprobs(
        jnp.concatenate([a, b], 1), jnp.concatenate([arange(1, 7), arange(1, 9)], 1), jnp.asarray([[1] * 7 + [2] * 9])
    )
    np.testing.assert_allclose(packed[:, :6], want_a, atol=1e-5)
    np.testing.assert_allclose(packed[:, 7:], want_b, atol=1e-5)
    assert packed[0, 6] == 0.0


def test_logprobs_and_entropy_are_over_the_real_vocabulary():
    policy = build(QWEN3)
    ids = jnp.minimum(ids_of(np.random.default_rng(2), 2, 11), 49)
    logp, entropy = token_logprobs(policy, ids, arange(2, 11), None, 0.5, 50, chunk=4)
    logits = reference_logits(policy, np.asarray(ids[1]))[:-1, :50] / 0.5
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp[1], want[np.arange(10), np.asarray(ids[1, 1:])], atol=5e-4)
    np.testing.assert_allclose(entropy[1], -(np.exp(want) * want).sum(-1), atol=5e-4)
    masked = mask_padded(policy.logits(forward(policy, ids, arange(2, 11))[0]), 50)
    assert float(jax.nn.softmax(masked)[..., 50:].max()) == 0.0
    with pytest.raises(ValueError, match="65 ids"):
        mask_padded(masked, 65)


def test_gradients_are_finite_with_padding_rows():
    policy = build(QWEN3)
    graph, params = nnx.split(policy)
    seg = jnp.asarray([[0] * 6, [0, 0, 1, 1, 1, 0]])
    grad = jax.jit(jax.grad(lambda p: token_logprobs(nnx.merge(graph, p), jnp.ones((2, 6), jnp.int32), arange(2, 6), seg, 1.0, 64)[0].sum()))
    leaves = jax.tree.leaves(grad(params))
    assert all(bool(jnp.isfinite(g).all()) for g in leaves)
    assert sum(float(jnp.abs(g).sum()) for g in leaves) > 0


def test_bfloat16_compute_stays_near_float32():
    policy = build(QWEN3)
    _, params = nnx.split(policy)
    half = nnx.merge(abstract_params(QWEN3.replace(dtype="bfloat16"))[0], params)
    ids = ids_of(np.random.default_rng(1), 2, 12)
    hidden, cache = forward(half, ids, arange(2, 12), cache=make_cache(half.cfg, 2, 16))
    assert hidden.dtype == cache.k.dtype == jnp.bfloat16 and half.logits(hidden).dtype == jnp.float32
    want = policy.logits(forward(policy, ids, arange(2, 12))[0])
    assert float(jnp.abs(half.logits(hidden) - want).mean()) < 0.05 * float(jnp.abs(want).mean())


def test_initial_scales():
    cfg = QWEN3.replace(hidden_size=256, mlp_size=256, embed_init_std=0.1)
    policy = Policy(cfg, nnx.Rngs(0))
    np.testing.assert_allclose(policy.embed[...].std(), 0.1, rtol=0.05)
    np.testing.assert_allclose(policy.layers["up"][...].std(), 256**-0.5, rtol=0.05)
    np.testing.assert_allclose(policy.layers["down"][...].std(), (256 * 2 * cfg.num_layers) ** -0.5, rtol=0.05)
    np.testing.assert_allclose(policy.layers["o"][...].std(), (32 * 2 * cfg.num_layers) ** -0.5, rtol=0.05)
    again = Policy(cfg, nnx.Rngs(0))
    np.testing.assert_array_equal(policy.layers["q"][...], again.layers["q"][...])
    assert not np.allclose(policy.layers["k"][...], policy.layers["v"][...])

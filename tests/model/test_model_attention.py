"""Every implementation of attention over whole sequences equals the plain batched form, values and gradients; and which one is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sage_jax.errors import ConfigError
from sage_jax.model import attention_heads as heads
from sage_jax.model.attention import Visible, attend, check_available, choose, sequence_mask
from sage_jax.model.attention_chunked import attend_chunked
from sage_jax.model.attention_splash import attend_splash
from sage_jax.model.config import ModelConfig


def batched(q, k, v, mask):
    batch, length, _, size = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, size)
    s = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * size**-0.5
    p = heads.softmax(s, mask[:, None, None])
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


@pytest.mark.parametrize("shape", [(2, heads.TILE + 22, 2, 2, 8), (3, 40, 1, 4, 8), (1, 2 * heads.TILE, 2, 1, 4)])
def test_head_by_head_equals_batched(shape):
    batch, length, kv_heads, group, size = shape
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(batch, length, n, size)), jnp.float32) for n in (kv_heads * group, kv_heads, kv_heads))
    segments = jnp.asarray(np.sort(rng.integers(1, 4, (batch, length)), 1)).at[:, -5:].set(0)  # the last five are padding
    mask = sequence_mask(jnp.broadcast_to(jnp.arange(length), (batch, length)), segments)
    weight = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

    def run(f):
        return jax.jit(jax.value_and_grad(lambda q, k, v: (f(q, k, v, mask) * weight).sum(), (0, 1, 2)))(q, k, v)

    (value, grads), (want, want_grads) = run(heads.attend_heads), run(batched)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for g, w in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5)
        assert np.isfinite(g).all()


def packed_rows(rng, batch, length, padding=5):
    """(positions, segments) of packed rows: segments of random lengths, positions from 0 in each, padding at the end."""
    segments = np.sort(rng.integers(1, 4, (batch, length)), 1)
    segments[:, length - padding :] = 0
    positions = np.stack([np.concatenate([np.arange((row == s).sum()) for s in (1, 2, 3, 0)]) for row in segments])
    return jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32)


def operands(rng, batch, length, kv_heads, group, size):
    shapes = [(batch, length, n, size) for n in (kv_heads * group, kv_heads, kv_heads)]
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)


def compare(run, operands, positions, segments, atol):
    real = (segments > 0)[..., None, None]
    weight = jnp.asarray(np.random.default_rng(9).normal(size=operands[0].shape), jnp.float32) * real
    mask = sequence_mask(positions, segments)

    def both(f):
        return jax.jit(jax.value_and_grad(lambda *a: ((o := f(*a)) * weight).sum() + 0 * o.sum(), (0, 1, 2)))(*operands)

    (value, grads), (want, want_grads) = both(run), both(lambda q, k, v: batched(q, k, v, mask))
    np.testing.assert_allclose(value, want, rtol=1e-4, atol=atol)
    for g, w in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(g, w, atol=atol)


@pytest.mark.parametrize("length, block", [(40, 16), (64, 16), (33, 64), (48, 48)])
def test_chunked_equals_batched(length, block):
    rng = np.random.default_rng(length)
    positions, segments = packed_rows(rng, 2, length)
    compare(lambda q, k, v: attend_chunked(q, k, v, positions, segments, block), operands(rng, 2, length, 2, 3, 8), positions, segments, 3e-5)


def test_xla_equals_batched():
    rng = np.random.default_rng(3)
    positions, segments = packed_rows(rng, 2, 40)
    see = Visible(positions, segments, sequence_mask(positions, segments), "xla")
    compare(lambda q, k, v: attend(q, k, v, see), operands(rng, 2, 40, 2, 2, 8), positions, segments, 3e-5)


def test_splash_in_interpret_mode_equals_batched():
    rng = np.random.default_rng(4)
    positions, segments = packed_rows(rng, 1, 256)
    compare(lambda q, k, v: attend_splash(q, k, v, segments, interpret=True), operands(rng, 1, 256, 1, 2, 128), positions, segments, 2e-3)


def test_memory_of_the_chunked_form_grows_with_the_length_and_not_with_its_square():
    def temporaries(length):
        q, k = (jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32) for n in (4, 2))
        ints = jax.ShapeDtypeStruct((1, length), jnp.int32)
        grad = jax.jit(jax.grad(lambda q, k, v, p, s: attend_chunked(q, k, v, p, s).sum(), (0, 1, 2)))
        return grad.lower(q, k, k, ints, ints).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(16_384) < 3 * temporaries(8_192)  # scores alone would be 4 times
    assert temporaries(16_384) < 16_384**2  # a quarter of one head's scores


CFG = ModelConfig(vocab_size=64, hidden_size=128, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=128, mlp_size=64)


@pytest.mark.parametrize(
    "backend, devices, length, dtype, want",
    [
        ("cpu", 1, 768, "float32", "heads"), ("cpu", 1, 8_192, "float32", "chunked"), ("cpu", 8, 768, "float32", "xla"),
        ("gpu", 8, 768, "bfloat16", "cudnn"), ("gpu", 8, 768, "float32", "xla"), ("gpu", 1, 28_672, "float32", "chunked"),
        ("tpu", 8, 28_672, "bfloat16", "splash"), ("tpu", 8, 1_000, "bfloat16", "xla"), ("tpu", 8, 5_000, "bfloat16", "chunked"),
    ],
)  # fmt: skip
def test_what_auto_chooses(backend, devices, length, dtype, want):
    assert choose(CFG.replace(dtype=dtype), length, backend, devices) == want
    assert choose(CFG.replace(attention="chunked"), length, backend, devices) == "chunked"


@pytest.mark.parametrize(
    "changes, lengths, backend, devices, message",
    [
        ({"attention": "cudnn"}, (768,), "cpu", 1, "needs a GPU and this is cpu: valid are auto, heads, xla, chunked"),
        ({"attention": "splash"}, (768,), "gpu", 1, "needs a TPU and this is gpu"),
        ({"attention": "heads"}, (768,), "cpu", 8, "single device and there are 8"),
        ({"attention": "cudnn"}, (768,), "gpu", 1, "16 bit only"),
        ({"attention": "splash"}, (768, 1_000), "tpu", 8, "multiple of 128 tokens, got 1000"),
        ({"attention": "splash", "head_dim": 64}, (768,), "tpu", 8, "head size that is a multiple of 128, got 64"),
    ],
)
def test_an_implementation_that_cannot_run_here_is_named(changes, lengths, backend, devices, message):
    with pytest.raises(ConfigError, match=message):
        check_available(CFG.replace(**changes), lengths, backend, devices)


def test_cudnn_gets_the_mask_of_segments_and_positions(monkeypatch):
    seen = {}
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **kw: seen.update(kw) or q)
    positions, segments = packed_rows(np.random.default_rng(0), 2, 16)
    attend(*operands(np.random.default_rng(0), 2, 16, 1, 2, 8), Visible(positions, segments, sequence_mask(positions, segments), "cudnn"))
    assert seen["implementation"] == "cudnn" and seen["mask"].shape == (2, 1, 16, 16)

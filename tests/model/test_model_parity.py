"""Every family and option against transformers: committed golden values everywhere, the live comparison where torch is installed."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from sage_jax.model.cache import make_cache
from sage_jax.model.hf import load_hf, save_hf
from sage_jax.model.qwen import token_logprobs
from sage_jax.model.sharding import make_mesh
from tests.model import families, make_goldens

GOLDEN = Path(__file__).parent / "golden" / "families.npz"
LOGITS_ATOL = 2e-4


@functools.cache
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    @functools.cache
    def load(name):
        folder = families.write_folder(tmp_path_factory.mktemp(name), name)
        cfg, graph, params = load_hf(folder, make_mesh(devices=jax.devices()[:1]))
        return cfg, graph, params

    return load


def positions(rows, length):
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graph, params, ids, positions, segments):
    policy = nnx.merge(graph, params)
    return policy.logits(policy(ids, positions, segment_ids=segments)[0])


def whole(graph, params, ids):
    ids = jnp.asarray(ids, jnp.int32)
    return np.asarray(logits_of(graph, params, ids, positions(*ids.shape), jnp.ones_like(ids)))


@pytest.mark.parametrize("name", families.CAUSAL)
def test_logits_equal_the_golden_ones(load, name):
    _, graph, params = load(name)
    np.testing.assert_allclose(whole(graph, params, families.ids(name)), golden()[f"{name}/logits"], atol=LOGITS_ATOL)


@pytest.mark.parametrize("name", families.CAUSAL)
def test_gradients_equal_the_golden_ones(load, name, tmp_path):
    cfg, graph, params = load(name)
    ids = jnp.asarray(families.ids(name), jnp.int32)

    def total(params):
        return token_logprobs(nnx.merge(graph, params), ids, positions(*ids.shape), None, 1.0, cfg.vocab_size)[0].sum()

    save_hf(tmp_path / "g", cfg, jax.jit(jax.grad(total))(params), None, dtype="float32")
    ours = load_file(tmp_path / "g" / "model.safetensors")
    wanted = {k.removeprefix(f"{name}/grad/"): v for k, v in golden().items() if k.startswith(f"{name}/grad/")}
    assert set(ours) == set(wanted)
    for tensor, (norm, projection) in wanted.items():
        g = ours[tensor]
        got = [np.linalg.norm(g), (g * families.probe(tensor, g.shape)).sum()]
        np.testing.assert_allclose(got, [norm, projection], atol=1e-3 * norm + 1e-4, err_msg=tensor)


@pytest.mark.parametrize("name", families.CAUSAL)
def test_padded_packed_and_cached_equal_the_golden_logits(load, name):
    cfg, graph, params = load(name)
    ids, want = families.ids(name), golden()[f"{name}/logits"]
    length, scaling = ids.shape[1], cfg.rope_scaling
    left, right = 5, 3

    def at(offset):
        row, where, segment = np.full(length + left + right, 7), np.full(length + left + right, 0), np.zeros(length + left + right, int)
        row[offset : offset + length], where[offset : offset + length] = ids[0], np.arange(length)
        segment[offset : offset + length] = 1
        return [jnp.asarray(a[None], jnp.int32) for a in (row, where, segment)]

    for offset in (left + right, 0):  # left-padded, right-padded
        got = np.asarray(logits_of(graph, params, *at(offset)))[0, offset : offset + length]
        np.testing.assert_allclose(got, want[0], atol=LOGITS_ATOL)
    packed = [jnp.asarray(a.reshape(1, -1), jnp.int32) for a in (ids, np.tile(np.arange(length), 2), np.repeat([1, 2], length))]
    got = np.asarray(logits_of(graph, params, *packed))[0].reshape(want.shape)
    np.testing.assert_allclose(got, want, atol=LOGITS_ATOL)
    if scaling is not None and scaling.kind == "dynamic":
        return  # longer than its max_position: no cache can hold it, see test_model_rope
    policy, cache, done = nnx.merge(graph, params), make_cache(cfg, 2, length), 0
    step = jax.jit(lambda ids, where, cache: policy(ids, where, cache=cache))
    for n in (7, 1, 9, 1, 6):
        chunk = slice(done, done + n)
        hidden, cache = step(jnp.asarray(ids[:, chunk], jnp.int32), positions(2, length)[:, chunk], cache)
        np.testing.assert_allclose(policy.logits(hidden), want[:, chunk], atol=LOGITS_ATOL)
        done += n


@pytest.mark.parity
@pytest.mark.parametrize("name", families.CAUSAL)
def test_live_comparison_and_the_goldens_are_current(load, name, tmp_path):
    pytest.importorskip("torch", reason="needs the extra: pip install sage-jax[parity]")
    logits, gradients = make_goldens.reference(name, tmp_path / "hf")
    np.testing.assert_allclose(logits, golden()[f"{name}/logits"], atol=1e-5)
    cfg, graph, params = load(name)
    np.testing.assert_allclose(whole(graph, params, families.ids(name)), logits, atol=LOGITS_ATOL)
    ids = jnp.asarray(families.ids(name), jnp.int32)
    grad = jax.jit(jax.grad(lambda p: token_logprobs(nnx.merge(graph, p), ids, positions(*ids.shape), None, 1.0, cfg.vocab_size)[0].sum()))
    save_hf(tmp_path / "g", cfg, grad(params), None, dtype="float32")
    ours = load_file(tmp_path / "g" / "model.safetensors")
    for tensor, g in gradients.items():
        np.testing.assert_allclose(ours[tensor], g, atol=1e-3 * np.abs(g).max() + 1e-5, err_msg=tensor)


def test_the_golden_file_holds_these_families():
    assert {k.split("/")[0] for k in golden()} == set(families.CAUSAL)

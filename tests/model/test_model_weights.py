"""Weights through our arrays and back: every family, type, file split, in slabs and at once; several devices and processes."""

import contextlib
import json
import re
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from sage_jax.errors import CheckpointError, ConfigError
from sage_jax.model import transfer
from sage_jax.model.config import ModelConfig
from sage_jax.model.hf import DTYPES, load_hf, save_hf
from sage_jax.model.lora import merged
from sage_jax.model.sharding import abstract_params, make_mesh
from tests.model import families

TINY = ModelConfig(vocab_size=64, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=24)
KINDS = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2.5 untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": {"model_type": "qwen3_moe", "tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({}, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def tiny(mesh, tmp_path_factory):
    """(params, folder of them in float32)"""
    folder, params = tmp_path_factory.mktemp("tiny") / "m", drawn(abstract_params(TINY)[1])
    save_hf(folder, TINY, params, None, "float32")
    return params, folder


def drawn(params, seed=0):
    """Like `params`, abstract or not, with random values; not by `create_params`, which compiles for long."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), params)


def stored(folder: Path) -> dict[str, tuple]:
    """name -> (type, shape, bytes), read by the safetensors library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, info in safetensors.deserialize(file.read_bytes()):
            assert name not in found
            found[name] = (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
    return found


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray], parts: dict[str, list[str]] | None = None) -> Path:
    """A model folder of one file, or of the `parts`: file -> names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file, names in (parts or {"model": list(tensors)}).items():
        save_file({n: tensors[n] for n in names}, folder / f"{file}.safetensors", metadata={"format": "pt"})
    if parts:
        index = {n: f"{file}.safetensors" for file, names in parts.items() for n in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def dealt(tensors: dict[str, np.ndarray], files: int) -> dict[str, list[str]] | None:
    return {f"part{n}": sorted(tensors)[n::files] for n in range(files)} if files > 1 else None


@contextlib.contextmanager
def slabs_of(size: int):
    """How many bytes cross at once: 1 makes every tensor cross alone."""
    before, transfer.AT_ONCE = transfer.AT_ONCE, size
    try:
        yield
    finally:
        transfer.AT_ONCE = before


def awkward(tensors: dict[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """The tensors in `dtype`, with values that a careless conversion changes."""
    tensors = {name: a.astype(dtype) for name, a in tensors.items()}
    special = np.array([-0.0, np.inf, np.finfo(np.float16).smallest_subnormal if dtype == np.float16 else 1e-39, np.nan], np.float32)
    tensors["model.embed_tokens.weight"].reshape(-1)[:4] = special.astype(dtype)
    return tensors


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_hugging_face_to_ours_and_back_is_identical(kind, data, mesh, tmp_path_factory):
    draw = data.draw
    heads = draw(st.sampled_from([2, 3, 4]), "heads")
    config = {
        **KINDS[kind],
        "vocab_size": draw(st.integers(5, 40), "vocabulary"), "hidden_size": heads * 4, "num_hidden_layers": draw(st.integers(1, 3), "layers"),
        "num_attention_heads": heads, "num_key_value_heads": draw(st.sampled_from([1, heads]), "kv heads"),
        "intermediate_size": draw(st.integers(1, 20), "mlp"),
    }  # fmt: skip
    if kind != "qwen2" and kind != "qwen2.5 untied":
        config["head_dim"] = draw(st.sampled_from([2, 6]), "head size")
    if kind == "qwen3_moe":
        config |= {"num_experts": draw(st.integers(2, 5), "experts"), "num_experts_per_tok": 2}
        config["moe_intermediate_size"] = draw(st.integers(1, 9), "expert size")
    dtype = draw(st.sampled_from(sorted(DTYPES)), "type")
    tensors = awkward(families.tensors(config), DTYPES[dtype])
    tmp = tmp_path_factory.mktemp("round")
    given_ = write(tmp / "in", config, tensors, dealt(tensors, draw(st.integers(1, 3), "files")))
    cfg, _, params = load_hf(given_, mesh)
    save_hf(tmp / "out", cfg, params, None, dtype, max_shard_bytes=draw(st.sampled_from([1, 2_000, 1 << 30]), "shard"))
    assert stored(tmp / "out") == stored(given_)


@pytest.mark.parametrize(
    "family, dtype, size",
    [
        ("qwen2_untied", "float32", 1),  # one tensor at a time
        ("qwen3_moe_normalised", "bfloat16", 3 * 32 * 24 * 2),  # half of a layer's experts, several layers of attention
    ],
)
def test_in_slabs_equals_at_once(family, dtype, size, mesh, tmp_path):
    config = {**families.FAMILIES[family], "num_hidden_layers": 4}
    folder = write(tmp_path / "in", config, awkward(families.tensors(config), DTYPES[dtype]))
    cfg, _, whole = load_hf(folder, mesh)
    with slabs_of(size):
        parts = load_hf(folder, mesh)[2]
        jax.tree.map(np.testing.assert_array_equal, whole, parts)
        save_hf(tmp_path / "out", cfg, parts, None, dtype)
    assert stored(tmp_path / "out") == stored(folder)


def test_layers_of_different_types_keep_their_values(tiny, mesh, tmp_path):
    _, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    kinds = [DTYPES["bfloat16"], DTYPES["float16"]]
    tensors = {n: np.frombuffer(data, np.float32).reshape(shape) * 1e3 for n, (_, shape, data) in stored(folder).items()}
    tensors = {n: a.astype(kinds["layers.1." in n]) for n, a in tensors.items()}
    write(tmp_path / "m", config, tensors)
    for size in (1, 1 << 24):
        with slabs_of(size):
            gate = np.asarray(load_hf(tmp_path / "m", mesh)[2].layers.gate[...])
        for n in range(2):
            np.testing.assert_array_equal(gate[n], tensors[f"model.layers.{n}.mlp.gate_proj.weight"].T.astype(np.float32))


def test_shards_are_within_the_limit_and_the_index_names_what_they_hold(tiny, mesh, tmp_path):
    params, one = tiny
    for limit in (1, 2_500, 6_000):
        save_hf(tmp_path / "m", TINY, params, None, "float32", max_shard_bytes=limit)
        files = sorted(tmp_path.glob("m/*.safetensors"))
        index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
        assert [f.name for f in files] == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
        held = {name: f.name for f in files for name, _ in safetensors.deserialize(f.read_bytes())}
        assert index["weight_map"] == held
        assert index["metadata"]["total_size"] == sum(len(data) for *_, data in stored(one).values())
        for f in files:
            assert f.stat().st_size <= limit or len([n for n in held.values() if n == f.name]) == 1
        assert stored(tmp_path / "m") == stored(one)
        jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "m", mesh)[2], params)
    with pytest.raises(ConfigError, match="max_shard_bytes=0"):
        save_hf(tmp_path / "m", TINY, params, None, max_shard_bytes=0)


def test_the_host_holds_one_tensor_at_a_time(mesh, tmp_path):
    """Allocations of numpy are counted, which does not depend on the machine: 56 MB of parameters cross."""
    cfg = TINY.replace(vocab_size=4_096, hidden_size=256, num_layers=16, mlp_size=1_024)
    params = drawn(abstract_params(cfg)[1])
    largest = 4_096 * 256 * 4
    assert sum(a.nbytes for a in jax.tree.leaves(params)) > 13 * largest
    with slabs_of(1 << 20):
        tracemalloc.start()
        save_hf(tmp_path / "m", cfg, params, None, "float32")
        write_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        load_hf(tmp_path / "m", mesh)
        read_peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    slack = 4 << 20  # small parameters, which are read at once, and Python's own objects
    assert write_peak < largest + slack and read_peak < largest + slack, (write_peak, read_peak)


def test_progress_counts_tensors(tiny, mesh, tmp_path):
    seen = []

    @contextlib.contextmanager
    def bar(name, total):
        done = []
        yield lambda n=1: done.append(n)
        seen.append((name, total, sum(done)))

    params, folder = tiny
    n = len(stored(folder))
    for size in (1, 1 << 24):
        with slabs_of(size):
            load_hf(folder, mesh, bar=bar)
    save_hf(tmp_path / "out", TINY, params, None, bar=bar)
    assert seen == [("load m", n, n), ("load m", n, n), ("write out", n, n)]


def test_names_without_prefix_as_in_embedding_folders(tiny, mesh, tmp_path):
    params, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: np.frombuffer(data, np.float32).reshape(shape) for n, (_, shape, data) in stored(folder).items()}
    bare = {n.removeprefix("model."): a for n, a in tensors.items()}
    jax.tree.map(np.testing.assert_array_equal, load_hf(write(tmp_path / "bare", config, bare, dealt(bare, 2)), mesh)[2], params)
    mixed = {**tensors, "norm.weight": tensors["model.norm.weight"]}
    del mixed["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"mixed: 23 as model\..*, 1 as norm\.weight.*missing model\.norm.*surplus norm\.weight"):
        load_hf(write(tmp_path / "mixed", config, mixed), mesh)
    # the body alone of an untied model: loaded as such when asked for
    untied = {**config, "tie_word_embeddings": False}
    with pytest.raises(CheckpointError, match=r"1 faults: missing lm_head\.weight \[64, 16\]"):
        load_hf(write(tmp_path / "body", untied, bare), mesh)
    assert not hasattr(load_hf(tmp_path / "body", mesh, tie_embeddings=True)[2], "head")


def test_a_stored_head_of_a_tied_model_must_be_the_embedding(tiny, mesh, tmp_path):
    params, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: np.frombuffer(data, np.float32).reshape(shape) for n, (_, shape, data) in stored(folder).items()}
    embed = tensors["model.embed_tokens.weight"]
    write(tmp_path / "same", config, {**tensors, "lm_head.weight": embed})
    jax.tree.map(np.testing.assert_array_equal, load_hf(tmp_path / "same", mesh)[2], params)
    other = embed.copy()
    other[-1, -1] += 1
    for n, head in enumerate((other, embed[:-1])):
        write(tmp_path / f"other{n}", config, {**tensors, "lm_head.weight": head})
        with pytest.raises(CheckpointError, match=r"lm_head\.weight .* differs from the embedding, and tie_word_embeddings is true"):
            load_hf(tmp_path / f"other{n}", mesh)
    save_hf(tmp_path / "out", TINY, params, None)
    assert not [n for n in stored(tmp_path / "out") if "lm_head" in n]


def test_all_faults_of_all_files_are_in_one_error(tiny, mesh, tmp_path):
    _, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: np.frombuffer(data, np.float32).reshape(shape) for n, (_, shape, data) in stored(folder).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors |= {"model.norm.weight": np.zeros(5, np.float32), "extra.weight": np.zeros(3, np.float32), "whole.weight": np.zeros(3, np.int32)}
    names = sorted(tensors)
    m = write(tmp_path / "m", config, tensors, {"good": [names[0], *names[9:]], **{f"bad{n}": names[1 + n :: 8][:1] for n in range(8)}})
    damage = {0: lambda b: b[:-1], 1: lambda b: b[:20], 2: lambda b: b[:3], 3: lambda b: b[:8] + b"x" + b[9:], 4: lambda b: b"\xff" * 8 + b[8:]}
    for n, change in damage.items():
        file = m / f"bad{n}.safetensors"
        file.write_bytes(change(file.read_bytes()))
    (m / "bad5.safetensors").unlink()
    with pytest.raises(CheckpointError) as error:
        load_hf(m, mesh)
    faults = str(error.value).split("; ")
    wanted = [
        r"bad0\.safetensors is truncated: its tensors end at byte \d+ and it has \d+", f"{names[1]} cut",
        r"bad1\.safetensors is truncated: its header wants",
        r"bad2\.safetensors is truncated: it has 3 bytes", r"bad3\.safetensors is damaged: its header is no JSON",
        r"bad4\.safetensors is damaged: its header claims",
        r"bad5\.safetensors, which the index names, is missing", r"^whole\.weight in good\.safetensors has dtype I32: valid are F32, F16, BF16$",
        r"^missing model\.layers\.1\.mlp\.up_proj\.weight \[24, 16\]$", r"^surplus extra\.weight \[3\]$", r"^surplus whole\.weight \[3\]$",
        r"^wrong shape model\.norm\.weight \[5\] instead of \[16\]$",
    ]  # fmt: skip
    for pattern in wanted:
        assert len([f for f in faults if re.search(pattern, f)]) == 1, (pattern, faults)
    assert len(faults) == len(wanted)  # what lies in a lost file is not called missing too

    (m / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load_hf(m, mesh)
    (m / "model.safetensors.index.json").unlink()
    (m / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"1 faults: there is neither model\.safetensors nor .*; pytorch_model\.bin is not read"):
        load_hf(m, mesh)


@pytest.mark.parametrize(
    "header, why",
    [
        ({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, "a in model.safetensors has dtype F64"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, r"damaged: a \[3\] F32 has 8 bytes"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "damaged: its header has no dtype, shape or place of a"),
        ([1], "damaged: its header is no JSON object"),
    ],
)
def test_headers_that_lie(header, why, tiny, mesh, tmp_path):
    (tmp_path / "config.json").write_text((tiny[1] / "config.json").read_text())
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=why):
        load_hf(tmp_path, mesh)
    for content in ("[1", "[1]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
            load_hf(tmp_path, mesh)


def test_adapters_are_made_on_load_and_merged_on_write(mesh, tiny, tmp_path):
    params, folder = tiny
    cfg, _, fresh = load_hf(folder, mesh, lora_rank=2, lora_alpha=6.0, lora_targets=("o",), seed=5)
    assert jax.tree.structure(fresh) == jax.tree.structure(abstract_params(cfg)[1])
    assert fresh.layers.o_lora_a[...].std() > 0 and not fresh.layers.o_lora_b[...].any()
    np.testing.assert_array_equal(fresh.layers.q[...], params.layers.q[...])
    save_hf(tmp_path / "fresh", cfg, fresh, None, "float32")
    assert stored(tmp_path / "fresh") == stored(folder)  # B is zero
    trained = drawn(fresh, 1)
    plain, want = merged(cfg, trained)
    save_hf(tmp_path / "want", plain, want, None, "float32")
    for size in (1, 1 << 24):
        with slabs_of(size):
            save_hf(tmp_path / "got", cfg, trained, None, "float32")
        got, expected = stored(tmp_path / "got"), stored(tmp_path / "want")
        assert got.keys() == expected.keys()
        for name in got:
            pair = [np.frombuffer(x[name][2], np.float32) for x in (got, expected)]
            np.testing.assert_allclose(*pair, atol=1e-5, err_msg=name)
    assert (tmp_path / "got/config.json").read_text() == (folder / "config.json").read_text()


def child(code: str, devices: int, *args: str) -> subprocess.Popen:
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    path = ":".join([str(Path(__file__).parents[2]), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args], env={**env, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err[-3000:]
    return out


@pytest.mark.slow
def test_eight_devices_read_their_parts_and_write_the_same_file(mesh, tmp_path):
    code = """
    import sys
    from pathlib import Path
    import jax, numpy as np
    from sage_jax.model import transfer
    from sage_jax.model.hf import load_hf, save_hf
    from sage_jax.model.sharding import make_mesh, place
    tmp = Path(sys.argv[1])
    one = jax.tree.map(np.asarray, load_hf(tmp / "in", make_mesh({}, devices=jax.devices()[:1]))[2])
    for shape in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "expert": 4}):
        mesh = make_mesh(shape)
        for size in (1, 1 << 24):
            transfer.AT_ONCE = size
            cfg, graph, params = load_hf(tmp / "in", mesh)
            jax.tree.map(np.testing.assert_array_equal, one, params)
            for array, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(place(params, mesh))):
                assert array.sharding.is_equivalent_to(sharding, array.ndim)
            save_hf(tmp / "out", cfg, params, None, "float32")
            assert (tmp / "out/model.safetensors").read_bytes() == (tmp / "one/model.safetensors").read_bytes(), (size, shape)
    """
    config = {**families.FAMILIES["qwen3_moe_normalised"], "num_experts": 8}
    write(tmp_path / "in", config, families.tensors(config))
    cfg, _, params = load_hf(tmp_path / "in", mesh)
    save_hf(tmp_path / "one", cfg, params, None, "float32")
    finish(child(code, 8, str(tmp_path)))


@pytest.mark.slow
def test_two_processes_read_their_parts_and_the_first_writes(tiny, tmp_path):
    code = """
    import sys
    from pathlib import Path
    folder, tmp, me, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    import jax, numpy as np
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
    from sage_jax.errors import CheckpointError
    from sage_jax.model import transfer
    from sage_jax.model.hf import load_hf, save_hf
    from sage_jax.model.sharding import make_mesh
    for size in (1, 1 << 24):
        transfer.AT_ONCE = size
        cfg, graph, params = load_hf(folder, make_mesh({"fsdp": 4}))
        assert not params.layers.q[...].is_fully_addressable
        save_hf(tmp / "m", cfg, params, None, "float32", max_shard_bytes=6_000)
        assert (tmp / "m/model.safetensors.index.json").exists()
    (tmp / "busy").mkdir(exist_ok=True)
    (tmp / "busy/other.txt").touch()
    try:
        save_hf(tmp / "busy", cfg, params, None)
    except CheckpointError as error:
        print(error)
    """
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    both = [child(code, 2, str(tiny[1]), str(tmp_path), str(n), port) for n in range(2)]
    outputs = [finish(p) for p in both]
    assert "is not replaced" in outputs[0] and "the first process failed" in outputs[1]
    assert stored(tmp_path / "m") == stored(tiny[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["busy", "m"]

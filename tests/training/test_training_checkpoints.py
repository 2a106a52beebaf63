"""Save, restore, damage, failures. Small arrays, the real Orbax and Grain."""

import functools
import json
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sage_jax.errors import CheckpointError
from sage_jax.model.config import ModelConfig
from sage_jax.model.sharding import create_params, make_mesh
from sage_jax.rl.accumulate import Stats, UpdateStep
from sage_jax.rl.batch import RowShape, pack
from sage_jax.training.checkpoints import Checkpoints, _Folder
from sage_jax.training.data import scenario_iterator
from sage_jax.training.optimizer import init_opt_state, make_optimizer, make_schedule
from sage_jax.training.state import TrainState

CFG = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, mlp_size=8)
IDS = [f"s{i}" for i in range(10)]


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({}, jax.devices()[:1])


def adamw():
    return make_optimizer(make_schedule("constant", 1e-2, 0, 10), weight_decay=0.1)


@functools.cache
def first_state(mesh):
    params = create_params(CFG, mesh, 0)[1]
    return TrainState(params, init_opt_state(adamw(), params, mesh))


def fresh(mesh):
    """A state of its own: updates donate it."""
    state = first_state(mesh)
    return TrainState(*(jax.tree.map(jnp.copy, t) for t in (state.params, state.opt_state)))


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves((state.params, state.opt_state))]


def save_steps(root, mesh, steps, keep=3, metric=None):
    state, it = fresh(mesh), scenario_iterator(IDS, 2, 0)
    with Checkpoints(root, keep=keep, best_metric="eval_dev/sgc") as c:
        for step in steps:
            next(it)
            state = TrainState(jax.tree.map(lambda x, s=step: x * 0 + s, state.params), state.opt_state, step=step, updates=step)
            c.save(step, state, it, {"seed": 7, "python": [1, 2**90]}, {"eval_dev/sgc": metric[step]} if metric else None)


def value(state):
    return float(jax.tree.leaves(state.params)[0].ravel()[0])


def test_restore_gives_back_all_and_continues_bit_for_bit(tmp_path, mesh):
    """The optimizer's structure survives, the first step does not retrace, and the result is that of not stopping."""
    tx = adamw()
    state, it = fresh(mesh), scenario_iterator(IDS, 2, 0)
    def loss(p, b):
        return (sum((x**2).sum() * (i + 1) for i, x in enumerate(jax.tree.leaves(p))), Stats({}, {}, {}))
    step = UpdateStep(loss, tx, state, mesh)
    batch = [b for b in pack([], [RowShape(1, 4)]).micro_batches]
    batch[0].denominator[:] = 1
    state, _, _ = step(state, batch)
    next(it)
    with Checkpoints(tmp_path, keep=2) as c:
        assert c.latest_step() is None
        c.save(1, state, it, {"seed": 3})
        expected_ids = [next(it) for _ in range(6)]  # after save: must not leak into it
        state, _, _ = step(state, batch)  # donates what is being saved
    compiled = step.compiled()

    new_it = scenario_iterator(IDS, 2, 0)
    like = fresh(mesh)
    with Checkpoints(tmp_path, keep=2) as c:
        assert c.latest_step() == 1
        restored, meta = c.restore_latest(like, new_it)
    assert meta == {"seed": 3} and (restored.updates, restored.step) == (1, 0)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(like.opt_state)
    assert [next(new_it) for _ in range(6)] == expected_ids
    resumed, _, _ = step(restored, batch)
    assert step.compiled() == compiled
    for a, b in zip(leaves(resumed), leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_newest_are_kept_and_the_best_has_its_own_place(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1, 2, 3, 4, 5], keep=2, metric={1: 0.1, 2: 0.6, 3: 0.5, 4: float("nan"), 5: 0.6})
    c = Checkpoints(tmp_path, keep=2, best_metric="eval_dev/sgc")
    assert c.steps() == [5, 4] and c.best_value() == 0.6
    best, meta = c.restore_params(fresh(mesh).params, "best")
    assert value(best) == 2 and best.opt_state is None and meta == {"seed": 7, "python": [1, 2**90]}
    assert value(c.restore_params(fresh(mesh).params, "last")[0]) == 5
    assert value(c.restore_params(fresh(mesh).params, "4")[0]) == 4
    with pytest.raises(CheckpointError, match="holds no whole"):
        c.restore_params(fresh(mesh).params, "3")
    with pytest.raises(CheckpointError, match="choices"):
        c.restore_params(fresh(mesh).params, "newest")
    c.close()


def test_the_best_is_on_disk_before_the_step_is(tmp_path, mesh, monkeypatch):
    """A kill between the two must not lose the best one: the run would go on behind this step."""
    state, it = fresh(mesh), scenario_iterator(IDS, 2, 0)
    c = Checkpoints(tmp_path, best_metric="eval_dev/sgc")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(c._last, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        c.save(1, state, it, {}, {"eval_dev/sgc": 0.5})
    monkeypatch.undo()
    assert (tmp_path / "best/1/MANIFEST.json").exists() and c.latest_step() is None
    c.save(1, state, it, {}, {"eval_dev/sgc": 0.6})  # done again, not bit for bit
    c.close()
    assert c.steps() == [1] and c.best_value() == 0.5
    c.close()


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_damage_to_any_file_is_found_and_an_older_step_is_taken(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1, 2])
    folder = _Folder(tmp_path / "last", 3)
    harms = (flip, lambda p: p.write_bytes(b""), os.remove, lambda p: p.write_bytes(p.read_bytes()[:-1]))
    files = sorted(p for p in (tmp_path / "last/2").rglob("*") if p.is_file() and p.stat().st_size and p.name != "MANIFEST.json")
    assert {f.relative_to(tmp_path / "last/2").parts[0] for f in files} >= {"params", "opt", "data", "meta"}
    for file in files:
        content = file.read_bytes()
        for harm in harms:
            harm(file)
            with pytest.warns(UserWarning, match=r"last/2 is damaged"):
                assert list(folder.whole()) == [1], file
            file.write_bytes(content)
    assert list(folder.whole()) == [2, 1]
    flip(files[0])
    with Checkpoints(tmp_path) as c, pytest.warns(UserWarning, match="last/2"):
        state, _ = c.restore_latest(fresh(mesh), scenario_iterator(IDS, 2, 0))
    assert value(state) == 1


def test_all_damaged_or_none_is_an_error(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1])
    flip(tmp_path / "last/1/meta/metadata")
    with Checkpoints(tmp_path) as c, pytest.warns(UserWarning, match="damaged"), pytest.raises(CheckpointError, match="all checkpoints"):
        c.restore_latest(fresh(mesh), scenario_iterator(IDS, 2, 0))
    with Checkpoints(tmp_path / "new") as c, pytest.raises(CheckpointError, match="no finished"):
        c.restore_latest(fresh(mesh), scenario_iterator(IDS, 2, 0))
    assert not (tmp_path / "new").exists()


def test_unfinished_step_is_passed_over_and_done_again(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1, 2])
    (tmp_path / "last/2/MANIFEST.json").unlink()  # killed between Orbax's commit and the manifest
    it = scenario_iterator(IDS, 2, 0)
    with Checkpoints(tmp_path) as c:
        with pytest.warns(UserWarning, match="not finished"):
            assert c.latest_step() == 1
            state, _ = c.restore_latest(fresh(mesh), it)
        assert value(state) == 1
        with pytest.warns(UserWarning, match="moved to"):
            c.save(2, state, it, {})
        c.wait()
        assert c.steps() == [2, 1]
        with pytest.raises(CheckpointError, match="already there"):
            c.save(2, state, it, {})


def test_another_optimizer_or_model_is_named_and_not_taken_for_damage(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1])
    other = optax.sgd(0.1, momentum=0.9)
    params = fresh(mesh).params
    with Checkpoints(tmp_path) as c, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match="another optimizer"):
            c.restore_latest(TrainState(params, init_opt_state(other, params, mesh)), scenario_iterator(IDS, 2, 0))
        params = create_params(CFG.replace(hidden_size=16), mesh, 0)[1]
        wide = TrainState(params, init_opt_state(adamw(), params, mesh))
        with pytest.raises(CheckpointError, match=r"another model.*saved float32\[16, 8\], now float32\[16, 16\]"):
            c.restore_latest(wide, scenario_iterator(IDS, 2, 0))


def test_failed_background_save_is_raised(tmp_path, mesh, monkeypatch):
    """The disk fails while the manifest is written, in the background."""
    from sage_jax.training import checkpoints as module

    def full(path):
        raise OSError(28, "No space left on device", str(path))

    state, it = fresh(mesh), scenario_iterator(IDS, 2, 0)
    monkeypatch.setattr(module, "_write_manifest", full)
    c = Checkpoints(tmp_path)
    c.save(1, state, it, {})
    with pytest.raises(CheckpointError, match="No space left"):
        c.save(2, state, it, {})
    c.save(3, state, it, {})
    with pytest.raises(CheckpointError, match=r"saving .*3 failed"):
        c.close()
    assert c.latest_step() is None


def test_manifest_covers_every_file(tmp_path, mesh):
    save_steps(tmp_path, mesh, [1])
    files = {str(p.relative_to(tmp_path / "last/1")) for p in (tmp_path / "last/1").rglob("*") if p.is_file()}
    assert set(json.loads((tmp_path / "last/1/MANIFEST.json").read_text())["files"]) == files - {"MANIFEST.json"}

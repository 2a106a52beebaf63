"""Where a policy comes from: checkpoints of runs, model folders that lie in a folder of such a name."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwen_chat import TEMPLATES

from configs import evaluate, sage_demo
from sage_jax.errors import ConfigError
from sage_jax.model.config import pad_vocab
from sage_jax.model.presets import PRESETS
from sage_jax.model.sharding import abstract_params
from sage_jax.model.tokenizer import train_bpe
from sage_jax.training import setup
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.training.data import scenario_iterator
from sage_jax.training.state import TrainState


@pytest.mark.parametrize("name", ["best", "7", "mine"])
def test_a_model_folder_may_lie_in_a_folder_called_checkpoints(tmp_path, name):
    config = evaluate.get_config()
    folder = tmp_path / "checkpoints" / name
    with pytest.raises(ConfigError, match="neither 'bundled'" if name == "mine" else "is no run of sage_jax.train"):
        setup.check_policy(config, source=str(folder))
    shutil.copytree(setup.BUNDLED, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    setup.check_policy(config, source=str(folder))


def test_a_chat_template_without_a_switch_for_thinking_raises_at_start():
    config = evaluate.get_config()
    config.model.thinking = False
    for source in ("bundled", "random"):
        with pytest.raises(ConfigError, match="no such switch"):
            setup.check_policy(config, source=source)


def test_a_run_from_new_weights_is_evaluated_with_its_own_shape_and_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "narrow", PRESETS["tiny"].replace(hidden_size=16, num_layers=1, mlp_size=16))
    tokenizer = train_bpe(["alpha beta"] * 9, 300)
    tokenizer.fast.chat_template = TEMPLATES["qwen3"]
    tokenizer.save(tmp_path / "tok")
    config = sage_demo.get_config()
    config.model.update(source="random", preset="narrow", tokenizer=str(tmp_path / "tok"), thinking=False)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(setup.digest(config)))
    cfg = PRESETS["narrow"].replace(vocab_size=pad_vocab(tokenizer.vocab_size))
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), abstract_params(cfg)[1])
    with Checkpoints(run / "checkpoints") as checkpoints:
        state = TrainState(params, {"moment": jnp.zeros(1)}, step=4)
        checkpoints.save(4, state, scenario_iterator(["a", "b"], 1, 0), {})
    loaded = setup.load_policy(evaluate.get_config(), source=str(run / "checkpoints" / "last"))
    assert loaded.cfg == cfg and loaded.tokenizer.vocab_size == tokenizer.vocab_size and loaded.identity.endswith("step 4")
    assert evaluate.get_config().model.thinking and not loaded.tokenizer.thinking  # prompts as in the run
    assert all((np.asarray(x) == 0.5).all() for x in jax.tree.leaves(loaded.params))

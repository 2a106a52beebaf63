"""Every recipe can be made, keeps its types when overridden with its own values, and has no key that nothing reads."""

import importlib
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict, FrozenConfigDict

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem not in ("__init__", "common"))


def leaves(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_made_and_says_how_it_is_run(name):
    module = importlib.import_module(f"configs.{name}")
    assert f"--config=configs/{name}.py" in module.__doc__
    for arg in (None, "runlocal"):
        config = module.get_config(arg)
        FrozenConfigDict(config)
        for key, value in leaves(config):
            assert value is not None, f"{key}: give a placeholder, not None"
            assert not isinstance(value, list), f"{key}: give a tuple"
    with pytest.raises(ValueError, match="runlocal"):
        module.get_config("no_such_switch")


def test_unknown_keys_raise():
    config = importlib.import_module("configs.sage_demo").get_config()
    config.lock()
    with pytest.raises(AttributeError):
        config.rl.groupp = 3


def test_every_key_is_read():
    source = "\n".join(p.read_text() for p in (ROOT / "sage_jax").rglob("*.py"))
    config = importlib.import_module("configs.common").base()
    unread = [k for k, _ in leaves(config) if not re.search(rf"\.{k.rsplit('.', 1)[-1]}\b", source) and "collect.modes" not in k]
    assert not unread, f"nothing reads {unread}"

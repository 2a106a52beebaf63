"""Every recipe can be made, keeps its types when overridden with its own values, and has no key that nothing reads."""

import ast
import importlib
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


def test_the_order_of_switches_does_not_matter():
    quickstart = importlib.import_module("configs.quickstart")
    small, other = (quickstart.get_config(arg) for arg in ("from_scratch,smoke", "smoke,from_scratch"))
    assert dict(leaves(small)) == dict(leaves(other)) and small.sft.steps < 10 and small.run.from_scratch


def test_unknown_keys_raise():
    config = importlib.import_module("configs.sage_demo").get_config()
    config.lock()
    with pytest.raises(AttributeError):
        config.rl.groupp = 3


def test_every_key_is_read():
    config = importlib.import_module("configs.common").base()
    assert not unread(config)
    config.unlock()
    config.rl.greedy = True  # a key of that name is read elsewhere
    config.dead = 1
    assert unread(config) == ["dead", "rl.greedy"]


def unread(config):
    """Keys that no function of the package reads, as `config.section.key`, by a local name of the section, or with its whole table."""
    found = {read for path in (ROOT / "sage_jax").rglob("*.py") for read in reads(ast.parse(path.read_text()), config)}
    return sorted(k for k, _ in leaves(config) if k not in found and k.rpartition(".")[0] not in found)


def reads(tree, config):
    sections = {k for k, v in config.items() if isinstance(v, ConfigDict)}

    def place(node, names):
        """"section" or "section.key" of an expression that is one, else ""."""
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        base = node.value
        of_config = (isinstance(base, ast.Name) and base.id == "config") or (isinstance(base, ast.Attribute) and base.attr == "config")
        if of_config:
            return node.attr
        section = place(base, names)
        return f"{section}.{node.attr}" if section in sections else ""

    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                pairs = zip(target.elts, value.elts) if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [(target, value)]
                names |= {t.id: place(v, {}) for t, v in pairs if isinstance(t, ast.Name) and place(v, {}) in sections}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and (read := place(node, names)) not in {"", *sections}:
                yield read
            elif isinstance(node, ast.Subscript) and (section := place(node.value, names)) in sections:  # rl[name] for names listed nearby
                yield from (f"{section}.{n.value}" for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str))

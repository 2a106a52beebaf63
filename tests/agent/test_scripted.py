"""The scripted policy's choices, without worlds."""

import asyncio

import pytest

from sage_jax.agent.policy import Conversation, Key
from sage_jax.agent.scripted import Script, ScriptedPolicy
from sage_jax.errors import ConfigError

SCRIPT = Script(
    function='def f(name: str) -> int:\n    return len(apis.phone.search(query=name, page_limit=20))', function_name="f", call="f(name='A')",
    inline="answer = len(apis.phone.search(query='A', page_limit=20))", lookup=None, kind="question",
)


def said(policy, prompt="a task", path=(0, 0, 0)):
    conversation = Conversation(uid=str(path), messages=[{"role": "user", "content": prompt}], facts={"script": SCRIPT})
    return asyncio.run(policy.respond(conversation, Key(0, path))).text


def test_hurried_statements_read_one_small_page_and_functions_all():
    assert "page_limit=3" in said(ScriptedPolicy({"inline": 1.0}, reuse=1.0, seed=0, first_page=1.0, page_limit=3))
    assert "page_limit=20" in said(ScriptedPolicy({"inline": 1.0}, reuse=1.0, seed=0, first_page=0.0, page_limit=3))
    assert "page_limit=20" in said(ScriptedPolicy({"function": 1.0}, reuse=1.0, seed=0, first_page=1.0, page_limit=3))
    some = [said(ScriptedPolicy({"inline": 1.0}, reuse=1.0, seed=0, first_page=0.5, page_limit=3), path=(n, 0, 0)) for n in range(40)]
    assert 10 <= sum("page_limit=3" in text for text in some) <= 30


def test_a_library_is_called_or_ignored_but_never_defined_again():
    prompt = "skills:\ndef f(name: str) -> int: ..."
    assert "complete_task(answer=f(name='A'))" in said(ScriptedPolicy({"function": 1.0}, reuse=1.0, seed=0), prompt)
    ignored = said(ScriptedPolicy({"function": 1.0}, reuse=0.0, seed=0), prompt)
    assert "def " not in ignored and "page_limit=20" in ignored


def test_a_page_without_entries_is_refused():
    with pytest.raises(ConfigError, match=r"collect\.page_limit=0 must be at least 1"):
        ScriptedPolicy({"inline": 1.0}, reuse=1.0, seed=0, page_limit=0)

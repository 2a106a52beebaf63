"""Renamed copies: the same demonstration with other names, consistent in every message."""

import json

import numpy as np

from sage_jax.sft.rename import renamed

RECORD = {
    "messages": [
        {"role": "user", "content": "ida.lee@mail.com 555\nTask: Send 'see you at noon' to 'Ida Lee', my 'friend'."},
        {"role": "assistant", "content": "```python\ntext_to('Ida Lee', 'see you at noon', 'friend')\n```", "train": True},
    ],
    "meta": {"names": ["ida.lee@mail.com", "see you at noon", "Ida Lee", "friend", "555", "Lee"], "instruction": "Write to 'Ida Lee'"},
}


def test_names_are_replaced_the_same_way_everywhere():
    copy = renamed(RECORD, np.random.default_rng(0))
    user, assistant = (m["content"] for m in copy["messages"])
    for old in ("Ida", "Lee", "ida.lee", "see you at noon"):
        assert old not in user and old not in assistant
    name = assistant.split("'")[1]
    message = assistant.split("'")[3]
    assert f"'{name}', my 'friend'" in user and f"'{message}'" in user
    assert name.istitle() and len(name.split()) == 2 and len(message.split()) == 4 and message.islower()
    assert "@mail.com 555" in user and "'friend'" in assistant and "text_to(" in assistant
    assert copy["messages"][1]["train"] is True
    assert copy["meta"]["instruction"] == f"Write to '{name}'"


def test_copies_differ_repeat_and_leave_the_record_alone():
    before = json.dumps(RECORD)
    one, two = (renamed(RECORD, np.random.default_rng(s)) for s in (1, 2))
    assert one != two and one == renamed(RECORD, np.random.default_rng(1))
    assert json.dumps(RECORD) == before
    assert renamed({"messages": [{"role": "user", "content": "x"}], "meta": {}}, np.random.default_rng(0))["messages"][0]["content"] == "x"

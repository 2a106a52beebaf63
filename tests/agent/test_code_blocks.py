"""The block rule: cases by hand, and agreement of the host parser with the automaton on generated texts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_jax.agent.code_blocks import fence_automaton, first_block, quote

CASES = [
    ("```python\nprint(1)\n```", "print(1)", True),
    ("I look.\n\n```py \nx = 1\ny = 2\n```\nand more ```python\nz\n```", "x = 1\ny = 2", True),
    ("```python\nprint(1)\n", "print(1)\n", False),
    ("```python\nprint(1)\n``", "print(1)\n``", False),
    ("```python\n```", "", True),
    ("```python\r\nx\r\n```", "x\r", True),
    ("```python", None, False),
    ("text ```python\nx\n```", None, False),
    ("```json\n{}\n```\n```python\nx\n```", "x", True),
    ("```\nplain\n```\nthen\n```python\nx\n```", "x", True),
    ("```pythonic\nx\n```\n", None, False),
    ("```python3\nx\n```\n", None, False),
    ("```python\ns = 'a ``` b'\nt = '''\n ```\n'''\n```", "s = 'a ``` b'\nt = '''\n ```\n'''", True),
    ("<think>\n```python\nbad\n```\n</think>\n\n```python\ngood\n```", "good", True),
    ("<think>a</think>```python\ngood\n```", "good", True),
    ("<think>\n```python\nbad\n```\n", None, False),
    ("a <think> b </think> c <think>\n```python\nbad\n```\n</think>\n```python\nx\n```", "x", True),
    ("```python\nprint('<think>')\n```", "print('<think>')", True),
    ("```python print(1)```\n```python\nx\n```", "x", True),
    ("````md\n```python\nbad\n```\n````\n```python\nx\n```", "x", True),
    ("````python\nx\n````\n", None, False),
    ("<<think>\n```python\nbad\n```", None, False),
    ("", None, False),
]


@pytest.mark.parametrize("text,code,closed", CASES)
def test_cases(text, code, closed):
    assert first_block(text) == (code, closed)
    dfa = fence_automaton()
    assert (dfa.run(text.encode()) == dfa.accept) == closed


PIECES = ["```", "`", "````", "python", "py", "json", "\n", "\n", "\n```", "```python\n", " ", "\t", "\r", "x", "é", "<think>",
          "</think>", "<", "<th", "</", "print(1)", "'''", "\n```\n"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_parser_and_automaton_agree_at_every_prefix(text):
    dfa = fence_automaton()
    state = dfa.start
    for i in range(len(text)):
        state = dfa.run(text[i].encode(), state)
        assert (state == dfa.accept) == first_block(text[: i + 1])[1], text[: i + 1]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_agree_on_any_text(text):
    data = text.encode(errors="replace")
    dfa = fence_automaton()
    assert (dfa.run(data) == dfa.accept) == first_block(data.decode())[1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_quoted_output_holds_no_block_and_hides_none(output):
    shown = "Output:\n" + quote(output)
    assert first_block(shown)[0] is None
    assert first_block(shown + "\n```python\nx\n```") == ("x", True)


def test_quote_keeps_the_text():
    assert quote("a\nb") == "```\na\nb\n```"
    assert quote("a\n") == "```\na\n```"
    assert quote("```python\nx\n```\n") == "````\n```python\nx\n```\n````"
    assert quote("````\nx") == "    ````\n    x"

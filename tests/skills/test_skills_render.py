"""Rendering within a budget."""

import ast

import pytest

from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin
from sage_jax.skills.render import head, render


def words(text):
    return len(text.split())


def make(code):
    return extract([(0, code)], Origin("t", 0, "r", 1), created=0.0).skills


def many(n, tail=""):
    return make("".join(f'def s{i:04d}(x):\n    """Skill {i}."""\n    return x + {i}{tail}\n' for i in range(n)))


def test_everything_fits():
    code = "import functools\nK = 3\ndef h(x):\n    return x + K\n@functools.cache\ndef f(x):\n    return h(x)\n"
    result = render(make(code), budget=1000, count=words)
    assert not result.dropped and [s.name for s in result.shown] == ["h", "f"]
    assert result.text.count("def h(") == 1 and result.text.count("K = 3") == 1  # the helper is listed as a skill
    space = {}
    exec(result.text, space)
    assert space["f"](1) == 4
    assert result.tokens == words(result.text)


def test_large_library_keeps_the_best_whole_and_counts_the_rest():
    skills = many(1000)
    calls = []
    one = words(render(skills[:1], budget=100, count=words).text)
    result = render(skills, budget=30 * one, count=lambda t: calls.append(1) or words(t))
    assert [s.name for s in result.shown] == [f"s{i:04d}" for i in range(970, 1000)]
    assert len(result.dropped) == 970 and result.tokens <= 30 * one
    assert len(calls) < 2500
    less = render(skills, budget=30 * one - 1, count=words)
    assert [s.name for s in less.shown] == [s.name for s in result.shown][1:]
    assert less.tokens >= 0.8 * (30 * one - 1)


def test_one_too_large_skill_does_not_drop_the_others():
    big = make("def big():\n    return '" + "w " * 500 + "'\n")
    result = render([*many(3), *big], budget=50, count=words)
    assert [s.name for s in result.dropped] == ["big"] and len(result.shown) == 3


@pytest.mark.parametrize("style", ["source", "signature"])
@pytest.mark.parametrize("budget", range(0, 60, 7))
def test_never_over_budget_by_characters(style, budget):
    result = render(many(6), budget=budget * 6, count=len, style=style)
    assert len(result.text) <= budget * 6 and len(result.shown) + len(result.dropped) == 6
    ast.parse(result.text)


def test_exact_budget_is_used():
    skills = many(4)
    full = render(skills, budget=10**6, count=len)
    assert not render(skills, budget=full.tokens, count=len).dropped
    assert len(render(skills, budget=full.tokens - 1, count=len).dropped) == 1


def test_head_keeps_the_docstring_as_written():
    source = '@print\nasync def f(a, *, b: int = 2) -> "str":\n    r"""Say "hi" ```x``` \\d.\n\n    More.\n    """\n    return 1'
    (skill,) = make(source)
    assert head(skill) == source.replace("return 1", "...")
    assert head(make("def g(x=1): return x")[0]) == "def g(x=1): ..."
    assert head(make("async def g(): 'doc'; return 2")[0]) == "async def g(): ..."


def test_unknown_style_raises():
    with pytest.raises(ValueError, match="style"):
        render([], budget=1, count=len, style="poem")

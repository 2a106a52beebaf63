"""Extraction: what becomes a skill, what it carries, why others do not."""

import textwrap

import pytest

from sage_jax.skills.extract import digest, extract
from sage_jax.skills.record import Origin

ORIGIN = Origin("abc1234_1", 0, "r0", 1)


def run(*blocks, **kw):
    return extract([(i, textwrap.dedent(b)) for i, b in enumerate(blocks)], ORIGIN, created=5.0, **kw)


def only(*blocks):
    result = run(*blocks)
    assert len(result.skills) == 1, result
    return result.skills[0]


def reason(name, *blocks):
    found = [r.reason for r in run(*blocks).rejected if r.name == name]
    assert len(found) == 1, run(*blocks)
    assert name not in [s.name for s in run(*blocks).skills]
    return found[0]


def defined(skill):
    space = {}
    exec(skill.code, space)
    return space[skill.name]


def test_decorator_and_its_import_are_kept():
    skill = only("import functools, os\n@functools.lru_cache(maxsize=None)\ndef f(x):\n    return x + 1\n")
    assert skill.source.startswith("@functools.lru_cache(maxsize=None)\ndef f")
    assert skill.imports == ("import functools, os",)
    assert defined(skill)(2) == 3


def test_source_is_the_slice_byte_for_byte():
    source = "def f( x ,y=1 ):   # why\n    # inner\n    z = (x+\n         y)\n\n    return z  # tail"
    skill = only("a = 1\n" + source + "\nprint(f(1))\n")
    assert skill.source == source
    assert skill.signature == "f(x, y=1)"
    assert only("a = 1\r\n" + source.replace("\n", "\r\n") + "\r\nprint(1)").source == source.replace("\n", "\r\n")


def test_unusual_line_characters_do_not_shift_the_slice():
    source = "def f():\n    return 'a\x0cb\x85c\u2028d'"
    assert only("x = '\u2028\x0c'\n" + source).source == source


def test_identity_ignores_comments_and_spacing_only():
    a, b = only("def f(x):\n    return x+1\n"), only("def f( x ):  # c\n\n    return x + 1\n")
    assert a.id == b.id and a.id.startswith("f@") and a.id == f"f@{digest(a.code)}"
    assert only("def f(x):\n    return x + 2\n").id != a.id


def test_a_changed_helper_gives_another_id():
    main = "def f(x):\n    return h(x)\n"
    ids = {next(s.id for s in run(f"def h(x):\n    return x + {k}\n", main).skills if s.name == "f") for k in (1, 2)}
    assert len(ids) == 2


def test_helpers_constants_and_imports_transitively_in_executable_order():
    result = run(
        """
        import json as js
        LIMIT = 20
        NAMES, AGES = ["a"], {"a": 3}
        def outer(x):
            return middle(x) + LIMIT
        """,
        """
        def middle(x):
            return inner(js.loads(x))
        def inner(v):
            return v + AGES["a"]
        print(outer("1"))
        """,
    )
    skills = {s.name: s for s in result.skills}
    assert list(skills) == ["outer", "middle", "inner"] and not result.rejected
    assert skills["outer"].constants == ("LIMIT = 20", 'NAMES, AGES = ["a"], {"a": 3}')
    assert skills["outer"].imports == ("import json as js",)
    assert len(skills["outer"].helpers) == 2
    assert skills["inner"].imports == ()
    assert defined(skills["outer"])("1") == 24


def test_helper_needed_at_definition_comes_first():
    result = run(
        """
        def base():
            return 7
        def deco(f):
            return f
        @deco
        def helper(x=base()):
            return x
        def f():
            return helper() + 1
        """
    )
    skill = next(s for s in result.skills if s.name == "f")
    assert defined(skill)() == 8


def test_mutual_recursion_works_from_either_side():
    code = "def even(n):\n    return n == 0 or odd(n - 1)\ndef odd(n):\n    return n != 0 and even(n - 1)\n"
    skills = {s.name: s for s in run(code).skills}
    assert defined(skills["even"])(4) and defined(skills["odd"])(3)


def test_submodule_imports_that_bind_one_name_are_all_kept():
    skill = only("import xml.dom\nimport xml.sax\ndef f():\n    return xml.dom, xml.sax\n")
    assert skill.imports == ("import xml.dom", "import xml.sax")


def test_redefinition_wins_and_the_draft_is_gone():
    skill = only("def f():\n    return 1\n", "def f():\n    return 2\n", "print(f())")
    assert defined(skill)() == 2 and skill.origin.turn == 1


def test_a_rebound_or_deleted_function_is_no_skill():
    assert "bound to something else" in reason("f", "def f():\n    return 1\n", "f = f()")
    assert "bound to something else" in reason("f", "def f():\n    return 1\ndel f\n")


@pytest.mark.parametrize(
    "body",
    ['"""Doc."""', "pass", "...", 'raise NotImplementedError("later")', "raise NotImplementedError", '"""D."""\n    pass', '"""D."""\n    raise NotImplementedError()'],
)
def test_empty_bodies_are_rejected(body):
    assert "body" in reason("f", f"def f(x):\n    {body}\n")


@pytest.mark.parametrize("name", ["print", "apis", "requester", "len", "json"])
def test_shadowing_is_rejected(name):
    assert "shadows" in reason(name, f"def {name}(x):\n    return x\n")


def test_rebinding_a_builtin_inside_is_rejected():
    assert "rebinds 'print'" in reason("f", "def f():\n    global print\n    print = None\n")


def test_using_a_shadowed_builtin_is_rejected():
    assert "'print'" in reason("f", "def print(x):\n    return x\ndef f():\n    return print(1)\n")


def test_unavailable_names_are_rejected_with_the_name():
    code = 'token = apis.spotify.login(username="u", password="p")["access_token"]\ndef f():\n    return apis.spotify.show(access_token=token)\n'
    assert "'token'" in reason("f", code)
    assert "'K'" in reason("f", "class K:\n    pass\ndef f():\n    return K()\n")
    assert "never bound" in reason("f", "def f():\n    return nowhere\n")
    assert "through its helper 'h'" in reason("f", "def h():\n    return nowhere\ndef f():\n    return h()\n")
    assert "changed after" in reason("f", "SEEN = []\nSEEN.append(1)\ndef f():\n    return SEEN\n")
    assert "'TOTAL'" in reason("f", "TOTAL = 1\nTOTAL += 1\ndef f():\n    return TOTAL\n")
    assert "'m'" in reason("f", "try:\n    import json as m\nexcept ImportError:\n    m = None\ndef f():\n    return m\n")


def test_what_a_world_offers_needs_no_import():
    skill = only("def f(x):\n    return apis.spotify.show(json.dumps(sorted(x)), Counter(x))\n")
    assert skill.imports == () and skill.helpers == ()


def test_inner_scopes_are_not_globals():
    skill = only(
        """
        def f(rows):
            total = 0
            def inner(r):
                nonlocal total
                total += r
                return [q for q in range(r) if (w := q)]
            class Box:
                size = 3
            return [inner(r) for r in rows], Box.size, (lambda z: z)(1), {k: v for k, v in []}
        """
    )
    assert defined(skill)([1])[1] == 3


def test_async_function():
    skill = only("async def fetch(x: int) -> int:\n    return x\n")
    assert skill.signature == "async fetch(x: int) -> int" and skill.source.startswith("async def")


def test_conditional_and_nested_definitions_are_not_top_level():
    result = run("if True:\n    def f():\n        return 1\ndef g():\n    return 2\n")
    assert [s.name for s in result.skills] == ["g"]


def test_quotes_backslashes_and_fences_survive():
    source = 'def f(s=\'"\'):\n    r"""Say "hi" to \'them\', C:\\dir, ```code``` and \'\'\'more\'\'\'."""\n    return s + "\\n" + \'\\\'\''
    skill = only(source + "\n")
    assert skill.source == source
    assert defined(skill)() == "\"\n'"
    assert "```code```" in skill.docstring and "C:\\dir" in skill.docstring


def test_a_step_that_does_not_parse_spoils_only_itself():
    result = run("%time x\ndef f():\n    return 1\n", "def g():\n    return 2\n")
    assert [s.name for s in result.skills] == ["g"]
    assert result.rejected[0].name == "" and result.rejected[0].turn == 0


def test_a_wholly_indented_block_is_dedented():
    result = extract([(3, "    def f():\n        return 1\n")], Origin("t", 0, "r", 2))
    assert result.skills[0].source == "def f():\n    return 1"
    assert (result.skills[0].origin.turn, result.skills[0].origin.position) == (3, 2)


def test_two_statements_on_a_line_are_cut_apart():
    skill = only("import string; x = apis.y()\ndef f():\n    return string.digits\n")
    assert skill.imports == ("import string",)
    skill = only("é = 'é'; K = {'é':\n  1}; y = apis.y()\ndef f():\n    return K\n")
    assert skill.constants == ("K = {'é':\n  1}",)


def test_a_helper_that_shadows_a_preloaded_name_is_not_carried():
    assert "'reduce'" in reason("f", "def reduce(x):\n    return x\ndef f():\n    return reduce(1)\n")


def test_invalid_escapes_stay_silent(recwarn):
    assert only("def f():\n    return '\\d'\n").source.endswith("'\\d'")
    assert not recwarn.list


def test_a_function_called_top_keeps_its_locals():
    skill = only("def top(rows, k):\n    best = rows[:k]\n    def top(z):\n        q = z\n        return q\n    return top(best)\n")
    assert defined(skill)([1, 2], 1) == [1]
    assert "'token'" in reason("top", "token = apis.x()\ndef top(a):\n    return apis.y(token)\n")

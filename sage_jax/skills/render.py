"""Skills as text for a prompt, within a token budget: whole skills or none of a skill, and never a silent loss.

Not here: the words around the listing, which belong to the agent's prompt templates.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Sequence

from sage_jax.skills.record import Skill

STYLES = ("source", "signature")
ORDERS = ("recent", "used")
_GAP = "\n\n\n"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """`text` is plain Python (see `fence`); `shown` in the order of the text; `dropped` did not fit."""

    text: str
    shown: tuple[Skill, ...]
    dropped: tuple[Skill, ...]
    tokens: int


def render(
    skills: Sequence[Skill],
    *,
    budget: int,
    count: Callable[[str], int],
    style: str = "source",
    order: str = "recent",
) -> Rendered:
    """Chooses skills by priority and writes them in the order given, oldest first.

    Args:
      skills: in the library's order (`Library.active()`).
      budget: the most tokens that `text` may have, by `count`.
      count: tokens of a text.
      style: "source", executable code with each import, constant and helper once; "signature", the head and docstring.
      order: who gets room first: "recent", the last added; "used", most successes, then most uses, then the last added.
    A skill that does not fit is passed over and smaller ones after it may still be taken.
    Raises ValueError for an unknown style or order.
    """
    if style not in STYLES or order not in ORDERS:
        raise ValueError(f"style {style!r} of {STYLES}, order {order!r} of {ORDERS}")
    places = list(range(len(skills)))
    if order == "recent":
        places.sort(key=lambda i: -i)
    else:
        places.sort(key=lambda i: (-skills[i].successes, -skills[i].uses, -i))
    chosen: list[int] = []
    room = budget
    for i in places:
        cost = count(_text([skills[i]], style) + _GAP)  # an upper estimate: shared helpers are written once
        if cost <= room:
            chosen.append(i)
            room -= cost
        elif (exact := count(_text(_pick(skills, [*chosen, i]), style))) <= budget:
            chosen.append(i)
            room = budget - exact
    # Tokens of a joined text are not exactly the sum of the parts.
    while chosen and count(_text(_pick(skills, chosen), style)) > budget:
        chosen.pop()
    shown = _pick(skills, chosen)
    text = _text(shown, style)
    dropped = tuple(s for i, s in enumerate(skills) if i not in set(chosen))
    return Rendered(text, tuple(shown), dropped, count(text) if text else 0)


def fence(code: str, language: str = "python") -> str:
    """`code` as a Markdown block whose fence is longer than any run of backticks inside."""
    longest = max((len(run) for run in re.findall(r"`+", code)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{code}\n{marks}"


def head(skill: Skill) -> str:
    """Decorators, signature and docstring exactly as written, with `...` for the rest of the body."""
    tree = ast.parse(skill.source)
    node = tree.body[0]
    first = node.body[0]
    inline = first.lineno == node.body[-1].lineno and first.lineno <= _colon_line(node, skill.source)
    if inline or not skill.docstring:
        prefix = "" if skill.signature.startswith("async ") else "def "
        signature = skill.signature.replace("async ", "async def ", 1) if not prefix else skill.signature
        return f"{prefix}{signature}: ..."
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", skill.source)
    kept = "".join(lines[: first.end_lineno]).rstrip("\r\n")
    return f"{kept}\n{' ' * first.col_offset}..."


def _colon_line(node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> int:
    """The last line of the head: the line before the body, or the body's own when it follows the colon."""
    body = node.body[0]
    line = re.split(r"(?<=\n)|(?<=\r)(?!\n)", source)[body.lineno - 1]
    before = line.encode()[: body.col_offset].decode(errors="replace")
    return body.lineno if before.strip() else body.lineno - 1


def _pick(skills: Sequence[Skill], places: Sequence[int]) -> list[Skill]:
    return [skills[i] for i in sorted(places)]


def _text(skills: Sequence[Skill], style: str) -> str:
    if style == "signature":
        return "\n\n".join(head(s) for s in skills)
    sources = {s.source for s in skills}
    imports = list(dict.fromkeys(t for s in skills for t in s.imports))
    written: set[str] = set()
    parts = ["\n".join(imports)] if imports else []
    for skill in skills:
        # A helper that is listed as a skill itself is written there.
        own = [t for t in (*skill.constants, *skill.helpers) if t not in written and t not in sources]
        written.update(own)
        parts.append("\n".join([*own, skill.source]))
    return _GAP.join(parts)

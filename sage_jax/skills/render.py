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
_GAP = "\n\n\n"


@dataclasses.dataclass(frozen=True)
class Rendered:
    """`text` is plain Python; `shown` in the order of the text; `dropped` did not fit."""

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
) -> Rendered:
    """Takes the last added skills first and writes them in the order given, oldest first.

    Args:
      skills: in the library's order (`Library.active()`).
      budget: the most tokens that `text` may have, by `count`.
      count: tokens of a text.
      style: "source", executable code with each import, constant and helper once; "signature", the head and docstring.
    A skill that does not fit is passed over and smaller ones after it may still be taken.
    Raises ValueError for an unknown style.
    """
    if style not in STYLES:
        raise ValueError(f"style {style!r} of {STYLES}")
    chosen: list[int] = []
    written: set[str] = set()
    room = budget
    gap = count(_GAP)
    for i in reversed(range(len(skills))):
        skill = skills[i]
        parts = {*skill.imports, *skill.constants, *skill.helpers, skill.source}
        cost = count(_text([skill], style) + _GAP)
        # The estimate counts a gap too many at the end, and what is written once for several skills several times;
        # the whole text is counted only where that can matter.
        if cost > room and (cost <= room + 2 * gap or parts & written):
            exact = count(_text(_pick(skills, [*chosen, i]), style))
            if exact > budget:
                continue
            room = budget - exact
        elif cost > room:
            continue
        else:
            room -= cost
        chosen.append(i)
        written |= parts
    # Tokens of a joined text are not exactly the sum of the parts.
    while chosen and count(_text(_pick(skills, chosen), style)) > budget:
        chosen.pop()
    shown = _pick(skills, chosen)
    text = _text(shown, style)
    dropped = tuple(s for i, s in enumerate(skills) if i not in set(chosen))
    return Rendered(text, tuple(shown), dropped, count(text) if text else 0)


def head(skill: Skill) -> str:
    """Everything up to the docstring's end as written, then `...`; without a docstring, the signature and `...`."""
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", skill.source)
    first = ast.parse(skill.source).body[0].body[0]
    before = lines[first.lineno - 1].encode()[: first.col_offset].decode()
    if skill.docstring and not before.strip():  # the body does not follow the colon on its line
        return "".join(lines[: first.end_lineno]).rstrip("\r\n") + f"\n{before}..."
    if skill.signature.startswith("async "):
        return f"async def {skill.signature.removeprefix('async ')}: ..."
    return f"def {skill.signature}: ..."


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

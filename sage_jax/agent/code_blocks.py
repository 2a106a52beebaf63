"""The one rule for what a Python block of a response is, as a host parser and as a byte automaton that agree.

Lines end at a line feed. The start of the text and the place right after `</think>` count as line starts.

- `<think>` outside a block opens a think section that ends with `</think>`; nothing in it is a fence.
- A line of three or more backticks followed by text without backticks opens a block. With exactly three and the
  text `python` or `py` (then only spaces, tabs, carriage returns) it is a Python block; any other is skipped as a whole.
- Inside a block, a line that starts with three backticks closes it (four if it was opened by four or more); backticks
  elsewhere do not. The Python block ends, and sampling stops, at the third backtick; the rest of a skipped
  block's closing line is ignored.
- Any other line outside a block that starts with three backticks (inline code) is plain text without think tags.

`first_block` reads text on the host; `fence_automaton` is the same rule for the sampler, which has to know after each
token whether the first Python block is complete. A test compares the two on generated texts.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np

_OPENING = re.compile(r"(`{3,})([^`]*)")
_PYTHON = ("python", "py")
_SPACE = " \t\r"
_THINK, _END_THINK = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class ByteDFA:
    """A deterministic automaton over bytes with one absorbing accepting state."""

    transition: np.ndarray  # uint8 [states, 256]
    start: int
    accept: int

    def run(self, data: bytes, state: int | None = None) -> int:
        """The state after `data`, from `state` (default: the start)."""
        state = self.start if state is None else state
        for byte in data:
            state = int(self.transition[state, byte])
        return state


def first_block(text: str) -> tuple[str | None, bool]:
    """(code, closed) of the first Python block outside think sections; (None, False) if there is none.

    The line feed before the closing fence is not part of the code. An unclosed block is returned up to the end of
    the text with closed False.
    """
    lines = text.split("\n")
    think, skip, offset = False, 0, 0
    for number, line in enumerate(lines):
        offset += len(line) + 1  # where the next line starts
        last = number == len(lines) - 1
        while True:  # more than once only for what follows `</think>` in the same line
            if think:
                end = line.find(_END_THINK)
                if end < 0:
                    break
                think, line = False, line[end + len(_END_THINK):]
            if skip:
                if line.startswith("`" * skip):
                    skip = 0
                break
            opening = _OPENING.fullmatch(line)
            if opening and not last:
                ticks, info = opening.groups()
                if len(ticks) == 3 and info.rstrip(_SPACE) in _PYTHON:
                    return _code(text, start=offset)
                skip = min(len(ticks), 4)
                break
            tag = -1 if line.startswith("```") else line.find(_THINK)
            if tag < 0:
                break
            think, line = True, line[tag + len(_THINK):]
    return None, False


def quote(text: str) -> str:
    """Output as it is shown in a message: fenced so that the parser finds no Python block in or after it.

    Three backticks; four if a line of the text starts with three; if a line starts with four, no fence but every line
    indented by four spaces (and `<think>` written `< think>`, since it would open a section there). Closes its fence
    whatever the text ends with.
    """
    lines = text.split("\n")
    if any(line.startswith("````") for line in lines):
        return "\n".join("    " + line for line in lines).replace(_THINK, "< think>")
    fence = "````" if any(line.startswith("```") for line in lines) else "```"
    return f"{fence}\n{text}\n{fence}" if not text.endswith("\n") else f"{fence}\n{text}{fence}"


@functools.cache
def fence_automaton() -> ByteDFA:
    """The automaton that accepts exactly when `first_block` would report a closed block."""
    build = _Builder()
    state, to, rest = build.state, build.to, build.rest
    line, plain, accept = state("line"), state("plain"), state("accept")
    rest(accept, accept)
    rest(plain, plain)
    to(plain, "\n", line)  # inline code, or the rest of a closing line

    # Outside: text with a partly matched <think>; inside a think section a partly matched </think>.
    text = [state(f"text{i}") for i in range(len(_THINK))]
    inside = [state(f"think{i}") for i in range(len(_END_THINK))]
    for states, tag, after in ((text, _THINK, inside[0]), (inside, _END_THINK, line)):
        for i, here in enumerate(states):
            rest(here, states[0])
            to(here, "<", states[1])  # `<` occurs only at the start of both tags
            to(here, tag[i], states[i + 1] if i + 1 < len(tag) else after)
    for here in text:
        to(here, "\n", line)

    def block(name: str, ticks: int, after: int) -> int:
        """States of a block closed by `ticks` backticks at a line start; returns its line-start state."""
        starts = [state(f"{name}{i}") for i in range(ticks)]
        middle = state(f"{name}-middle")
        for here in (*starts, middle):
            rest(here, middle)
            to(here, "\n", starts[0])
        for i, here in enumerate(starts):
            to(here, "`", starts[i + 1] if i + 1 < ticks else after)
        return starts[0]

    skip3, skip4, python = block("skip3-", 3, plain), block("skip4-", 4, plain), block("python-", 3, accept)

    # Opening lines.
    tick1, tick2, tick3, tick4 = (state(f"tick{i}") for i in range(1, 5))
    info3, info4 = state("info3"), state("info4")
    for here in (line, tick1, tick2):
        rest(here, text[0])
        to(here, "<", text[1])
        to(here, "\n", line)
    to(line, "`", tick1)
    to(tick1, "`", tick2)
    to(tick2, "`", tick3)
    for here, info, body in ((tick3, info3, skip3), (tick4, info4, skip4), (info3, info3, skip3), (info4, info4, skip4)):
        rest(here, info)
        to(here, "\n", body)
        to(here, "`", tick4 if here in (tick3, tick4) else plain)
    spaces = state("spaces")
    word = [tick3] + [state(f"python{i}") for i in range(1, 7)]
    for i, here in enumerate(word[1:] + [spaces], 1):
        rest(here, info3)
        to(here, "`", plain)
        to(here, "\n", python if here == spaces or "python"[:i] in _PYTHON else skip3)
        if here == spaces or "python"[:i] in _PYTHON:
            to(here, _SPACE, spaces)
    for i, letter in enumerate("python"):
        to(word[i], letter, word[i + 1])
    return build.finish(line, accept)


def _code(text: str, start: int) -> tuple[str, bool]:
    if text.startswith("```", start):
        return "", True
    end = text.find("\n```", start)
    return (text[start:], False) if end < 0 else (text[start:end], True)


class _Builder:
    """Collects transitions by name; `rest` fills every byte, `to` overrides some."""

    def __init__(self):
        self.names: list[str] = []
        self.rows: list[np.ndarray] = []

    def state(self, name: str) -> int:
        self.names.append(name)
        self.rows.append(np.full(256, -1, np.int32))
        return len(self.rows) - 1

    def rest(self, state: int, target: int) -> None:
        self.rows[state][:] = target

    def to(self, state: int, chars: str, target: int) -> None:
        self.rows[state][list(chars.encode())] = target

    def finish(self, start: int, accept: int) -> ByteDFA:
        table = np.stack(self.rows)
        if (table < 0).any() or len(table) > 256:
            raise AssertionError("fence automaton has an undefined transition or too many states")
        table = table.astype(np.uint8)
        table.setflags(write=False)
        return ByteDFA(table, start, accept)

"""A conversation as ids, turn by turn, by the chat template of the tokenizer's folder.

The template itself renders each run of new messages, after a short conversation that stands for the history. What was sampled is
kept as it is: the ids of turn k are a prefix of those of turn k+1. Assistant turns that are given (demonstrations,
training data) are rendered as if they had been sampled. This is the template's own rendering, id by id, except where
a template does not keep what the policy has seen (docs/architecture.md, "Conversations as ids"):

- Qwen3's deletes `<think>` blocks from turns before the last user message, and gives an empty one to a last turn without.
- What a generation prompt adds to the header of the turn (an empty think block with `thinking=False`, an opened one in
  models that always think) is left out of earlier turns by the template.

Here both stay. Control tokens come from the template and never from content: content is encoded as text, so `<|im_end|>`
inside an observation stays text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from sage_jax.errors import ConfigError
from sage_jax.model.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
THINK, END_THINK = "<think>", "</think>"

_ANSWER = "probe answer"
_HISTORY = ({"role": "user", "content": "probe question"}, {"role": "assistant", "content": _ANSWER})
_MARKS = [chr(c) for c in range(0xE000, 0xE100)]  # of private use


class ChatRenderer:
    """Renders for one tokenizer.

    Raises:
      ConfigError: the template cannot be rendered turn by turn: for one of a set of conversations the pieces do not join to its own
        rendering (but for what is said above), and the message shows the first difference; a token that ends or begins
        a turn is no control token; or the tokenizer's `thinking` is off and the template has no such switch.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._control = re.compile("|".join(map(re.escape, sorted(tokenizer.control, key=len, reverse=True))) or r"(?!)")
        question = tokenizer.render(_HISTORY[:1])
        generation = _between(tokenizer.render(_HISTORY[:1], add_generation_prompt=True), question)
        # Of turns in the middle of a conversation: the last one may look different.
        self._past = _between(tokenizer.render([*_HISTORY, _HISTORY[0]]), question, _ANSWER)
        self._closing = _between(tokenizer.render(_HISTORY), _ANSWER)
        last = _between(tokenizer.render(_HISTORY), question, _ANSWER)
        self._close = self._ids(self._closing)
        self._header = generation[:_same(generation, self._past)]
        if self._header not in (generation, self._past):
            raise ConfigError(f"the folder's chat template opens a response with {generation!r} and writes {self._past!r} before earlier ones")
        self._opener = generation[len(self._header):]
        opens = self._opener.count(THINK) - self._opener.count(END_THINK)
        self.opened = self._opener if opens > 0 else ""  # the start of a think block that a response goes on with
        self._no_thought = last[len(generation):] if last.startswith(generation) else ""  # what then closes it at once
        self._check_tokens()
        self._check_joins()

    def open_turn(self, messages: Sequence[dict], *, first: bool = False) -> list[int]:
        """Ids of new messages and of the assistant's opening, after which the policy samples.

        first: they begin the conversation, where some templates add a system prompt; otherwise they follow an assistant's turn.
        """
        return [*self._join(messages, first)[0], *self._ids(self._header + self._opener)]

    def close_turn(self, ends_with_eot: bool) -> list[int]:
        """Ids between a sampled response and the next message: the end of turn unless it was sampled, and what follows it."""
        return self._close[1:] if ends_with_eot else list(self._close)

    def full(self, messages: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T], mask int32 [T]) of a whole conversation; mask 1 on assistant content and its end of turn.

        An assistant's content is encoded apart from the header before it, as when it was sampled. These are the
        template's own ids whenever the content does not begin with white space.
        """
        ids, mask = self._join(messages, first=True)
        return np.asarray(ids, np.int32), np.asarray(mask, np.int32)

    def _join(self, messages: Sequence[dict], first: bool) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []
        end, *after_end = self._close
        for text, mark, content in self._turns(messages, first):
            pieces = [(self._ids(text, mark), 0)]
            if content is not None:
                opener, content = self._given(content)
                pieces = [(self._ids(text + self._header + opener, mark), 0), ([*self.tokenizer.encode(content), end], 1), (after_end, 0)]
            for piece, trained in pieces:
                ids += piece
                mask += [trained] * len(piece)
        return ids, mask

    def _turns(self, messages: Sequence[dict], first: bool) -> Iterator[tuple[str, str, str | None]]:
        """(the template's text of the messages before an assistant's, its mark, the assistant's content); None: no assistant follows."""
        waiting: list[dict] = []
        for message in messages:
            if message["role"] not in ROLES:
                raise ConfigError(f"unknown role {message['role']!r}: valid are {', '.join(ROLES)}")
            if message["role"] != "assistant":
                waiting.append(message)
            elif first and not waiting:
                raise ConfigError("a conversation begins with a system or user message, not with the assistant's")
            else:
                yield *self._text(waiting, first), message["content"]
                waiting, first = [], False
        if waiting:
            yield *self._text(waiting, first), None

    def _text(self, messages: Sequence[dict], first: bool) -> tuple[str, str]:
        """(the template's text, the mark): the mark stands inside every control token that is content; it is taken out on encoding."""
        mark = next(c for c in _MARKS if not any(c in m["content"] for m in messages))
        messages = [{**m, "content": self._control.sub(lambda t: t[0][0] + mark + t[0][1:], m["content"])} for m in messages]
        if first:
            text = self.tokenizer.render(messages)
        elif messages:
            text = _between(self.tokenizer.render([*_HISTORY, *messages]), _ANSWER + self._closing)
        else:
            text = ""
        at = 0
        for message in messages:
            content = message["content"].strip()
            at = text.find(content, at)
            if at < 0:
                raise ConfigError(f"the chat template changes or leaves out a {message['role']} message: {content[:60]!r} is not in {text[:200]!r}")
            at += len(content)
        return text, mark

    def _given(self, content: str) -> tuple[str, str]:
        """(what of the generation prompt's opener stands before a given assistant turn, the rest of the turn): one think block, not two."""
        opener, inner = self._opener, content.lstrip()
        if content.startswith(opener):
            return opener, content[len(opener):]
        if self.opened and inner.startswith(THINK):
            return opener, inner.removeprefix(THINK).lstrip("\n")
        if self.opened and END_THINK not in content:  # as the template writes a last turn without thoughts
            return (opener, self._no_thought + content) if END_THINK in self._no_thought else ("", content)
        return ("", content) if THINK in opener and inner.startswith(THINK) else (opener, content)

    def _ids(self, text: str, mark: str = "") -> list[int]:
        """Ids of a template's text: control tokens in it are recognised, those that the mark keeps apart stay text."""
        ids, at = [], 0
        for found in self._control.finditer(text):
            ids += [*self._plain(text[at:found.start()], mark), self.tokenizer.control[found[0]]]
            at = found.end()
        return ids + self._plain(text[at:], mark)

    def _plain(self, text: str, mark: str) -> list[int]:
        text = text.replace(mark, "") if mark else text
        return self.tokenizer.encode(text) if text else []

    def _check_tokens(self) -> None:
        end = self.tokenizer.end_of_turn_id
        if self._close[:1] != [end]:
            raise ConfigError(f"the folder's chat template ends a turn with {self._closing!r}, and the tokenizer with {self.tokenizer.decode([end])!r}")
        for name in re.findall(r"<\|[^|<>]+\|>", self._header + self._closing):
            if name not in self.tokenizer.control:
                raise ConfigError(f"{name} of the chat template is no control token of the tokenizer: text could become it, so mark it as special")
        if not self.tokenizer.thinking and END_THINK not in self._opener:
            raise ConfigError("thinking=False, but the folder's chat template has no such switch; leave it on")

    def _check_joins(self) -> None:
        """The pieces against the template's own rendering, on whole conversations."""
        questions = [{"role": "user", "content": c} for c in ("Which songs?", "  Two\n\n    lines, é😀\n", "\nLast:\n```\nx = 1\n```", "")]
        answers = [{"role": "assistant", "content": c} for c in ("```python\nprint(1)\n```", "Zoë says:\n\n  no \n", "yes")]
        dialogue = [*(m for pair in zip(questions, answers) for m in pair), questions[-1]]
        system, tools = {"role": "system", "content": "Be brief.\n"}, [{"role": "tool", "content": c} for c in ("[1, 2]", "\n{}\n")]
        for messages in (dialogue, [system, *dialogue]):
            for end in range(len(messages) % 2, len(messages) + 1, 2):
                if end:
                    given = messages[:end]
                    pieces = [text + (self._past + content + self._closing if content is not None else "") for text, _, content in self._turns(given, True)]
                    self._compare("".join(pieces) + self._header + self._opener, self.tokenizer.render(given, add_generation_prompt=True))
        try:
            text, _ = self._text(tools, first=False)
        except ConfigError:
            return  # a template without tool messages; one that is used raises then
        own = self.tokenizer.render([system, *dialogue[:2], tools[0], answers[1], *tools], add_generation_prompt=True)
        self._compare(text + self._header + self._opener, _between(own, answers[1]["content"] + self._closing))

    def _compare(self, ours: str, own: str) -> None:
        if ours != own:
            at = _same(ours, own)
            raise ConfigError(
                "the folder's chat template cannot be rendered turn by turn: after "
                f"{own[max(0, at - 40):at]!r} it writes {own[at:at + 60]!r}, and the pieces give {ours[at:at + 60]!r}"
            )
        ids, theirs = self._ids(own), self.tokenizer.encode_rendered(own)
        if ids != theirs:
            at = _same(ids, theirs)
            raise ConfigError(
                f"the folder's tokenizer does not encode a conversation piece by piece: id {at} of {own!r} is {theirs[at:at + 3]}, "
                f"and the pieces give {ids[at:at + 3]}"
            )


def _same(a: Sequence, b: Sequence) -> int:
    """Length of the common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _between(text: str, start: str, end: str = "") -> str:
    """What follows the first `start`, up to `end` or the text's end. Raises ConfigError."""
    _, found, rest = text.partition(start)
    inner, there, _ = rest.partition(end) if end else (rest, True, "")
    if not (found and there):
        raise ConfigError(f"the folder's chat template cannot be rendered turn by turn: in {text!r} there is no {start!r}{f' with {end!r} after it' if end else ''}")
    return inner

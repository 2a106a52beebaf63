"""ChatML in pieces: a conversation is rendered message by message, and the pieces join to the template's own rendering.

Control tokens come from here and never from content: content is encoded as text, so `<|im_end|>` inside an observation
stays text. Sampled ids are kept as they are; only what is new is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sage_jax.errors import ConfigError
from sage_jax.model.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")

_PROBE = (
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
)


class ChatRenderer:
    """Renders for one tokenizer. Raises ConfigError when the folder's own template is not ChatML."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._start = tokenizer.special("<|im_start|>")
        self._end = tokenizer.special("<|im_end|>")
        self._newline = tuple(tokenizer.encode("\n"))
        self._assistant = (self._start, *tokenizer.encode("assistant\n"))
        own = tokenizer.render(_PROBE, add_generation_prompt=True)
        want = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in _PROBE) + "<|im_start|>assistant\n"
        if own != want:
            raise ConfigError(f"the tokenizer's chat template is not ChatML: it renders {own!r} instead of {want!r}")

    def open_turn(self, messages: Sequence[dict]) -> list[int]:
        """Ids of new system and user messages and of the assistant's opening, after which the policy samples."""
        ids: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                raise ValueError("an assistant message is sampled, not rendered: its ids are known")
            ids += self._message(message)
        return ids + list(self._assistant)

    def close_turn(self, ends_with_eot: bool) -> list[int]:
        """Ids between a sampled response and the next message: the end of turn unless it was sampled, and a newline."""
        return [*(() if ends_with_eot else (self._end,)), *self._newline]

    def full(self, messages: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [T], mask int32 [T]) of a whole conversation; mask 1 on assistant content and its end of turn.

        An assistant's content is encoded apart from the header before it, as when it was sampled. This is the
        template's own rendering whenever the content does not begin with white space.
        """
        ids: list[int] = []
        mask: list[int] = []
        for message in messages:
            if message["role"] == "assistant":
                content = [*self.tokenizer.encode(message["content"]), self._end]
                ids += [*self._assistant, *content, *self._newline]
                mask += [0] * len(self._assistant) + [1] * len(content) + [0] * len(self._newline)
            else:
                piece = self._message(message)
                ids += piece
                mask += [0] * len(piece)
        return np.asarray(ids, np.int32), np.asarray(mask, np.int32)

    def _message(self, message: dict) -> list[int]:
        if message["role"] not in ROLES:
            raise ConfigError(f"unknown role {message['role']!r}: valid are {', '.join(ROLES)}")
        text = f"{message['role']}\n{message['content']}"
        return [self._start, *self.tokenizer.encode(text), self._end, *self._newline]

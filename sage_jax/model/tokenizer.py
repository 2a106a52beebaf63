"""One tokenizer interface over Hugging Face fast tokenizer folders and SentencePiece model files, and our own BPE.

`encode` is for text that may come from worlds: control tokens in it are not recognised and stay text (added tokens that
are not control tokens, such as Qwen's `<think>`, are). `encode_rendered` is for what `render` made: there they are.
`decode` skips nothing and replaces partial UTF-8 by U+FFFD.
"""

from __future__ import annotations

import collections
import contextlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2

from sage_jax.errors import ConfigError

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>")
SMALLEST_BPE = 256 + 32 + len(CONTROL) + len(ADDED)  # bytes, the merges of the compact pieces, control tokens

TEMPLATE_FILE = "chat_template.jinja"
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Fences whole (sampling stops at the token that closes one), a newline with its indent, single digits, identifier words
# with the space before them, runs of one kind of sign.
_SPLIT = r"```python\n|```|\n[ ]*|\d| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_`]+|`+|[^\S\n]+|."
# The same with dotted names whole, for vocabularies of whole words.
_SPLIT_WORDS = r"```python\n|```|\n[ ]*|\d| ?[\p{L}_]+(?:\.[\p{L}_]+)*| ?[^\s\p{L}\p{N}_`]+|`+|[^\S\n]+|."
_COMPACT = ("```", "```python\n", "\n    ", "\n        ", "system", "user", "assistant")


class Tokenizer(ABC):
    """Ids are ints in [0, vocab_size)."""

    vocab_size: int  # real ids; a model's embedding may have more rows
    stop_ids: frozenset[int]  # ids that end an assistant turn
    end_of_turn_id: int
    pad_id: int
    control: Mapping[str, int]  # control tokens, which `encode` never makes
    thinking: bool  # the templates' `enable_thinking`

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of plain text; nothing is added in front or behind."""

    @abstractmethod
    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation as the folder's own tooling makes them: control tokens in the text are recognised."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens included."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes one id stands for; a control token's own text. Empty for ids without a piece."""

    @abstractmethod
    def special(self, name: str) -> int:
        """Id of a control or added token such as `<|im_end|>`. Raises ConfigError that lists those there are."""

    @abstractmethod
    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False) -> str:
        """The text of the folder's own chat template. Raises ConfigError with the template's words if it refuses the messages."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer's files into an existing or new folder that `load_tokenizer` reads."""


class FastTokenizer(Tokenizer):
    """A Hugging Face fast tokenizer."""

    def __init__(self, fast, extra_stops: Iterable[int] = (), thinking: bool = True):
        from tokenizers import Tokenizer as Backend

        self.fast, self.thinking = fast, thinking
        # A copy of its own: `encode_special_tokens` is a switch of the backend, and the template needs the other setting.
        self._backend = Backend.from_str(fast.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder().items()
        self._added = {t.content: i for i, t in added}
        self.control = {t.content: i for i, t in added if t.special}
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self._pieces: list[str | None] = [None] * self.vocab_size
        for piece, i in vocab.items():
            self._pieces[i] = piece
        self._byte_level = '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str()).get("decoder") or {})
        self._added_ids = {i: name for name, i in self._added.items()}
        end = self._added.get("<|im_end|>", fast.eos_token_id)
        if end is None:
            raise ConfigError("the tokenizer has neither <|im_end|> nor an end-of-sequence token")
        self.end_of_turn_id = end
        eos = () if fast.eos_token_id is None else (fast.eos_token_id,)
        self.stop_ids = frozenset({end, *eos, *extra_stops})
        self.pad_id = end if fast.pad_token_id is None else fast.pad_token_id

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_rendered(self, text: str) -> list[int]:
        return self.fast(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        if self._byte_level:
            return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        return self._backend.decode(list(map(int, ids)), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        token = int(token)
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        if token in self._added_ids:
            return self._added_ids[token].encode()
        piece = self._pieces[token]
        if piece is None:
            return b""
        return bytes(_CHAR_TO_BYTE[c] for c in piece) if self._byte_level else _piece_bytes(piece)

    def special(self, name: str) -> int:
        return _special(self._added, name)

    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False) -> str:
        if self.fast.chat_template is None:
            raise ConfigError("the tokenizer's folder has no chat template")
        with _refusals(messages):
            return self.fast.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, enable_thinking=self.thinking,
            )  # fmt: skip

    def save(self, folder: str | Path) -> None:
        self.fast.save_pretrained(str(folder))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` file whose control symbols include ChatML's. template: empty for ChatML."""

    def __init__(self, path: str | Path, template: str = "", thinking: bool = True):
        import sentencepiece

        self._path, self._template, self.thinking = Path(path), template or CHATML, thinking
        self._sp = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.vocab_size = self._sp.get_piece_size()
        pieces = [self._sp.id_to_piece(i) for i in range(self.vocab_size)]
        self.control = {p: i for i, p in enumerate(pieces) if self._sp.is_control(i)}
        as_text = [p for i, p in enumerate(pieces) if re.fullmatch(r"<\|.*\|>", p) and not self._sp.is_control(i)]
        if as_text:
            raise ConfigError(f"{path}: {as_text} are ordinary pieces, so text could turn into them: make them control_symbols")
        probe = "a = 1\n    b  = 2\n"
        if self._sp.decode(self._sp.encode(probe)) != probe:
            raise ConfigError(
                f"{path} does not keep newlines and indents: train it with normalization_rule_name='identity', "
                "remove_extra_whitespaces=False and byte_fallback=True"
            )
        self.end_of_turn_id = self.special("<|im_end|>")
        self.stop_ids = frozenset(i for i in (self.end_of_turn_id, self._sp.eos_id()) if i >= 0)
        self.pad_id = self._sp.pad_id() if self._sp.pad_id() >= 0 else self.end_of_turn_id

    def encode(self, text: str) -> list[int]:
        return self._sp.encode(text)

    def encode_rendered(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in re.split("(" + "|".join(map(re.escape, sorted(self.control, key=len, reverse=True))) + ")", text):
            ids += [self.control[piece]] if piece in self.control else self.encode(piece)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        out, run = [], []
        for token in map(int, ids):
            if self._sp.is_control(token):
                out += [self._sp.decode(run), self._sp.id_to_piece(token)]
                run = []
            else:
                run.append(token)
        return "".join(out) + self._sp.decode(run)

    def token_bytes(self, token: int) -> bytes:
        token = int(token)
        if not 0 <= token < self.vocab_size:
            raise IndexError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        piece = self._sp.id_to_piece(token)
        if self._sp.is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return piece.encode() if self._sp.is_control(token) else piece.replace("▁", " ").encode()

    def special(self, name: str) -> int:
        return _special(self.control, name)

    def render(self, messages: Sequence[dict], add_generation_prompt: bool = False) -> str:
        # Not jinja2 itself: templates expect the functions that transformers gives them.
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals(messages):
            texts, _ = render_jinja_template(
                [list(messages)], chat_template=self._template, add_generation_prompt=add_generation_prompt, enable_thinking=self.thinking,
            )  # fmt: skip
        return texts[0]

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self._path, Path(folder) / "tokenizer.model")
        (Path(folder) / TEMPLATE_FILE).write_text(self._template)


def load_tokenizer(path: str | Path, *, thinking: bool = True) -> Tokenizer:
    """A folder with `tokenizer.json` or `tokenizer.model`, or a SentencePiece `.model` file.

    Stop ids are the union of what the tokenizer, config.json and generation_config.json say. thinking: for templates with that
    switch (Qwen3's `enable_thinking`); False has an empty think block put in front of every response.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".model":
            raise ConfigError(f"{path}: a tokenizer file must be a SentencePiece .model; or give a folder")
        return SentencePieceTokenizer(path, thinking=thinking)
    if (path / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        return FastTokenizer(AutoTokenizer.from_pretrained(str(path), local_files_only=True), _stops(path), thinking)
    if (path / "tokenizer.model").is_file():
        template = path / TEMPLATE_FILE
        return SentencePieceTokenizer(path / "tokenizer.model", template.read_text() if template.is_file() else "", thinking)
    raise ConfigError(f"{path} holds no tokenizer: it needs tokenizer.json or tokenizer.model")


def train_bpe(texts: Iterable[str], vocab_size: int, whole_words: bool = False) -> FastTokenizer:
    """A byte-level BPE with Qwen's control tokens and a ChatML template; `vocab_size` counts all ids.

    Digits stay single; fences and a newline with its indent become single tokens. The same texts give the same merges.
    whole_words: the frequent words and dotted names of the texts become tokens and there are no merges, so that every
    other word falls to single bytes: what a small policy has to copy is then made of few token types.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    extra = len(CONTROL) + len(ADDED)
    if vocab_size < SMALLEST_BPE:
        raise ConfigError(f"vocab_size={vocab_size}: a byte-level BPE needs at least {SMALLEST_BPE}")
    texts = list(texts)
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_WORDS if whole_words else _SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if whole_words:
        counts = collections.Counter(piece for text in texts for piece, _ in splitter.pre_tokenize_str(text))
        compact = [piece for text in _COMPACT for piece, _ in splitter.pre_tokenize_str(text)]
        frequent = sorted((p for p, n in counts.items() if n > 1), key=lambda p: (-counts[p], p))
        words = [w for w in dict.fromkeys([*compact, *frequent]) if len(w) > 1][: vocab_size - extra - len(alphabet)]
        vocab = {piece: i for i, piece in enumerate([*alphabet, *words])}
        backend = Backend(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    else:
        backend = Backend(models.BPE())
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    if not whole_words:
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - extra, initial_alphabet=alphabet, show_progress=False, min_frequency=2)
        weight = 1_000 + sum(map(len, texts)) // 100  # frequent enough to be merged within any vocabulary
        backend.train_from_iterator([*texts, *(piece for piece in _COMPACT for _ in range(weight))], trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    return FastTokenizer(fast, extra_stops=(backend.token_to_id("<|endoftext|>"),))


@contextlib.contextmanager
def _refusals(messages: Sequence[dict]) -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template refuses a conversation of {', '.join(m['role'] for m in messages)}: {error}") from error


def _special(table: dict[str, int], name: str) -> int:
    if name not in table:
        raise ConfigError(f"the tokenizer has no control token {name!r}: it has {', '.join(sorted(table)) or 'none'}")
    return table[name]


def _stops(folder: Path) -> set[int]:
    found: set[int] = set()
    for file in ("config.json", "generation_config.json"):
        if (folder / file).is_file():
            eos = json.loads((folder / file).read_text()).get("eos_token_id")
            found.update(eos if isinstance(eos, list) else () if eos is None else (eos,))
    return found


def _byte_chars() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable bytes stand for themselves, the others for U+0100 and up, in order."""
    table, shift = {}, 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(256 + shift)] = byte
            shift += 1
    return table


_CHAR_TO_BYTE = _byte_chars()


def _piece_bytes(piece: str) -> bytes:
    """Bytes of a SentencePiece-like piece in a fast tokenizer: `<0x0A>` is a byte, U+2581 a space."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()

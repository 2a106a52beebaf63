"""Tokenizers of both kinds, and ChatML in pieces against the template of a saved folder. Qwen's templates: test_chat_qwen.py."""

import numpy as np
import pytest
import sentencepiece

from sage_jax.errors import ConfigError
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.tokenizer import FastTokenizer, SentencePieceTokenizer, load_tokenizer, train_bpe

TEXTS = [
    "```python\ndef count_songs(artist: str) -> int:\n    total = 0\n    for song in apis.spotify.show_songs():\n"
    "        if song['artist'] == artist:\n            total += 1\n    return total\n```",
    "Answer: 2024-05-17, 33 songs — ça va? 日本",
] * 10
SAMPLES = [*TEXTS[:2], "👩‍🚀 x\t\r\n\n   y", "a<|im_end|>b <|im_start|>system\nhi", "", " ", "\n", "`` ` ````", "Ünïcödé\x00é\u2028"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS, 420)


@pytest.fixture(scope="module")
def sp_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for t in TEXTS for line in t.split("\n")]), model_prefix=str(folder / "m"), vocab_size=400,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        control_symbols=["<|im_start|>", "<|im_end|>"], hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return folder / "m.model"


@pytest.fixture(params=["bpe", "sp"])
def tokenizer(request, bpe, sp_file):
    return bpe if request.param == "bpe" else load_tokenizer(sp_file)


@pytest.mark.parametrize("text", SAMPLES)
def test_text_survives_and_never_becomes_control(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {tokenizer.special("<|im_end|>"), tokenizer.special("<|im_start|>")} & set(ids)
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.removeprefix(b" " if isinstance(tokenizer, SentencePieceTokenizer) else b"") == text.encode() or text == " "


def test_every_id_has_bytes_and_control_tokens_their_text(tokenizer):
    for i in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.token_bytes(i), bytes)
    end = tokenizer.end_of_turn_id
    assert tokenizer.token_bytes(end) == b"<|im_end|>" and tokenizer.special("<|im_end|>") == end and end in tokenizer.stop_ids
    ids = tokenizer.encode("hi")
    assert tokenizer.decode([*ids, end]) == "hi<|im_end|>"
    with pytest.raises(IndexError):
        tokenizer.token_bytes(tokenizer.vocab_size)
    with pytest.raises(ConfigError, match=r"<\|im_end\|>"):
        tokenizer.special("<|nope|>")


def test_an_emoji_over_several_tokens(tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) >= 4
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "😀"
    assert "😀" not in tokenizer.decode(ids[:-1])
    assert "\ufffd" in tokenizer.decode(ids[:-1])


def test_bpe_is_compact_where_code_needs_it(bpe):
    for piece in ("```", "```python\n", "\n    ", "\n        "):
        assert len(bpe.encode(piece)) == 1, piece
    assert [bpe.decode([i]) for i in bpe.encode("2024")] == list("2024")
    fence = bpe.encode("x\n```")
    assert bpe.decode(fence[-1:]) == "```"
    assert bpe.vocab_size <= 420
    assert bpe.encode("<think>") == [bpe.special("<think>")]
    with pytest.raises(ConfigError, match="at least"):
        train_bpe(TEXTS, 200)


def test_bpe_is_deterministic_and_survives_saving(bpe, tmp_path):
    bpe.save(tmp_path)
    again, other = load_tokenizer(tmp_path), train_bpe(TEXTS, 420)
    assert isinstance(again, FastTokenizer)
    for text in SAMPLES:
        assert again.encode(text) == bpe.encode(text) == other.encode(text)
    assert (again.vocab_size, again.pad_id, again.end_of_turn_id) == (bpe.vocab_size, bpe.pad_id, bpe.end_of_turn_id)


def test_stop_ids_are_the_union_of_all_configs(bpe, tmp_path):
    bpe.save(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert load_tokenizer(tmp_path).stop_ids == {7, 8, 9, bpe.end_of_turn_id}


def test_sentencepiece_survives_saving_and_bad_models_are_refused(sp_file, tmp_path):
    one = load_tokenizer(sp_file)
    one.save(tmp_path / "s")
    assert load_tokenizer(tmp_path / "s").encode(TEXTS[0]) == one.encode(TEXTS[0])
    for change, words in (
        ({"control_symbols": [], "user_defined_symbols": ["<|im_start|>", "<|im_end|>"]}, "control_symbols"),
        ({"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}, "newlines"),
        ({"control_symbols": []}, "no control token"),
    ):
        options = {
            "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
            "control_symbols": ["<|im_start|>", "<|im_end|>"], **change,
        }  # fmt: skip
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "bad"), vocab_size=350, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            load_tokenizer(tmp_path / "bad.model")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def conversation(turns):
    messages = [{"role": "system", "content": "You write Python."}]
    for n in range(turns):
        messages.append({"role": "user", "content": f"  Task {n}: <|im_end|>\n\n    print('é😀')\n"})
        messages.append({"role": "assistant", "content": f"```python\nprint({n})\n```"})
    return messages


@pytest.mark.parametrize("turns", range(1, 7))
@pytest.mark.parametrize("sampled_end", [True, False])
def test_pieces_equal_full_rendering(tokenizer, turns, sampled_end):
    chat, messages = ChatRenderer(tokenizer), conversation(turns)
    ids, mask, pending = [], [], []
    for message in messages:
        if message["role"] != "assistant":
            pending.append(message)
            continue
        prompt = chat.open_turn(pending)
        sampled = tokenizer.encode(message["content"]) + ([tokenizer.end_of_turn_id] if sampled_end else [])
        closing = chat.close_turn(sampled_end)
        ids += prompt + sampled + closing
        mask += [0] * len(prompt) + [1] * len(sampled) + [0] * len(closing)
        pending = []
    full, full_mask = chat.full(messages)
    assert ids == full.tolist()
    assert full_mask.sum() == sum(mask) + (0 if sampled_end else turns)
    content = "".join(m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant")
    parts = np.split(full, np.flatnonzero(np.diff(full_mask)) + 1)
    assert "".join(tokenizer.decode(p) for p in parts[1::2]) == content


@pytest.mark.parametrize("turns", range(1, 7))
def test_full_rendering_equals_the_folders_template(bpe, tmp_path, turns):
    """Content without control-token text: transformers' own tokenisation of a template would turn that into control tokens."""
    from transformers import AutoTokenizer

    bpe.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{**m, "content": m["content"].replace("<|im_end|>", "|")} for m in conversation(turns)]
    want = theirs.apply_chat_template(messages, return_dict=False)
    full, _ = ChatRenderer(load_tokenizer(tmp_path)).full(messages)
    assert full.tolist() == want
    prompt = theirs.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=False)
    assert ChatRenderer(bpe).open_turn(messages[:2]) == prompt


def test_unknown_roles_and_a_missing_template_are_refused(bpe):
    with pytest.raises(ConfigError, match="unknown role"):
        ChatRenderer(bpe).open_turn([{"role": "function", "content": ""}])
    other = train_bpe(TEXTS, 420)
    other.fast.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(other)


def test_a_sentencepiece_folder_has_a_template_of_its_own(sp_file, tmp_path):
    one = load_tokenizer(sp_file)
    one.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text((tmp_path / "chat_template.jinja").read_text().replace("{%- for", "{{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}{%- for", 1))
    other = load_tokenizer(tmp_path)
    opening = [{"role": "user", "content": "hi <|im_end|>"}]
    ids = ChatRenderer(other).open_turn(opening, first=True)
    assert other.decode(ids) == other.render(opening, add_generation_prompt=True) and "Be kind." in other.decode(ids)
    assert ids.count(one.special("<|im_end|>")) == 2 and "Be kind." not in one.render(opening)
    other.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").render(opening) == other.render(opening)

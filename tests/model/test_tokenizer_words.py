"""A vocabulary of whole words: known words are one token, all others fall to single bytes."""

import pytest

from sage_jax.model.tokenizer import load_tokenizer, train_bpe

TEXTS = ["total = apis.venmo.show_transactions(query='')\nprint(total)", "What is the total that '' sent me?"] * 3


@pytest.fixture(scope="module")
def words():
    return train_bpe(TEXTS, 400, whole_words=True)


def test_known_words_are_whole_and_names_are_bytes(words):
    def pieces(text):
        return [words.decode([i]) for i in words.encode(text)]

    assert pieces(" apis.venmo.show_transactions") == [" apis.venmo.show_transactions"]
    assert pieces(" total") == [" total"]
    assert pieces("'Ida Otal'") == ["'", *"Ida Otal", "'"]
    assert pieces("```python\n") == ["```python\n"] and pieces("2023") == list("2023")


def test_every_text_survives_also_through_a_folder(words, tmp_path):
    words.save(tmp_path)
    again = load_tokenizer(tmp_path)
    for text in (*TEXTS, "Zoë \U0001f600 <|im_end|>", "a\n\n    b\t"):
        assert words.decode(words.encode(text)) == text
        assert again.encode(text) == words.encode(text)

"""Chat datasets: files, labels, cuts, held-out scenarios. Real tokenizer and renderer."""

import numpy as np
import pytest
from qwen_chat import TEMPLATES, qwen_tokenizer

from sage_jax.errors import ConfigError
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.tokenizer import CHATML, train_bpe
from sage_jax.rl.batch import RowShape, Sample, pack
from sage_jax.sft.dataset import encode, held_out, read_dataset, write_dataset


def record(*texts, scenario="s", train=None):
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts)]
    for i, keep in (train or {}).items():
        messages[i]["train"] = keep
    return {"messages": messages, "meta": {"scenario_id": scenario}}


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["hello world", "print(1)", "user assistant system\n"] * 20, 300)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


def labels(sample):
    return [int(i) for i, m in zip(sample.ids, sample.mask) if m]


def test_labels_are_content_and_end_of_turn(renderer, tokenizer):
    encoded = encode([record("hello", "print(1)", "world", "hello world")], renderer, 200)
    end = tokenizer.special("<|im_end|>")
    want = [*tokenizer.encode("print(1)"), end, *tokenizer.encode("hello world"), end]
    assert labels(encoded.samples[0]) == want and (encoded.skipped, encoded.cut) == (0, 0)


def test_untrained_messages_are_context_only(renderer, tokenizer):
    encoded = encode([record("hello", "bad", "world", "print(1)", train={1: False, 3: True})], renderer, 200)
    assert labels(encoded.samples[0]) == [*tokenizer.encode("print(1)"), tokenizer.special("<|im_end|>")]
    text = tokenizer.decode([int(i) for i in encoded.samples[0].ids])
    assert "bad" in text


def test_conversations_without_labels_are_skipped_and_counted(renderer):
    records = [record("hello " * 20, "print(1)"), record("hello", "print(1)"), record("hello", "x", train={1: False})]
    with pytest.warns(UserWarning, match="2 of 3"):
        encoded = encode(records, renderer, 24)
    assert encoded.skipped == 2 and [s.key for s in encoded.samples] == [(0, 1, 0)]
    with pytest.warns(UserWarning, match="1 more lose"):
        cut = encode([record("hello", "print(1) " * 30)], renderer, 24)
    assert cut.cut == 1 and len(cut.samples[0].ids) == 24


@pytest.mark.parametrize("template,thinking", [*((t, True) for t in TEMPLATES), ("qwen3", False)])
def test_labels_for_the_templates_of_qwen(tmp_path, template, thinking):
    """The last label of every assistant turn is the end of turn; thoughts of earlier turns are labels too."""
    tokenizer = qwen_tokenizer(tmp_path, template, thinking=thinking)
    one = record("hello", "<think>\nhm\n</think>\n\nprint(1)", "world", "<think>\nso\n</think>\n\nprint(2)", train={1: True})
    one["messages"][2:3] = [{"role": "tool", "content": "[1]"}, {"role": "tool", "content": "[2]"}]
    (sample,) = encode([one], ChatRenderer(tokenizer), 400).samples
    opened = "" if template == "qwen3_thinking" else "<think>\n"
    want = [[*tokenizer.encode(f"{opened}{thought}\n</think>\n\nprint({n})"), tokenizer.end_of_turn_id] for n, thought in ((1, "hm"), (2, "so"))]
    assert labels(sample) == [*want[0], *want[1]]
    assert sum(i == tokenizer.special("<|im_start|>") for i in sample.ids) == {"qwen2": 6, "qwen2_5": 5}.get(template, 4)
    one["messages"][1]["train"] = False
    assert labels(encode([one], ChatRenderer(tokenizer), 400).samples[0]) == want[1]


def test_padding_is_told_by_place_and_never_by_id():
    """The end of a turn has the id that rows are padded with, and is still trained."""
    sample = Sample((0, 0, 0), np.array([5, 7, 0], np.int32), np.array([0, 1, 1], np.float32), np.zeros(3, np.float32), 1.0)
    (batch,) = pack([sample], [RowShape(1, 5)], normaliser="token").micro_batches
    assert batch.ids.tolist() == [[5, 7, 0, 0, 0]] and batch.mask.tolist() == [[0, 1, 1, 0, 0]] and batch.segment_ids.tolist() == [[1, 1, 1, 0, 0]]


def test_a_record_that_the_template_refuses_is_named(tmp_path):
    refusing = "{%- for m in messages if m.role == 'tool' %}{{- raise_exception('no tools') }}{%- endfor %}"
    chat = ChatRenderer(qwen_tokenizer(tmp_path, refusing + CHATML))
    tools = record("hello", "print(1)")
    tools["messages"].insert(1, {"role": "tool", "content": "x"})
    with pytest.raises(ConfigError, match=r"record 2: .*no tools"):
        encode([record("hello", "print(1)"), tools], chat, 200)


def test_files_round_trip_and_are_never_half_written(tmp_path):
    path = tmp_path / "sub" / "d.jsonl"
    records = [record("é \ud800 \n", "ok"), record("a", "b", scenario="t")]
    assert write_dataset(path, records) == 2
    assert read_dataset(path) == records

    def broken():
        yield records[0]
        raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        write_dataset(path, broken())
    assert read_dataset(path) == records


@pytest.mark.parametrize("line, word", [
    ('{"messages": [', "line 2: not JSON"), ("[]", "line 2: a record is"), ('{"messages": [], "meta": {}}', "no assistant"),
    ('{"messages": [{"role": "function", "content": "x"}], "meta": {}}', "message 0"),
    ('{"messages": [{"role": "assistant", "content": "x"}], "meta": {}}', "begins with"),
    ('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [1]}], "meta": {}}', "message 1: tool_calls"),
    ('{"messages": [{"role": "assistant", "content": null}], "meta": {}}', "message 0"),
    ('{"messages": [{"role": "assistant", "content": "", "train": 1}], "meta": {}}', "true or false"),
])  # fmt: skip
def test_wrong_lines_are_named(tmp_path, line, word):
    path = tmp_path / "d.jsonl"
    write_dataset(path, [record("a", "b")])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ConfigError, match=word):
        read_dataset(path)


def test_missing_or_empty_file(tmp_path):
    with pytest.raises(ConfigError, match="collect"):
        read_dataset(tmp_path / "no.jsonl")
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(ConfigError, match="empty"):
        read_dataset(tmp_path / "e.jsonl")


def test_whole_scenarios_are_held_out():
    records = [record("a", str(i), scenario=f"s{i % 10}") for i in range(40)]
    train, test = held_out(records, 0.2)
    def owners(rs):
        return {r["meta"]["scenario_id"] for r in rs}
    assert len(owners(test)) == 2 and len(test) == 8 and not owners(train) & owners(test)
    order = np.random.default_rng(0).permutation(40)
    assert owners(held_out([records[i] for i in order], 0.2)[1]) == owners(test)
    assert held_out(records, 0.0) == (records, [])
    with pytest.raises(ConfigError, match="one scenario"):
        held_out(records[:1], 0.1)

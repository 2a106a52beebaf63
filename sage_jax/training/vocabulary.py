"""A small tokenizer from collected text in which names and titles are left out.

What a policy copies from the prompt should consist of few token types: with names and titles taken out of the training text,
they fall to single characters, while code words stay whole. (See the demo's lab log for what this is worth.)
"""

from __future__ import annotations

import json
from pathlib import Path

from sage_jax.model.tokenizer import Tokenizer, train_bpe
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.roots import DataRoot


def train_tokenizer(dataset: Path, root: DataRoot, vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the conversations of `dataset`, each without its task's values and its person's data."""
    texts = []
    for line in dataset.read_text().splitlines():
        record = json.loads(line)
        task = root.task(record["meta"]["task_id"])
        p = task.supervisor
        drop = [str(v) for v in load_reference(root.path, task.task_id).values.values()]
        drop += [p.email, p.phone_number, p.first_name, p.last_name]
        for message in record["messages"]:
            # Observations of the engine are not ours to learn words from; the policy reads them character by character.
            if message["role"] == "user" and message is not _first_user(record):
                continue
            text = message["content"]
            for value in sorted(drop, key=len, reverse=True):
                text = text.replace(value, "")
            texts.append(text)
    return train_bpe(texts, vocab_size)


def _first_user(record: dict) -> dict:
    return next(m for m in record["messages"] if m["role"] == "user")

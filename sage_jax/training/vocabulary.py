"""A small tokenizer from collected text in which names and titles are left out.

What a policy copies from the prompt should consist of few token types: with names and titles taken out of the training text,
they fall to single characters, while code words stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from sage_jax.model.tokenizer import Tokenizer, train_bpe
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.roots import DataRoot


def private_text(root: DataRoot, task_id: str) -> list[str]:
    """The strings of a task that differ from task to task: its parameters and its person's data, longest first."""
    person = root.task(task_id).supervisor
    values = load_reference(root.path, task_id).values.values()
    found = [*map(str, values), person.email, person.phone_number, person.first_name, person.last_name]
    return sorted(found, key=len, reverse=True)


def train_tokenizer(records: Sequence[dict], private: Sequence[Sequence[str]], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over conversations.

    Args:
      records: chat records; of the user messages only the first is read, since observations are the engine's words.
      private: for each record the strings to leave out.
    """
    texts = []
    for record, drop in zip(records, private, strict=True):
        users = 0
        for message in record["messages"]:
            users += message["role"] == "user"
            if message["role"] == "user" and users > 1:
                continue
            text = message["content"]
            for value in drop:
                text = text.replace(value, "")
            texts.append(text)
    return train_bpe(texts, vocab_size, whole_words=True)

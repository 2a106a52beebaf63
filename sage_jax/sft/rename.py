"""More names for the same demonstrations: a task's own strings are replaced by random ones, the same way in every message.

A small policy that sees each name a few times learns the names by heart and never learns to copy from the prompt. The copies
are not judged again: what they show is the verified episode but for the names.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np

_LETTERS = np.array(list("etaoinsrhldcumfpgwybvkxjqz"))
_SHARES = np.array([12, 9, 8, 8, 7, 7, 6, 6, 6, 4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1], float)
_SHARES /= _SHARES.sum()


def renamed(record: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A copy of a chat record in which the strings of `meta["names"]` are replaced; without any, an equal copy.

    They are replaced in the messages and in `meta["instruction"]`.
    Each word keeps its length to within two letters and its capital; what is no letter stays, as does what follows the @ of an
    address. A single word in small letters stays as it is: it is one of a few (a priority, a relationship, a kind of file).
    """
    record = copy.deepcopy(record)
    table = {name: _random_like(name, rng) for name in record["meta"].get("names", ()) if re.search(r"[A-Z @]", name)}
    if not table:
        return record
    # Longest first, all at once: what was put in is never replaced again.
    pattern = re.compile("|".join(re.escape(n) for n in sorted(table, key=len, reverse=True)))
    for message in record["messages"]:
        message["content"] = pattern.sub(lambda m: table[m.group()], message["content"])
    if "instruction" in record["meta"]:
        record["meta"]["instruction"] = pattern.sub(lambda m: table[m.group()], record["meta"]["instruction"])
    return record


def _random_like(name: str, rng: np.random.Generator) -> str:
    def word(match: re.Match) -> str:
        old = match.group()
        length = max(2, len(old) + int(rng.integers(-2, 3)))
        new = "".join(rng.choice(_LETTERS, length, p=_SHARES))
        return new.capitalize() if old[0].isupper() else new

    local, at, domain = name.partition("@")
    return re.sub("[A-Za-z]+", word, local) + at + domain

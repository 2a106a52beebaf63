"""Short forms of demonstrations for the first updates: the instruction, then the answer that calls a skill, and nothing else.

Copying a name from the prompt needs two attention layers that work together, and a small policy finds them several times
sooner where little else is in the context. What was found carries over to the whole prompts that follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sage_jax.errors import ConfigError


def short_forms(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The short form of each record whose `meta["mode"]` is "call".

    Raises:
      ConfigError: there is no such record, or one without `meta["instruction"]`.
    """
    short = []
    for record in records:
        meta = record["meta"]
        if meta.get("mode") != "call":
            continue
        if "instruction" not in meta:
            raise ConfigError('sft.short_steps needs meta["instruction"] of each conversation; collect again, or set it to 0')
        answer = next(m for m in reversed(record["messages"]) if m["role"] == "assistant")
        short.append({"messages": [{"role": "user", "content": meta["instruction"]}, answer], "meta": meta})
    if not short:
        raise ConfigError('sft.short_steps needs conversations whose meta["mode"] is "call", and there is none; set it to 0')
    return short

"""Chat datasets: JSON lines of {"messages": [{"role", "content"[, "train"]}, ...], "meta": {...}}, and their token form.

Roles are system, user, assistant and tool. An assistant message with "train": false is context only; others are trained on
their content and their end of turn. Each turn keeps its think block, as in a rollout (see model/chat.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_jax.errors import ConfigError
from sage_jax.model.chat import ROLES, ChatRenderer
from sage_jax.report.episodes import write_text
from sage_jax.rl.batch import Sample

# What some datasets keep beside the content; left out silently it would not be trained.
_BESIDE = ("tool_calls", "reasoning_content")


def write_dataset(path: str | os.PathLike, records: Iterable[dict[str, Any]]) -> int:
    """Writes the records under a temporary name and renames; returns how many.

    Raises:
      ConfigError: a record that `read_dataset` would refuse.
    """
    lines = []
    for number, record in enumerate(records, 1):
        _check(record, f"record {number}")
        lines.append(json.dumps(record, ensure_ascii=True) + "\n")  # ASCII: a lone surrogate survives
    write_text(path, "".join(lines))
    return len(lines)


def read_dataset(path: str | os.PathLike) -> list[dict[str, Any]]:
    """All records.

    Raises:
      ConfigError: the file is missing or empty, or a line is not such a record; the message names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no chat dataset at {path}; `python -m sage_jax.collect` writes one")
    records = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON ({error.msg}); the file may have been cut") from error
            _check(record, f"{path}, line {number}")
            records.append(record)
    if not records:
        raise ConfigError(f"the chat dataset {path} is empty")
    return records


def _check(record: Any, where: str) -> None:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list) or not isinstance(record.get("meta"), dict):
        raise ConfigError(f'{where}: a record is {{"messages": [...], "meta": {{...}}}}')
    for i, message in enumerate(record["messages"]):
        if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            raise ConfigError(f"{where}, message {i}: it needs a role of {', '.join(ROLES)} and a content that is a string")
        if not isinstance(message.get("train", True), bool):
            raise ConfigError(f"{where}, message {i}: 'train' is true or false")
        if beside := [k for k in _BESIDE if message.get(k)]:
            raise ConfigError(f"{where}, message {i}: {beside[0]} would not be trained: write it into the content, in the words of the chat template")
    if not any(m["role"] == "assistant" for m in record["messages"]):
        raise ConfigError(f"{where}: there is no assistant message to learn from")
    if record["messages"][0]["role"] == "assistant":
        raise ConfigError(f"{where}: a conversation begins with a system or user message")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A dataset as samples, in the order of its records; `Sample.key` is (0, place of the record, 0)."""

    samples: tuple[Sample, ...]
    skipped: int  # records left out because no label was left
    cut: int  # records kept whose end was cut off


def encode(records: Sequence[dict[str, Any]], renderer: ChatRenderer, max_tokens: int) -> Encoded:
    """Renders the records and cuts each to `max_tokens`.

    A record all of whose labels are cut off (or untrained) is left out with a warning and counted: its loss would be 0/0.
    """
    samples, skipped, cut = [], 0, 0
    for place, record in enumerate(records):
        try:
            ids, mask = renderer.full([{"role": m["role"], "content": m["content"]} for m in record["messages"]])
        except ConfigError as error:
            raise ConfigError(f"record {place + 1}: {error}") from error
        mask = _trained_only(mask, [m.get("train", True) for m in record["messages"] if m["role"] == "assistant"])
        last = np.flatnonzero(mask)
        cut += bool(len(last) and last[0] < max_tokens <= last[-1])
        ids, mask = ids[:max_tokens], mask[:max_tokens]
        if not mask.any():
            skipped += 1
            continue
        samples.append(Sample((0, place, 0), ids, mask.astype(np.float32), np.zeros(len(ids), np.float32), 1.0))
    if skipped or cut:
        warnings.warn(
            f"{skipped} of {len(records)} conversations have no trained token within {max_tokens} tokens and are left out; "
            f"{cut} more lose their end", stacklevel=2,
        )  # fmt: skip
    return Encoded(tuple(samples), skipped, cut)


def _trained_only(mask: np.ndarray, train: Sequence[bool]) -> np.ndarray:
    """Clears the mask of assistant messages that are context only; each message is one run of ones."""
    mask = np.asarray(mask).copy()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    runs = list(zip(edges[::2], edges[1::2]))
    if len(runs) != len(train):
        raise ValueError(f"{len(train)} assistant messages gave {len(runs)} runs of labels")
    for (start, end), keep in zip(runs, train):
        if not keep:
            mask[start:end] = 0
    return mask


def held_out(records: Sequence[dict[str, Any]], share: float) -> tuple[list[dict], list[dict]]:
    """(train, held-out) records: whole scenarios (`meta["scenario_id"]`; a record without one stands alone).

    The choice depends on the ids alone. At least one scenario is held out if share > 0, and at least one is trained.

    Raises:
      ConfigError: share outside [0, 1), or a single scenario that would have to be both.
    """
    if not 0 <= share < 1:
        raise ConfigError(f"the held-out share must be in [0, 1), got {share}")
    if share == 0:
        return list(records), []
    owners = [str(r["meta"].get("scenario_id", f"record {i}")) for i, r in enumerate(records)]
    scenarios = sorted(set(owners), key=lambda s: hashlib.sha256(s.encode()).hexdigest())
    if len(scenarios) < 2:
        raise ConfigError(f"all {len(records)} conversations belong to one scenario: nothing can be held out; set the share to 0")
    chosen = set(scenarios[: min(max(1, round(share * len(scenarios))), len(scenarios) - 1)])
    return [r for r, o in zip(records, owners) if o not in chosen], [r for r, o in zip(records, owners) if o in chosen]

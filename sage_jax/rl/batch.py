"""Batches: whole episodes packed into rows of a few fixed shapes. Shared by RL and SFT; numpy on the host.

Axes: B rows of a micro-batch, T tokens of a row. Rows hold segments (episodes) one after the other; segment ids start
at 1 in each row and positions at 0 in each segment; 0 is padding. Order never depends on arrival: samples are sorted
by (chain, rollout, position) and placed longest first into the first row with room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from sage_jax.errors import ConfigError
from sage_jax.rl.losses import NORMALISERS

if TYPE_CHECKING:
    from sage_jax.agent.trajectory import TokenRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """One micro-batch. Values of a token stand at that token's own index (its log-prob is predicted at the index before)."""

    ids: jax.Array | np.ndarray  # int32 [B, T]
    positions: jax.Array | np.ndarray  # int32 [B, T], from 0 in each segment
    segment_ids: jax.Array | np.ndarray  # int32 [B, T], 0 = padding
    mask: jax.Array | np.ndarray  # float32 [B, T], 1 on trained tokens (sampled by the policy)
    logprobs: jax.Array | np.ndarray  # float32 [B, T], the sampler's
    old_logprobs: jax.Array | np.ndarray  # float32 [B, T], denominator of the ratio; the sampler's until recomputed
    advantages: jax.Array | np.ndarray  # float32 [B, T]
    weights: jax.Array | np.ndarray  # float32 [B, T], the normaliser's weight of the token
    denominator: jax.Array | np.ndarray  # float32 [B], shares that add up to the batch's denominator
    tokens_share: jax.Array | np.ndarray  # float32 [B], of the denominator by packed tokens: the weight of a loss on all tokens, as a router's

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, length)."""
        return self.ids.shape


@dataclasses.dataclass(frozen=True)
class Sample:
    """One episode as training sees it. `ids`, `mask`, `logprobs` have one length."""

    key: tuple[int, int, int]  # (chain, rollout, position): unique, and the order of the batch
    ids: np.ndarray  # int32 [t]
    mask: np.ndarray  # float32 [t]
    logprobs: np.ndarray  # float32 [t]; read under mask 1 only
    advantage: float

    def __post_init__(self):
        if not len(self.ids) == len(self.mask) == len(self.logprobs):
            raise ValueError(f"sample {self.key}: ids {len(self.ids)}, mask {len(self.mask)}, logprobs {len(self.logprobs)}")
        if len(self.mask) and self.mask[0]:
            raise ValueError(f"sample {self.key}: its first token is to be trained but has no context")

    @classmethod
    def of(cls, key: tuple[int, int, int], tokens: TokenRecord, advantage: float) -> Sample:
        """From the token record of an episode."""
        ids, mask, logprobs = tokens.arrays()
        return cls(key, ids, mask, logprobs, float(advantage))

    @property
    def trained(self) -> int:
        """|o|: trained tokens of the whole episode."""
        return int((np.asarray(self.mask) > 0).sum())


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Rows of a micro-batch and tokens of a row: one compiled shape."""

    rows: int
    length: int


@dataclasses.dataclass(frozen=True)
class Packed:
    """The micro-batches of one optimizer step, with what was measured while packing."""

    micro_batches: tuple[TrainBatch, ...]
    denominator: float
    trained_tokens: int  # tokens with a loss in the micro-batches
    tokens: int  # tokens that are no padding
    padding_share: float  # of all places in the micro-batches, empty rows included
    idle: int  # samples left out because they have no trained token


def pack(
    samples: Sequence[Sample],
    shapes: Sequence[RowShape],
    *,
    normaliser: str = "sequence",
    constant: float = 1.0,
) -> Packed:
    """Packs whole episodes into rows, first fit by falling length.

    What follows the last trained token of an episode has no loss and is left off. The denominators count all samples
    given, also those left out, so that leaving one out changes no other sample's weight.

    Args:
      samples: all valid episodes of the optimizer step, in any order.
      shapes: the row shapes allowed; a new row gets the shortest length that holds its first episode.
      normaliser: one of NORMALISERS, defined in `rl.losses`.
      constant: tokens, for the `constant` normaliser.

    Raises:
      ConfigError: unknown names, no or doubled shapes, an episode longer than every row.
      ValueError: two samples with one key.
    """
    if normaliser not in NORMALISERS:
        raise ConfigError(f"unknown normaliser {normaliser!r}; choices: {', '.join(NORMALISERS)}")
    by_length = {s.length: s for s in shapes}
    if not shapes or len(by_length) != len(shapes) or any(s.rows < 1 or s.length < 2 for s in shapes):
        raise ConfigError(f"row shapes must be one or more, each of its own length, with rows >= 1; got {list(shapes)}")
    lengths = sorted(by_length)
    samples = sorted(samples, key=lambda s: s.key)
    if len({s.key for s in samples}) != len(samples):
        raise ValueError("two samples have the same (chain, rollout, position)")

    sizes = {s.key: _useful_length(s) for s in samples}
    idle = {s.key for s in samples if s.trained == 0}
    if long := [s for s in samples if sizes[s.key] > lengths[-1]]:
        raise ConfigError(
            f"{len(long)} of {len(samples)} episodes are longer than the longest row ({lengths[-1]} tokens): "
            f"{', '.join(f'{s.key} has {sizes[s.key]}' for s in long[:4])}; use longer rows or a smaller context"
        )

    rows: list[tuple[int, list[Sample]]] = []  # (row length, its samples)
    room: list[int] = []
    for sample in sorted((s for s in samples if s.key not in idle), key=lambda s: -sizes[s.key]):
        size = sizes[sample.key]
        row = next((i for i, free in enumerate(room) if free >= size), None)
        if row is None:
            row = len(rows)
            length = next(n for n in lengths if n >= size)
            rows.append((length, []))
            room.append(length)
        rows[row][1].append(sample)
        room[row] -= size

    trained = {s.key: s.trained for s in samples}
    weights = {k: 1.0 / max(n, 1) if normaliser == "sequence" else 1.0 for k, n in trained.items()}
    denominator = {
        "sequence": float(len({s.key[:2] for s in samples})),
        "token": float(sum(trained.values())),
        "constant": constant * len(samples),
    }[normaliser]
    micro_batches = []
    for length in lengths:
        same = [content for n, content in rows if n == length]
        for start in range(0, len(same), by_length[length].rows):
            micro_batches.append(_fill(same[start : start + by_length[length].rows], by_length[length], sizes, weights))
    if not micro_batches:  # every host runs at least one call, with zero weight
        micro_batches.append(_fill([], by_length[lengths[0]], sizes, weights))
    micro_batches[0].denominator[0] = denominator
    places = sum(b.ids.size for b in micro_batches)
    used = sum(sizes[s.key] for _, content in rows for s in content)
    for b in micro_batches:
        b.tokens_share[:] = denominator * (b.segment_ids > 0).sum(1) / max(used, 1)
    return Packed(
        micro_batches=tuple(micro_batches),
        denominator=denominator,
        trained_tokens=sum(trained[s.key] for _, content in rows for s in content),
        tokens=used,
        padding_share=1 - used / places,
        idle=len(idle),
    )


def _useful_length(sample: Sample) -> int:
    """Tokens up to and with the last trained one; 0 if none is trained."""
    trained = np.flatnonzero(np.asarray(sample.mask) > 0)
    return int(trained[-1]) + 1 if len(trained) else 0


def _fill(rows: list[list[Sample]], shape: RowShape, sizes: dict, weights: dict) -> TrainBatch:
    ints = {n: np.zeros((shape.rows, shape.length), np.int32) for n in ("ids", "positions", "segment_ids")}
    floats = {n: np.zeros((shape.rows, shape.length), np.float32) for n in ("mask", "logprobs", "advantages", "weights")}
    for i, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row, 1):
            size = sizes[sample.key]
            at = (i, slice(start, start + size))
            trained = np.asarray(sample.mask[:size]) > 0
            ints["ids"][at] = sample.ids[:size]
            ints["positions"][at] = np.arange(size)
            ints["segment_ids"][at] = segment
            floats["mask"][at] = trained
            floats["logprobs"][at] = np.where(trained, sample.logprobs[:size], 0.0)
            floats["advantages"][at] = np.where(trained, sample.advantage, 0.0)
            floats["weights"][at] = np.where(trained, weights[sample.key], 0.0)
            start += size
    zeros = {n: np.zeros(shape.rows, np.float32) for n in ("denominator", "tokens_share")}
    return TrainBatch(**ints, **floats, **zeros, old_logprobs=floats["logprobs"].copy())


def split_by_rollout(samples: Sequence[Sample], parts: int, seed: int) -> list[list[Sample]]:
    """Mini-batches for several optimizer steps on one batch: whole rollouts, shuffled by `seed`, sizes differing by at most one.

    Raises:
      ConfigError: for more parts than rollouts.
    """
    rollouts = sorted({s.key[:2] for s in samples})
    if not 1 <= parts <= max(len(rollouts), 1):
        raise ConfigError(f"cannot split {len(rollouts)} rollouts into {parts} mini-batches")
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(rollouts))
    part = {rollouts[i]: n % parts for n, i in enumerate(order)}
    return [[s for s in samples if part[s.key[:2]] == p] for p in range(parts)]

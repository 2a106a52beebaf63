"""Packing: content, weights, order, limits."""

import numpy as np
import pytest

from sage_jax.agent.trajectory import TokenRecord
from sage_jax.errors import ConfigError
from sage_jax.rl.batch import RowShape, Sample, pack, split_by_rollout


def sample(key, length, trained, advantage=1.0, tail=0, seed=0):
    rng = np.random.default_rng([seed, *key])
    mask = np.zeros(length + tail, np.float32)
    mask[length - trained : length] = 1
    return Sample(key, rng.integers(1, 99, length + tail).astype(np.int32), mask, -rng.random(length + tail).astype(np.float32), advantage)


def segments(packed):
    """(ids, mask, logprobs, advantages, weights, positions) of every segment found in the rows."""
    for batch in packed.micro_batches:
        for row in range(batch.shape[0]):
            for segment in range(1, batch.segment_ids[row].max() + 1):
                at = batch.segment_ids[row] == segment
                yield tuple(a[row][at] for a in (batch.ids, batch.mask, batch.logprobs, batch.advantages, batch.weights, batch.positions))


def test_every_episode_is_there_once_and_whole():
    samples = [sample((c, r, 0), 5 + 3 * c + r, 2 + r, advantage=c - 1.5, tail=2) for c in range(4) for r in range(3)]
    packed = pack(samples, [RowShape(2, 32)])
    found = {tuple(ids): (mask, lp, adv, w, pos) for ids, mask, lp, adv, w, pos in segments(packed)}
    assert len(found) == len(samples)
    for s in samples:
        n = len(s.ids) - 2  # the tail has no loss
        mask, lp, adv, w, pos = found[tuple(s.ids[:n])]
        np.testing.assert_array_equal(mask, s.mask[:n])
        np.testing.assert_array_equal(lp, s.logprobs[:n] * mask)
        np.testing.assert_array_equal(adv, s.advantage * mask)
        np.testing.assert_allclose(w, mask / s.trained)
        np.testing.assert_array_equal(pos, np.arange(n))
    assert packed.tokens == sum(len(s.ids) - 2 for s in samples)
    assert packed.trained_tokens == sum(s.trained for s in samples)
    places = sum(b.ids.size for b in packed.micro_batches)
    assert packed.padding_share == pytest.approx(1 - packed.tokens / places)


def test_order_of_arrival_does_not_matter():
    samples = [sample((c, r, k), 4 + (c * 7 + r * 5 + k) % 11, 2) for c in range(3) for r in range(3) for k in range(2)]
    a = pack(samples, [RowShape(3, 24)])
    b = pack([samples[i] for i in np.random.default_rng(1).permutation(len(samples))], [RowShape(3, 24)])
    for x, y in zip(a.micro_batches, b.micro_batches, strict=True):
        for name in ("ids", "positions", "segment_ids", "mask", "logprobs", "advantages", "weights", "denominator"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def test_shapes_come_from_the_set():
    samples = [sample((0, r, 0), n, 2) for r, n in enumerate([5, 7, 30, 31, 6, 6])]
    packed = pack(samples, [RowShape(2, 32), RowShape(4, 8)])
    assert {b.shape for b in packed.micro_batches} <= {(2, 32), (4, 8)}
    assert packed.tokens == 85


@pytest.mark.parametrize("normaliser, denominator", [("sequence", 3.0), ("token", 10.0), ("constant", 32.0)])
def test_denominators_count_what_was_left_out(normaliser, denominator):
    samples = [sample((0, 0, 0), 6, 2), sample((0, 0, 1), 9, 3), sample((0, 1, 0), 12, 5), sample((0, 2, 0), 30, 0)]
    packed = pack(samples, [RowShape(1, 16)], normaliser=normaliser, constant=8.0)
    assert packed.denominator == denominator == sum(b.denominator.sum() for b in packed.micro_batches)
    assert packed.idle == 1 and packed.trained_tokens == 10


def test_too_long():
    samples = [sample((0, 0, 0), 40, 5), sample((0, 1, 0), 6, 2)]
    with pytest.raises(ConfigError, match="longest row"):
        pack(samples, [RowShape(1, 16)])
    assert pack([sample((0, 0, 0), 16, 5, tail=30)], [RowShape(1, 16)]).tokens == 16  # a tail without loss is cut


def test_nothing_to_train_is_one_empty_micro_batch():
    packed = pack([], [RowShape(2, 8)])
    assert len(packed.micro_batches) == 1 and packed.denominator == 0 and packed.padding_share == 1


def test_mask_by_length_not_by_end_of_sequence():
    """Ids that equal a padding or end id are content if they were sampled (pad == eos included)."""
    eos = pad = 0
    no_eos = Sample((0, 0, 0), np.array([9, 5, 6, 7], np.int32), np.array([0, 1, 1, 1], np.float32), np.zeros(4, np.float32), 1.0)
    with_eos = Sample((0, 1, 0), np.array([9, 5, eos], np.int32), np.array([0, 1, 1], np.float32), np.zeros(3, np.float32), 1.0)
    batch = pack([no_eos, with_eos], [RowShape(2, 5)]).micro_batches[0]
    assert batch.ids.tolist() == [[9, 5, 6, 7, pad], [9, 5, eos, pad, pad]]
    assert batch.mask.tolist() == [[0, 1, 1, 1, 0], [0, 1, 1, 0, 0]]


def test_sample_from_a_token_record():
    tokens = TokenRecord()
    tokens.append([1, 2, 3], 0)
    tokens.append([4, 5], 1, [-0.5, -0.25])
    s = Sample.of((0, 0, 0), tokens, 0.5)
    assert s.trained == 2 and s.mask.tolist() == [0, 0, 0, 1, 1] and s.logprobs[3] == -0.5


def test_refusals():
    with pytest.raises(ValueError, match="no context"):
        Sample((0, 0, 0), np.array([1, 2]), np.array([1.0, 1.0]), np.zeros(2), 1.0)
    with pytest.raises(ValueError, match="same"):
        pack([sample((0, 0, 0), 4, 1), sample((0, 0, 0), 5, 1)], [RowShape(1, 8)])
    with pytest.raises(ConfigError, match="own length"):
        pack([], [RowShape(1, 8), RowShape(2, 8)])
    with pytest.raises(ConfigError, match="sequence"):
        pack([], [RowShape(1, 8)], normaliser="batch")


def test_mini_batches_keep_rollouts_together():
    samples = [sample((c, r, k), 5, 1) for c in range(3) for r in range(2) for k in range(2)]
    parts = split_by_rollout(samples, 4, seed=3)
    assert sorted(s.key for p in parts for s in p) == [s.key for s in samples]
    owners = [{s.key[:2] for s in p} for p in parts]
    assert all(not (a & b) for i, a in enumerate(owners) for b in owners[:i]) and {len(o) for o in owners} == {1, 2}
    with pytest.raises(ConfigError, match="6 rollouts"):
        split_by_rollout(samples, 7, seed=3)

"""The last turn of a position does not depend on the order in which its episodes arrive."""

import asyncio
import itertools

import pytest

from sage_jax.agent.early_stop import EarlyStop
from sage_jax.errors import ConfigError


def play(lengths, order, turn, share):
    """Runs episodes of given lengths; `order` is the order in which they get to take a turn. Returns their cut lengths."""

    async def main():
        early = EarlyStop(len(lengths), turn, share)
        tokens = [asyncio.Event() for _ in lengths]

        async def episode(i):
            turns = 0
            while turns < lengths[i]:
                if early.should_stop(str(i), turns):
                    break
                await asyncio.sleep(0)
                for _ in range(order.index(i) * 3):
                    await asyncio.sleep(0)
                turns += 1
            tokens[i].set()
            last = await early.last_turn(str(i), turns)
            return last if last is not None and turns >= last and lengths[i] > last else turns

        return await asyncio.wait_for(asyncio.gather(*(episode(i) for i in range(len(lengths)))), 5)

    return asyncio.run(main())


@pytest.mark.parametrize(
    "lengths, turn, share, last",
    [
        ([2, 3, 3, 9], 2, 0.25, 3),  # one of four may be left behind: all but it have ended after 3
        ([2, 2, 2, 9], 4, 0.25, 4),  # never before `turn`
        ([5, 5, 5, 5], 2, 0.25, 5),  # nobody is left behind
        ([1, 4, 6, 8], 1, 0.5, 4),
    ],
)
def test_the_last_turn_is_the_same_for_every_order_of_arrival(lengths, turn, share, last):
    for order in itertools.permutations(range(len(lengths))):
        assert play(lengths, list(order), turn, share) == [min(n, last) for n in lengths]


def test_no_sample_counts_as_ended():
    async def main():
        early = EarlyStop(2, 1, 0.0)
        early.should_stop("a", 0)
        early.ended("b", 0)
        return await asyncio.wait_for(early.last_turn("a", 3), 5)

    assert asyncio.run(main()) is None


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="share"):
        EarlyStop(4, 1, 1.0)
    with pytest.raises(ConfigError, match="turn"):
        EarlyStop(4, 0, 0.1)

"""Whole runs over small and awkward data: nothing repeated, nothing skipped, no rank with other steps than the rest."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.data.loader import Loader, Sequences
from trainer.data.order import Order, permute, round_keys

CPU = torch.device("cpu")


class Text:
    """A token stream in memory whose tokens count upwards."""

    def __init__(self, tokens: int) -> None:
        self._tokens = np.arange(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def gather(self, starts: np.ndarray, out: np.ndarray) -> None:
        out[:] = self._tokens[starts[:, None] + np.arange(out.shape[1])]


def sequences_of(count: int, seed: int) -> Sequences:
    return Sequences([Text(2 * count + 1)], Order((count,), (1.0,), seed), 2)


def steps_of(sequences: Sequences, batch: int, world: int, micro: int, position: int, steps: int) -> list[np.ndarray]:
    """The sequences of each step, over all ranks; every rank has to have as many steps and micro-batches."""
    ranks = [list(Loader(sequences, batch, micro, r, world, CPU).iterate(position, steps)) for r in range(world)]
    assert [len(rank) for rank in ranks] == [steps] * world
    seen = []
    for parts in zip(*ranks, strict=True):
        assert all(len(part.micro_batches) == batch // world // micro for part in parts)
        assert all(part.tokens == 2 * batch for part in parts)
        seen.append(np.concatenate([m.rows[:, 0].numpy() // 2 for part in parts for m in part.micro_batches]))
    return seen


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    shapes=st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (1, 6), (2, 3), (6, 1), (3, 2)]), min_size=3),
    stops=st.lists(st.integers(0, 8), min_size=2, max_size=2),
    seed=st.integers(0, 2**63),
)
@example(count=1, shapes=[(1, 1), (3, 1), (6, 1)], stops=[1, 1], seed=0)  # fewer sequences than one batch
@example(count=9, shapes=[(1, 2), (3, 2), (1, 1)], stops=[1, 2], seed=1)  # an epoch ends in mid-accumulation
@example(count=6, shapes=[(2, 1), (2, 1), (2, 1)], stops=[1, 1], seed=2)  # resumes at the very end of an epoch
@example(count=13, shapes=[(1, 6), (6, 1), (2, 3)], stops=[2, 0], seed=3)  # a remainder that fills no batch
def test_a_run_resumed_twice_at_other_world_sizes_sees_each_sequence_once_an_epoch(count, shapes, stops, seed):
    batch, sequences = 6, sequences_of(count, seed)
    steps = math.ceil(3 * count / batch) + 2
    first, second = sorted(min(stop, steps) for stop in np.cumsum(stops).tolist())
    seen = []
    for (world, micro), begin, end in zip(shapes, (0, first, second), (first, second, steps), strict=False):
        seen += steps_of(sequences, batch, world, micro, begin * batch, end - begin)
    undisturbed = steps_of(sequences, batch, 1, 6, 0, steps)
    assert len(seen) == steps and all(map(np.array_equal, seen, undisturbed))
    visited = np.concatenate(seen)
    epochs = len(visited) // count
    assert epochs >= 3
    for epoch in visited[: epochs * count].reshape(epochs, count):
        assert np.array_equal(np.sort(epoch), np.arange(count))
    rest = visited[epochs * count :]
    assert len(np.unique(rest)) == len(rest)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2**32 - 5, 2**63), seed=st.integers(0, 2**63), start=st.integers(0, 2**32), skip=st.integers())
@example(size=2**32 + 1, seed=0, start=2**32 - 4000, skip=0)
def test_neighbours_in_a_range_above_32_bits_never_collide_and_stay_inside(size, seed, start, skip):
    index = (np.uint64(start % (size - 4000)) + np.arange(4000, dtype=np.uint64)).astype(np.uint64)
    found = permute(index, size, round_keys(seed, skip))
    assert int(found.max()) < size
    assert len(np.unique(found)) == 4000


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(
        st.sampled_from([1, 2, 3, 5, 7, 8191, 10_007]),
        st.integers(1, 13).flatmap(lambda bits: st.sampled_from([2**bits - 1, 2**bits, 2**bits + 1])),
        st.integers(1, 20_000),
    ),
    seed=st.integers(0, 2**63),
)
def test_every_index_comes_exactly_once_for_awkward_sizes(size, seed):
    found = permute(np.arange(size), size, round_keys(seed))
    assert np.array_equal(np.sort(found).astype(np.int64), np.arange(size))


# --- quality of the shuffle --------------------------------------------------------------------------


def linear_feistel(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A network whose round function is linear, as a public trainer has it: what the tests below must refuse."""
    half = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = index.astype(np.uint64) >> half, index.astype(np.uint64) & mask
    for key in keys:
        left, right = right, left ^ ((right * key + (key >> np.uint64(7))) & mask)
    return (left << half) | right


def true_permutation(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """numpy's own shuffle, to see that the tests accept what is random."""
    return np.random.default_rng(keys.tolist()).permutation(size)[index]


def bit_imbalance(shuffle, size: int, windows: int = 64, width: int = 4096) -> float:
    """The worst deviation, in standard deviations, of an output bit's count over aligned windows of inputs."""
    starts = np.arange(windows, dtype=np.uint64) * np.uint64(width)
    index = (starts[:, None] + np.arange(width, dtype=np.uint64)).ravel()
    worst = 0.0
    for seed in range(4):
        found = shuffle(index, size, round_keys("bits", seed)).astype(np.uint64).reshape(windows, width)
        for bit in range((size - 1).bit_length()):
            ones = ((found >> np.uint64(bit)) & np.uint64(1)).sum(axis=1).astype(np.float64)
            worst = max(worst, float(np.abs(ones - width / 2).max() / (width / 4) ** 0.5))
    return worst


def serial_statistic(shuffle, size: int) -> float:
    """Chi-square of pairs of neighbours over 16 x 16 cells, in standard deviations from what it has to be."""
    found = shuffle(np.arange(size), size, round_keys("serial")).astype(np.int64) * 16 // size
    counts = np.bincount(found[:-1] * 16 + found[1:], minlength=256)
    expected = (size - 1) / 256
    return float((((counts - expected) ** 2 / expected).sum() - 255) / (2 * 255) ** 0.5)


SIZE = 2**18  # a power of four, so that no cycle is walked and every bit has to be balanced


@pytest.mark.parametrize("shuffle", [permute, true_permutation], ids=["ours", "numpy"])
def test_every_output_bit_is_balanced_over_every_aligned_window(shuffle):
    # 4 seeds x 64 windows x 18 bits: the largest of 4,608 normal deviates is below 6 but once in a hundred thousand
    assert bit_imbalance(shuffle, SIZE) < 6


def parity_imbalance(shuffle, size: int) -> float:
    """The worst deviation, in standard deviations, of the parity of the first 4,096 outputs over 20 seeds."""
    index = np.arange(4096, dtype=np.uint64)
    odd = [int((shuffle(index, size, round_keys(seed)) & np.uint64(1)).sum()) for seed in range(20)]
    return max(abs(count - 2048) / 32 for count in odd)


@pytest.mark.parametrize("size", [2**30, 10**12, 2**40, 2**62])
def test_the_parity_of_the_first_outputs_of_a_huge_range_is_a_fair_coin(size):
    assert parity_imbalance(permute, size) < 6


def test_a_feistel_network_with_a_linear_round_function_is_caught_by_the_same_tests():
    assert bit_imbalance(linear_feistel, SIZE) > 30
    assert parity_imbalance(linear_feistel, 2**30) == 64, "the first 4,096 outputs of some seeds share their parity"
    found = linear_feistel(np.arange(4096, dtype=np.uint64), 2**30, round_keys("bits", 0))
    assert len(np.unique(found)) == 4096, "it is a bijection all the same"


@pytest.mark.parametrize("shuffle", [permute, true_permutation], ids=["ours", "numpy"])
@pytest.mark.parametrize("size", [SIZE, 100_003, 65_537])
def test_pairs_of_neighbours_are_spread_as_by_a_true_permutation(shuffle, size):
    assert abs(serial_statistic(shuffle, size)) < 5


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return abs(float(np.corrcoef(one, other)[0, 1])) * len(one) ** 0.5


@pytest.mark.parametrize("size", [SIZE, 100_003])
def test_nothing_relates_epochs_or_seeds_that_differ_by_one(size):
    positions = np.arange(2 * size)
    orders = [Order((size,), (1.0,), seed).locate(positions)[1].reshape(2, size) for seed in (7, 8, 9)]
    shuffles = [epoch for order in orders for epoch in order]
    for number, one in enumerate(shuffles):
        assert correlation(one[:-1], one[1:]) < 5, "neighbours"
        for other in shuffles[number + 1 :]:
            assert correlation(one, other) < 5
            assert correlation(one[:-1], other[1:]) < 5
            assert int((one == other).sum()) < 12, "two random shuffles agree in about one place"
            low = np.bincount((one & 15) * 16 + (other & 15), minlength=256)
            statistic = ((low - size / 256) ** 2 / (size / 256)).sum()
            assert abs(statistic - 255) / (2 * 255) ** 0.5 < 6


def test_a_resume_far_into_a_huge_order_is_as_cheap_as_a_start():
    order = Order((10**12,), (1.0,), 1)
    here = order.locate(np.arange(10**12 - 50, 10**12 + 50, dtype=np.int64))[1]
    assert len(np.unique(here[:50])) == 50 and len(np.unique(here[50:])) == 50
    assert here.max() < 10**12

"""The order of sequences: a bijection that looks random, and mixtures in exact proportions."""

import tracemalloc

import numpy as np
import pytest

from trainer.data.order import Order, permute, round_keys

SMALL = [1, 2, 3, 4, 5, 7, 8, 9, 10, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257]
LARGER = [1009, 4095, 4096, 4097, 10_007, 65_535, 65_536, 65_537, 104_729, 10**6]
HUGE = [2**32 - 1, 2**32, 2**32 + 1, 2**33 - 1, 2**33, 2**33 + 1, 2**53 + 1, 2**62, 2**63 - 25, 2**63 - 1, 2**63]
CYCLE = 4096
MIXTURE = Order(sequences=(1000, 7, 333), weights=(0.7, 0.1, 0.2), seed=5)


def shuffled(size: int, *labels: int | str) -> np.ndarray:
    return permute(np.arange(size), size, round_keys(*(labels or (0,)))).astype(np.int64)


def fmix64(value: int) -> int:
    """The finaliser of MurmurHash3 as its author publishes it, in unbounded integers."""
    wrap = 2**64 - 1
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & wrap
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & wrap
    return value ^ value >> 33


def inverse(value: int, size: int, keys: list[int]) -> int:
    """Undo the Feistel network in unbounded integers, walking the cycle backwards."""
    half = max(2, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = value >> half, value & mask
        for key in reversed(keys):
            left, right = right ^ (fmix64(left ^ key) & mask), left
        value = left << half | right
        if value < size:
            return value


def chi_square(left: np.ndarray, right: np.ndarray, buckets: int) -> float:
    """How far two series of bucket numbers are from independent, in standard deviations of the statistic."""
    counts = np.bincount(left * buckets + right, minlength=buckets**2).reshape(buckets, buckets)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
    freedom = (buckets - 1) ** 2
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", SMALL + LARGER)
def test_every_index_is_reached_exactly_once(size):
    for seed in (0, 1):
        assert np.array_equal(np.sort(shuffled(size, seed)), np.arange(size))


@pytest.mark.parametrize("size", HUGE)
def test_windows_of_a_huge_range_stay_inside_it_and_never_collide(size):
    starts = (0, size // 3, size // 2, size - 2000)
    windows = [np.arange(2000, dtype=np.uint64) + np.uint64(start) for start in starts]
    found = permute(np.concatenate(windows), size, round_keys("huge"))
    assert found.dtype == np.uint64
    assert int(found.max()) < size
    assert len(np.unique(found)) == len(found)
    assert int(found.max()) > size * 0.99, "the top of the range is reached"


@pytest.mark.parametrize("size", [5, 1000, *HUGE])
def test_the_inverse_in_unbounded_integers_leads_back_so_nothing_overflows(size):
    keys = round_keys("inverse", size)
    indices = sorted({0, 1, size // 7, size // 2, size - 2, size - 1})
    images = permute(np.array(indices, dtype=np.uint64), size, keys)
    assert [inverse(int(image), size, [int(key) for key in keys]) for image in images] == indices


def test_a_huge_range_needs_no_more_memory_than_a_small_one():
    tracemalloc.start()
    permute(np.arange(1000), 2**63, round_keys(1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 500_000


@pytest.mark.parametrize("index", [-1, 10, 2**62])
def test_an_index_outside_the_range_is_refused(index):
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([0, index], dtype=np.int64), 10, round_keys(1))


@pytest.mark.parametrize("size", [50_021, 65_536, 100_003])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_low_bits_of_a_shuffle_are_independent_of_the_index(size, shift):
    image = shuffled(size, "quality", size)
    assert abs(chi_square(np.arange(size) >> shift & 7, image & 7, 8)) < 5
    assert abs(chi_square(image[:-1] >> shift & 7, image[1:] & 7, 8)) < 5, "neighbours"


@pytest.mark.parametrize("size", [50_021, 65_536, 100_003])
def test_high_parts_of_a_shuffle_are_independent_of_the_index_and_of_the_neighbour(size):
    image = shuffled(size, "quality", size)
    place, part = np.arange(size) * 16 // size, image * 16 // size
    assert abs(chi_square(place, part, 16)) < 5
    assert abs(chi_square(part[:-1], part[1:], 16)) < 5
    steps = np.diff(image) % size * 16 // size
    assert abs(chi_square(place[1:], steps, 16)) < 5
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 5 / size**0.5


def test_the_first_outputs_share_no_parity_for_any_of_many_seeds():
    for seed in range(40):
        odd = permute(np.arange(1000), 10**12, round_keys(seed)) & np.uint64(1)
        assert 400 < int(odd.sum()) < 600


def test_different_seeds_streams_and_epochs_give_unrelated_shuffles():
    shuffles = [
        shuffled(10_000, *labels) for labels in [(0,), (1,), (0, "shuffle", 0, 0), (0, "shuffle", 0, 1), (1, 0)]
    ]
    for number, one in enumerate(shuffles):
        for other in shuffles[number + 1 :]:
            assert int((one == other).sum()) < 12, "two random shuffles agree in about one place"


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1000])
def test_each_epoch_visits_each_sequence_once_and_in_another_order(size):
    order = Order((size,), (1.0,), seed=3)
    stream, sequence = order.locate(np.arange(4 * size))
    epochs = sequence.reshape(4, size)
    assert not stream.any()
    assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in epochs)
    if size >= 64:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4


def test_the_order_is_the_one_that_checkpoints_of_earlier_versions_rely_on():
    _, sequence = Order((10,), (1.0,), seed=1).locate(np.arange(20))
    assert sequence.tolist() == [5, 4, 2, 8, 6, 9, 7, 3, 0, 1, 3, 2, 7, 8, 6, 5, 4, 9, 0, 1]
    stream, sequence = Order((3, 5), (1.0, 3.0), seed=1).locate(np.arange(12))
    assert stream.tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1]
    assert sequence.tolist() == [0, 0, 2, 4, 4, 1, 1, 4, 2, 2, 0, 4]


@pytest.mark.parametrize("weights", [(0.7, 0.1, 0.2), (1.0, 1.0, 1.0), (5.0, 0.0001, 3.0), (1e6, 1.0, 2.0)])
def test_mixture_proportions_are_exact_in_every_cycle(weights):
    order = Order((50, 60, 70), weights, seed=2)
    stream, _ = order.locate(np.arange(5 * CYCLE))
    counts = np.stack([np.bincount(cycle, minlength=3) for cycle in stream.reshape(5, CYCLE)])
    exact = np.array(weights) / sum(weights) * CYCLE
    assert (counts == counts[0]).all()
    assert (np.abs(counts[0] - exact) < len(weights) - 1).all()
    assert (counts[0] > 0).all(), "a positive weight is drawn"


@pytest.mark.parametrize(("start", "length"), [(1, 10_000), (4095, 20_001), (123_457, 50_000), (2**40 + 17, 30_000)])
def test_mixture_proportions_are_close_over_any_long_window(start, length):
    stream, _ = MIXTURE.locate(np.arange(start, start + length))
    counts = np.bincount(stream, minlength=3)
    assert (np.abs(counts - np.array([0.7, 0.1, 0.2]) * length) < 200).all()


def test_no_draw_of_a_source_is_skipped_or_repeated():
    cycles = 20
    stream, sequence = MIXTURE.locate(np.arange(cycles * CYCLE))
    for number, size in enumerate(MIXTURE.sequences):
        visits = np.bincount(sequence[stream == number], minlength=size)
        epochs, rest = divmod(int((stream == number).sum()), size)
        assert set(visits.tolist()) <= {epochs, epochs + 1}
        assert int((visits == epochs + 1).sum()) == rest


@pytest.mark.parametrize("order", [MIXTURE, Order((1000,), (1.0,), seed=9)], ids=["mixture", "one stream"])
def test_the_order_is_a_pure_function_of_the_position_however_it_is_asked(order):
    positions = np.arange(10_000)
    whole = np.stack(order.locate(positions))
    for size in (1, 7, 4096, 5000):
        firsts = range(0, 300 if size == 1 else 10_000, size)
        parts = [np.stack(order.locate(positions[first : first + size])) for first in firsts]
        joined = np.concatenate(parts, axis=1)
        assert np.array_equal(joined, whole[:, : joined.shape[1]])
    backwards = np.stack(order.locate(positions[::-1]))
    assert np.array_equal(backwards[:, ::-1], whole)


def test_far_positions_are_found_at_once():
    stream, sequence = Order((2**62,), (1.0,), seed=1).locate(np.array([2**62 - 1, 2**62, 2**62 + 1]))
    assert not stream.any()
    assert ((sequence >= 0) & (sequence < 2**62)).all()

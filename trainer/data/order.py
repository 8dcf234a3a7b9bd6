"""Which training sequence comes when: a pure function of (lengths, weights, seed, position).

There is no index array and no sampler state, so start-up and resume cost nothing at any size.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

_ROUNDS = 6
_CYCLE = 4096
"""Draws after which the proportions of a weighted mixture are exact."""


def round_keys(*labels: int | str) -> np.ndarray:
    """Independent 64-bit round keys for a bijection, derived from ``labels``. Shape [6], uint64."""
    digest = hashlib.blake2b(repr(labels).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _mix(value: np.ndarray) -> np.ndarray:
    """The 64-bit finaliser of MurmurHash3 (Austin Appleby, public domain): every input bit reaches every output bit."""
    value = value ^ (value >> np.uint64(33))
    value = value * np.uint64(0xFF51AFD7ED558CCD)
    value = value ^ (value >> np.uint64(33))
    value = value * np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


def permute(index: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A keyed bijection of [0, size) applied to each index.

    A balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that
    holds ``size``; results outside the range walk the cycle until they fall inside it (Black and
    Rogaway 2002), at most four steps on average.

    Args:
        index: any shape, values in [0, size).
        size: 1 to 2**63.
        keys: uint64 round keys from :func:`round_keys`: shape [6], or [*index.shape, 6] for keys of its own an index.

    Returns:
        uint64, the shape of ``index``.

    Raises:
        ValueError: an index lies outside [0, size).
    """
    index = np.asarray(index, dtype=np.uint64)
    if index.size and int(index.max()) >= size:
        raise ValueError(f"index {int(index.max())} is outside [0, {size})")
    half = np.uint64(max(2, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)

    def once(value: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (_mix(right ^ keys[..., number]) & mask)
        return (left << half) | right

    value = once(index, keys)
    while len(outside := np.flatnonzero(value >= np.uint64(size))):
        walking = keys if keys.ndim == 1 else keys.reshape(-1, _ROUNDS)[outside]
        value.flat[outside] = once(value.flat[outside], walking)
    return value


@dataclass(frozen=True)
class Order:
    """The endless order of training sequences over one or several streams.

    One stream is walked in full once an epoch, reshuffled each time. Several are drawn in
    proportion to their weights, exactly so over every 4,096 draws, each with epochs of its own.
    """

    sequences: tuple[int, ...]
    """Number of sequences in each stream; every one at least 1."""
    weights: tuple[float, ...]
    """Relative weight of each stream."""
    seed: int

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stream, and the sequence within it, at each position of the order.

        Args:
            positions: int64, shape [n], each at least 0.

        Returns:
            (stream, sequence): int64 arrays of shape [n].
        """
        positions = np.asarray(positions, dtype=np.int64)
        if len(self.sequences) == 1:
            return np.zeros_like(positions), self._shuffled(positions, 0)
        counts = _shares(self.weights)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        cycle, place = np.divmod(positions, _CYCLE)
        slot = _by_epoch(place, cycle, _CYCLE, (self.seed, "mixture"))
        stream = np.searchsorted(bounds, slot, side="right") - 1
        draw = cycle * counts[stream] + slot - bounds[stream]
        sequence = np.empty_like(draw)
        for number in range(len(self.sequences)):
            chosen = stream == number
            sequence[chosen] = self._shuffled(draw[chosen], number)
        return stream, sequence

    def _shuffled(self, draws: np.ndarray, stream: int) -> np.ndarray:
        size = self.sequences[stream]
        epoch, place = np.divmod(draws, size)
        return _by_epoch(place, epoch, size, (self.seed, "shuffle", stream))


def _by_epoch(place: np.ndarray, epoch: np.ndarray, size: int, labels: tuple[int | str, ...]) -> np.ndarray:
    """Permute each place within its own epoch's shuffle of [0, size)."""
    if not len(place):
        return place
    if epoch[0] == epoch[-1] and (epoch == epoch[0]).all():
        keys = round_keys(*labels, int(epoch[0]))
    else:
        epochs, which = np.unique(epoch, return_inverse=True)
        keys = np.stack([round_keys(*labels, number) for number in epochs.tolist()])[which]
    return permute(place, size, keys).astype(np.int64)


def _shares(weights: tuple[float, ...]) -> np.ndarray:
    """Whole draws of each source in one cycle, by largest remainder; a positive weight gets at least one."""
    exact = np.asarray(weights, dtype=np.float64) / sum(weights) * _CYCLE
    counts = np.maximum(np.floor(exact), (exact > 0).astype(float)).astype(np.int64)
    by_remainder = np.argsort(counts - exact, kind="stable")
    for number in range(_CYCLE - int(counts.sum())):
        counts[by_remainder[number]] += 1
    while counts.sum() > _CYCLE:
        counts[np.argmax(counts)] -= 1
    return counts

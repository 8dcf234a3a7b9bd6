"""Best-fit packing: which pieces of which documents make up each training sequence.

Owns the plan: how it is computed, and the Arrow table that holds it. Never reads tokens.

A plan is an Arrow file with a row a sequence: ``starts`` and ``lengths``, the pieces of the token
stream that are trained in it, as lists. It is a pure function of the documents' lengths.
"""

from bisect import bisect_left, insort
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.shards import as_numpy
from trainer.errors import DataError

FORMAT_VERSION = 1


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack documents into sequences so that none that fits is cut (Ding et al. 2024, algorithm 1).

    A document longer than a sequence is first cut into full pieces and a rest. Then the pieces, longest
    first, each go into the sequence with the least room that still holds it (best-fit decreasing). Pieces
    of one length and sequences of one room are handled together, so that the time depends on the number
    of different lengths more than on that of documents.

    Args:
        lengths: tokens of each document in the stream's order, int64, shape [documents].
        capacity: tokens of a sequence.

    Returns:
        (offsets, starts, lengths): sequence i holds pieces [offsets[i], offsets[i + 1]); a piece begins
        at token ``starts`` of the stream. int64, shapes [sequences + 1], [pieces], [pieces].
    """
    starts, sizes = _pieces(lengths, capacity)
    by_size = np.argsort(-sizes, kind="stable")
    different, firsts = np.unique(-sizes[by_size], return_index=True)
    borders = [*firsts.tolist(), len(sizes)]
    sequence = np.empty(len(sizes), dtype=np.int64)
    rooms: list[int] = []  # the different rooms left, ascending
    with_room: dict[int, list[np.ndarray]] = {}
    opened = 0

    def leave(room: int, numbers: np.ndarray) -> None:
        if room and len(numbers):
            if room not in with_room:
                insort(rooms, room)
                with_room[room] = []
            with_room[room].append(numbers)

    for size, first, end in zip((-different).tolist(), borders, borders[1:], strict=False):
        while first < end:
            place = bisect_left(rooms, size)
            if place < len(rooms):
                room = rooms.pop(place)
                numbers = np.concatenate(with_room.pop(room))
            else:
                room = capacity
                count = -(-(end - first) // (capacity // size))
                numbers = np.arange(opened, opened + count)
                opened += count
            fitting = room // size
            full, rest = divmod(min(end - first, fitting * len(numbers)), fitting)
            taken = full * fitting + rest
            sequence[first : first + taken] = np.repeat(numbers, fitting)[:taken]
            first += taken
            leave(room - fitting * size, numbers[:full])
            if rest:
                leave(room - rest * size, numbers[full : full + 1])
            leave(room, numbers[full + bool(rest) :])
    in_sequence = np.argsort(sequence, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=opened))]).astype(np.int64)
    chosen = by_size[in_sequence]
    return offsets, starts[chosen], sizes[chosen]


def _pieces(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of every piece: full ones of a document, then its rest."""
    lengths = np.asarray(lengths, dtype=np.int64)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.cumsum(lengths) - lengths)[document] + within * capacity
    return starts, np.minimum(lengths[document] - within * capacity, capacity)


def plan_name(source: int | None) -> str:
    """Name of the file that holds the plan of a source, or of all of them as one stream."""
    return "all.arrow" if source is None else f"source-{source:03d}.arrow"


def write_plan(path: Path, lengths: np.ndarray, sequence_length: int) -> dict[str, int]:
    """Compute the plan of a stream and write it.

    Returns:
        How many sequences, pieces and tokens it has.
    """
    offsets, starts, sizes = best_fit(lengths, sequence_length)
    table = pa.table(
        {
            "starts": pa.LargeListArray.from_arrays(offsets, starts),
            "lengths": pa.LargeListArray.from_arrays(offsets, sizes.astype(np.int32)),
        }
    )
    with pa.ipc.new_file(str(path), table.schema) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    return {"sequences": len(offsets) - 1, "pieces": len(starts), "tokens": int(sizes.sum())}


class PackingPlan:
    """A plan, mapped from disk."""

    def __init__(self, path: Path) -> None:
        """Map the plan in ``path``.

        Raises:
            DataError: it cannot be read.
        """
        try:
            batch = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
            starts, lengths = batch.column("starts"), batch.column("lengths")
            self._offsets = as_numpy(starts.offsets)
            self._starts, self._lengths = as_numpy(starts.values), as_numpy(lengths.values)
        except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, IndexError) as error:
            raise DataError(
                f"{path}: not a readable packing plan ({error}). Run the pipeline again: it rebuilds it."
            ) from error

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._offsets) - 1

    def pieces(self, sequence: int) -> tuple[list[int], list[int]]:
        """Where the pieces of a sequence begin in the stream, and their lengths."""
        chosen = slice(self._offsets[sequence], self._offsets[sequence + 1])
        return self._starts[chosen].tolist(), self._lengths[chosen].tolist()

    def tokens(self, sequences: np.ndarray) -> int:
        """Number of tokens in these sequences together."""
        return sum(int(self._lengths[self._offsets[n] : self._offsets[n + 1]].sum()) for n in sequences.tolist())

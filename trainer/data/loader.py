"""The prefetching loader: batches as a pure function of one number, the sequences consumed so far.

A sequence is ``sequence_length`` inputs and the same tokens one further as labels, so that
consecutive sequences overlap by one token and every token of the stream is predicted once. With a
packing plan a sequence is the labels of its pieces, before them the token that precedes the first one
(the end of another document, or the document's own text where it was cut), and padding after them.

Of conversations only the answers are labels. A row holds an id as it is where it is a label, else its
complement: ``~id``, and ``~(id + 2**32)`` where a conversation begins; padding is ``~0``.
"""

import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.data.order import Order
from trainer.data.packing import PackingPlan, plan_name
from trainer.data.shards import ANSWER, BEGINNING, ShardSet, TokenStream
from trainer.errors import DataError

NO_LABEL = -100
"""What stands for no label: torch's losses leave it out."""
PADDING = ~0
"""What stands in a row where there is no token."""
_BEGINS = 2**32
_LOCATED = 8192
"""Sequences whose places in the order are computed together, because a few cost as much as many."""
_BLOCK_BYTES = 2**22
"""Size up to which small batches are handed over together, to pay for waking a thread; the first is of one batch."""
_PREFETCHED_BLOCKS = 2


def positions_in_documents(rows: np.ndarray, end_id: int | None, conversations: bool = False) -> np.ndarray | None:
    """The position of each input within its document; None where documents are not told apart.

    Args:
        rows: int64, shape [n, sequence_length + 1].
        end_id: the token that ends a document; None tells none apart.
        conversations: whether the rows are of conversations, which may have that token inside.

    Returns:
        int64, shape [n, sequence_length]: 0 at each end token, since what follows it is another document;
            at the first token of each conversation.
    """
    if end_id is None:
        return None
    index = np.arange(rows.shape[1] - 1)
    begins = rows[:, :-1] < -_BEGINS if conversations else rows[:, :-1] == end_id
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)


@dataclass
class Sequences:
    """Random access to the training sequences of a shard set, in their shuffled order.

    Args to build one: see :meth:`open`.
    """

    streams: list[TokenStream]
    order: Order
    sequence_length: int
    plans: list[PackingPlan] | None = None
    """A stream's packing plan each; None where sequences are slices of the concatenated text."""
    marks: list[TokenStream] | None = None
    """A stream's marks each, where the documents are conversations."""
    end_id: int | None = None
    """The token that ends a document, where positions restart after it and attention stays inside documents."""

    @classmethod
    def open(
        cls,
        shards: ShardSet,
        sequence_length: int,
        weights: list[float] | None,
        seed: int,
        packing_dir: Path | None = None,
        document_mask: bool = False,
    ) -> "Sequences":
        """Open the training split.

        Args:
            weights: one a source to mix them in these proportions; None walks all of them as one stream.
            packing_dir: directory of the packing plans; None slices the concatenated text.
            document_mask: whether micro-batches say where documents begin.

        Raises:
            DataError: a stream is shorter than one sequence.
        """
        if weights is None:
            streams = [shards.stream("train")]
        else:
            streams = [shards.stream("train", source) for source in range(len(weights))]
        marks = None
        if shards.conversations:
            numbers = [None] if weights is None else range(len(weights))
            marks = [shards.stream("train", number, "marks") for number in numbers]
        end_id = shards.manifest["tokenizer"]["end_id"] if document_mask else None
        mixture = tuple(weights or [1.0])
        if packing_dir is not None:
            names = [plan_name(None if weights is None else source) for source in range(len(streams))]
            plans = [PackingPlan(packing_dir / name) for name in names]
            order = Order(tuple(map(len, plans)), mixture, seed)
            return cls(streams, order, sequence_length, plans, marks, end_id)
        lengths = []
        for number, stream in enumerate(streams):
            lengths.append((len(stream) - 1) // sequence_length)
            if lengths[-1] < 1:
                raise DataError(
                    f"data.sources: the training text of {'all' if weights is None else f'source {number}'} has "
                    f"{len(stream)} tokens, fewer than one sequence of data.sequence_length={sequence_length} needs. "
                    "Add text or shorten the sequences."
                )
        return cls(streams, Order(tuple(lengths), mixture, seed), sequence_length, marks=marks, end_id=end_id)

    def __len__(self) -> int:
        """Sequences in one epoch over all streams."""
        return sum(self.order.sequences)

    def locate(self, positions: np.ndarray) -> np.ndarray:
        """The stream, and the sequence within it, at each position of the order: int64, shape [n, 2]."""
        return np.stack(self.order.locate(positions), axis=1)

    def read(self, places: np.ndarray, out: np.ndarray) -> None:
        """Copy sequences.

        Args:
            places: from :meth:`locate`, shape [n, 2].
            out: int64, shape [n, sequence_length + 1], C-contiguous.
        """
        if self.plans is None:
            self._gather(self.streams, places, out)
        else:
            for row, (number, sequence) in zip(out, places.tolist(), strict=True):
                self._read_packed(number, sequence, row)
        if self.marks is not None:
            out[:] = marked(out, self._marks_of(places))

    def _gather(self, streams: list[TokenStream], places: np.ndarray, out: np.ndarray) -> None:
        starts = places[:, 1] * self.sequence_length
        if len(streams) == 1:
            return streams[0].gather(starts, out)
        for number, values in enumerate(streams):
            chosen = np.flatnonzero(places[:, 0] == number)
            rows = np.empty((len(chosen), out.shape[1]), out.dtype)
            values.gather(starts[chosen], rows)
            out[chosen] = rows

    def _marks_of(self, places: np.ndarray) -> np.ndarray:
        """The marks of sequences: uint8, shape [n, sequence_length + 1]; 0 in padding and in a packed row's first."""
        assert self.marks is not None
        marks = np.zeros((len(places), self.sequence_length + 1), np.uint8)
        if self.plans is None:
            self._gather(self.marks, places, marks)
            return marks
        for row, (number, sequence) in zip(marks, places.tolist(), strict=True):
            filled = 1
            for start, length in zip(*self.plans[number].pieces(sequence), strict=True):
                self.marks[number].read(start, row[filled : filled + length])
                if filled > 1:  # the rest of a conversation that was cut does not see what stands before it
                    row[filled] |= BEGINNING
                filled += length
        return marks

    def _read_packed(self, number: int, sequence: int, row: np.ndarray) -> None:
        assert self.plans is not None
        stream = self.streams[number]
        starts, lengths = self.plans[number].pieces(sequence)
        # before the first document comes the end of the last one, as before every other
        stream.read((starts[0] or len(stream)) - 1, row[:1])
        filled = 1
        for start, length in zip(starts, lengths, strict=True):
            stream.read(start, row[filled : filled + length])
            filled += length
        row[filled:] = PADDING

    @property
    def full(self) -> bool:
        """Whether every token of every sequence is a label."""
        return self.plans is None and self.marks is None

    def tokens(self, places: np.ndarray) -> int:
        """Number of labels in the sequences at these places, padding left out."""
        if self.marks is not None:
            return int((self._marks_of(places)[:, 1:] & ANSWER).sum())
        if self.plans is None:
            return len(places) * self.sequence_length
        return sum(plan.tokens(places[places[:, 0] == n, 1]) for n, plan in enumerate(self.plans))

    def positions(self, rows: np.ndarray) -> np.ndarray | None:
        """The position of each input within its document, of rows from :meth:`read`; see the function."""
        return positions_in_documents(rows, self.end_id, self.marks is not None)

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """The sequences at these positions of the order: int64, shape [len(positions), sequence_length + 1]."""
        rows = np.empty((len(positions), self.sequence_length + 1), dtype=np.int64)
        self.read(self.locate(positions), rows)
        return rows


def marked(rows: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """The rows of conversations as a micro-batch holds them; what is padding in them stays so.

    Args:
        rows: ids, int64, any shape.
        marks: uint8, the same shape; see `trainer.data.shards`.
    """
    hidden = ~np.where(marks & BEGINNING, rows + _BEGINS, rows)
    return np.where((rows < 0) | (marks & ANSWER > 0), rows, hidden)


@dataclass(slots=True)
class MicroBatch:
    """The sequences of one forward pass."""

    rows: torch.Tensor
    """int64, shape [sequences, sequence_length + 1], contiguous, in pinned memory where there is an accelerator."""
    positions: torch.Tensor | None = None
    """Positions within documents: int64, shape [sequences, sequence_length]; None where they are not told apart."""

    @property
    def inputs(self) -> torch.Tensor:
        """Input ids: int64, shape [sequences, sequence_length], contiguous; 0 in the padding."""
        rows = self.rows[:, :-1]
        return (rows ^ (rows >> 63)) & (_BEGINS - 1)

    @property
    def labels(self) -> torch.Tensor:
        """The id after each input: int64, shape [sequences, sequence_length], contiguous; -100 where it is no label."""
        labels = self.rows[:, 1:]
        return torch.where(labels < 0, NO_LABEL, labels)

    def to(self, device: torch.device) -> "MicroBatch":
        """This micro-batch on a device; a copy from pinned memory runs beside the computation."""
        positions = None if self.positions is None else self.positions.to(device, non_blocking=True)
        return MicroBatch(self.rows.to(device, non_blocking=True), positions)


@dataclass(slots=True)
class Batch:
    """A rank's part of one global batch."""

    micro_batches: list[MicroBatch]
    tokens: int
    """Labels in the whole global batch, over all ranks: what the sum of the losses is divided by."""

    def to(self, device: torch.device) -> "Batch":
        """This batch on a device."""
        return Batch([part.to(device) for part in self.micro_batches], self.tokens)


class _Buffers:
    """Memory for blocks of rows, used again once nobody holds a part of it.

    A block that one thread allocates and another frees goes back to the system, and the page faults of the
    next one cost as much as filling it. torch keeps pinned memory by itself.
    """

    def __init__(self) -> None:
        self._held: list[np.ndarray] = []

    def take(self, shape: tuple[int, int]) -> torch.Tensor:
        """Uninitialised int64 rows of this shape."""
        self._held = [buffer for buffer in self._held if buffer.shape == shape][-2 * _PREFETCHED_BLOCKS :]
        for number in range(len(self._held)):
            # referred to by the list and the call alone: every tensor over it is gone
            if sys.getrefcount(self._held[number]) == 2:
                break
        else:
            number = len(self._held)
            self._held.append(np.empty(shape, dtype=np.int64))
        return torch.from_numpy(self._held[number])


@dataclass
class Loader:
    """Yields this rank's micro-batches, global batch after global batch, prepared ahead in a thread.

    Global batch k is the order's sequences [k*B, (k+1)*B) whatever the world size: each rank takes
    an equal, consecutive part and cuts it into micro-batches.
    """

    sequences: Sequences
    global_batch: int
    micro_batch: int
    rank: int
    world_size: int
    device: torch.device
    seconds_waited: float = 0.0
    """Time that the training loop spent waiting for a batch."""

    def __post_init__(self) -> None:
        if self.global_batch % (self.world_size * self.micro_batch):
            raise ValueError(
                f"a global batch of {self.global_batch} sequences does not divide into micro-batches of "
                f"{self.micro_batch} on {self.world_size} ranks"
            )

    def batch(self, position: int) -> Batch:
        """This rank's part of the global batch that begins at sequence ``position``."""
        return self._cut(*next(self._prepared(position, 1)))[0]

    def iterate(self, position: int, steps: int) -> Iterator[Batch]:
        """The next ``steps`` global batches from ``position`` on; a bounded number is prepared ahead."""
        prepared: queue.Queue = queue.Queue(maxsize=_PREFETCHED_BLOCKS)
        stop = threading.Event()

        def put(item: object) -> None:
            while not stop.is_set():
                try:
                    return prepared.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def prepare() -> None:
            try:
                for block in self._prepared(position, steps):
                    if stop.is_set():
                        return
                    put(block)
            except BaseException as error:  # handed to the training loop, which raises it
                put(error)

        thread = threading.Thread(target=prepare, name="loader", daemon=True)
        thread.start()
        done = 0
        try:
            while done < steps:
                began = time.perf_counter()
                block = prepared.get()
                self.seconds_waited += time.perf_counter() - began
                if isinstance(block, BaseException):
                    raise block
                batches = self._cut(*block)
                for batch in batches:
                    yield batch if self.device.type == "cpu" else batch.to(self.device)
                done += len(batches)
        finally:
            stop.set()
            thread.join()

    def _prepared(self, position: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, list[int]]]:
        """This rank's rows of the global batches from ``position`` on, their positions, and each batch's tokens."""
        sequences, pinned, buffers = self.sequences, self.device.type == "cuda", _Buffers()
        share = self.global_batch // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        # how many labels the other ranks have is known without asking where every sequence is full
        of_batch = np.arange(self.global_batch, dtype=np.int64)[mine if sequences.full else slice(None)] + position
        most = max(1, _BLOCK_BYTES // (8 * (sequences.sequence_length + 1) * share))
        ahead = most * max(1, _LOCATED // (share * most))  # whole blocks, so that their memory fits the next ones
        together = 1
        for begin in range(0, steps, ahead):
            numbers = np.arange(begin, min(begin + ahead, steps), dtype=np.int64)
            places = sequences.locate((numbers[:, None] * self.global_batch + of_batch).ravel())
            places = places.reshape(len(numbers), len(of_batch), 2)
            first = 0
            while first < len(numbers):
                block = places[first : first + together]
                tokens = [self.global_batch * sequences.sequence_length] * len(block)
                if not sequences.full:
                    tokens = [sequences.tokens(of_step) for of_step in block]
                    block = block[:, mine]
                part = block.reshape(-1, 2)
                shape = (len(part), sequences.sequence_length + 1)
                rows = torch.empty(shape, dtype=torch.int64, pin_memory=True) if pinned else buffers.take(shape)
                sequences.read(part, rows.numpy())
                positions = sequences.positions(rows.numpy())
                held = None if positions is None else torch.from_numpy(positions)
                held = held.pin_memory() if held is not None and pinned else held
                yield rows, held, tokens
                first, together = first + together, min(2 * together, most)

    def _cut(self, rows: torch.Tensor, positions: torch.Tensor | None, tokens: list[int]) -> list[Batch]:
        """Cut the rows of several global batches into batches of micro-batches: views, made by who trains on them."""
        parts = list(map(MicroBatch, rows.split(self.micro_batch)))
        if positions is not None:
            for part, of_part in zip(parts, positions.split(self.micro_batch), strict=True):
                part.positions = of_part
        count = len(parts) // len(tokens)
        return [Batch(parts[n * count : (n + 1) * count], labels) for n, labels in enumerate(tokens)]

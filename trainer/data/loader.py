"""The prefetching loader: batches as a pure function of one number, the sequences consumed so far.

A sequence is ``sequence_length`` inputs and the same tokens one further as labels, so that
consecutive sequences overlap by one token and every token of the stream is predicted once.
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.order import Order
from trainer.data.shards import ShardSet, TokenStream
from trainer.errors import DataError

_LOCATED = 2048
"""Sequences whose places in the order are computed together, because a few cost as much as many."""
_BLOCK_BYTES = 2**20
"""Size up to which small batches are handed over together: enough to pay for waking a thread, few enough for caches."""
_PREFETCHED_BLOCKS = 4


@dataclass
class Sequences:
    """Random access to the training sequences of a shard set, in their shuffled order.

    Args to build one: see :meth:`open`.
    """

    streams: list[TokenStream]
    order: Order
    sequence_length: int

    @classmethod
    def open(cls, shards: ShardSet, sequence_length: int, weights: list[float] | None, seed: int) -> "Sequences":
        """Map the training split.

        Args:
            weights: one a source to mix them in these proportions; None walks all of them as one stream.

        Raises:
            DataError: a stream is shorter than one sequence.
        """
        if weights is None:
            streams = [shards.stream("train")]
        else:
            streams = [shards.stream("train", source) for source in range(len(weights))]
        lengths = []
        for number, stream in enumerate(streams):
            lengths.append((len(stream) - 1) // sequence_length)
            if lengths[-1] < 1:
                raise DataError(
                    f"data.sources: the training text of {'all' if weights is None else f'source {number}'} has "
                    f"{len(stream)} tokens, fewer than one sequence of data.sequence_length={sequence_length} needs. "
                    "Add text or shorten the sequences."
                )
        return cls(streams, Order(tuple(lengths), tuple(weights or [1.0]), seed), sequence_length)

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
        starts = places[:, 1] * self.sequence_length
        if len(self.streams) == 1:
            return self.streams[0].gather(starts, out)
        for number, tokens in enumerate(self.streams):
            chosen = np.flatnonzero(places[:, 0] == number)
            rows = np.empty((len(chosen), out.shape[1]), out.dtype)
            tokens.gather(starts[chosen], rows)
            out[chosen] = rows

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """The sequences at these positions of the order: int64, shape [len(positions), sequence_length + 1]."""
        rows = np.empty((len(positions), self.sequence_length + 1), dtype=np.int64)
        self.read(self.locate(positions), rows)
        return rows


@dataclass(slots=True)
class Batch:
    """One micro-batch."""

    rows: torch.Tensor
    """int64, shape [sequences, sequence_length + 1], contiguous, in pinned memory where there is an accelerator."""

    @property
    def inputs(self) -> torch.Tensor:
        """Input ids: int64, shape [sequences, sequence_length], contiguous."""
        return self.rows[:, :-1].contiguous()

    @property
    def labels(self) -> torch.Tensor:
        """The id that follows each input: int64, shape [sequences, sequence_length], contiguous."""
        return self.rows[:, 1:].contiguous()

    def to(self, device: torch.device) -> "Batch":
        """This micro-batch on a device; a copy from pinned memory runs beside the computation."""
        return Batch(self.rows.to(device, non_blocking=True))


@dataclass
class Loader:
    """Yields this rank's micro-batches, global batch after global batch, prepared ahead in threads.

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

    def batch(self, position: int) -> list[Batch]:
        """The micro-batches of the global batch that begins at sequence ``position``."""
        return next(self._prepared(position, 1))[0]

    def iterate(self, position: int, steps: int) -> Iterator[list[Batch]]:
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
                for batch in block:
                    yield batch if self.device.type == "cpu" else [part.to(self.device) for part in batch]
                done += len(block)
        finally:
            stop.set()
            thread.join()

    def _prepared(self, position: int, steps: int) -> Iterator[list[list[Batch]]]:
        """This rank's part of the global batches from ``position`` on, in blocks of several."""
        length, share = self.sequences.sequence_length, self.global_batch // self.world_size
        of_batch = position + self.rank * share + np.arange(share, dtype=np.int64)
        ahead = max(1, _LOCATED // share)
        together = max(1, _BLOCK_BYTES // (8 * (length + 1) * share))
        for begin in range(0, steps, ahead):
            numbers = np.arange(begin, min(begin + ahead, steps), dtype=np.int64)
            places = self.sequences.locate((numbers[:, None] * self.global_batch + of_batch).ravel())
            for first in range(0, len(numbers), together):
                part = places[first * share : (first + together) * share]
                rows = torch.empty((len(part), length + 1), dtype=torch.int64, pin_memory=self.device.type == "cuda")
                self.sequences.read(part, rows.numpy())
                parts = [Batch(micro) for micro in rows.split(self.micro_batch)]
                count = share // self.micro_batch
                yield [parts[i : i + count] for i in range(0, len(parts), count)]

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

_PREFETCHED_BATCHES = 4


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

    def gather(self, positions: np.ndarray) -> np.ndarray:
        """The sequences at these positions of the order: int64, shape [len(positions), sequence_length + 1]."""
        stream, sequence = self.order.locate(positions)
        rows = np.empty((len(positions), self.sequence_length + 1), dtype=np.int64)
        for row, number, place in zip(rows, stream.tolist(), sequence.tolist(), strict=True):
            self.streams[number].read(place * self.sequence_length, row)
        return rows


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

    def batch(self, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The micro-batches of the global batch that begins at sequence ``position``.

        Returns:
            (input_ids, labels) pairs, int64, each of shape [micro_batch, sequence_length], in
            pinned memory where there is an accelerator. ``labels`` are already shifted.
        """
        share = self.global_batch // self.world_size
        first = position + self.rank * share
        rows = torch.from_numpy(self.sequences.gather(np.arange(first, first + share, dtype=np.int64)))
        inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.device.type == "cuda":
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return list(zip(inputs.split(self.micro_batch), labels.split(self.micro_batch), strict=True))

    def iterate(self, position: int, steps: int) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
        """The next ``steps`` global batches from ``position`` on; a bounded number is prepared ahead."""
        prepared: queue.Queue = queue.Queue(maxsize=_PREFETCHED_BATCHES)
        stop = threading.Event()

        def put(item: object) -> None:
            while not stop.is_set():
                try:
                    return prepared.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def prepare() -> None:
            try:
                for step in range(steps):
                    if stop.is_set():
                        return
                    put(self.batch(position + step * self.global_batch))
            except BaseException as error:  # handed to the training loop, which raises it
                put(error)

        thread = threading.Thread(target=prepare, name="loader", daemon=True)
        thread.start()
        try:
            for _ in range(steps):
                began = time.perf_counter()
                item = prepared.get()
                self.seconds_waited += time.perf_counter() - began
                if isinstance(item, BaseException):
                    raise item
                yield [
                    (inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True))
                    for inputs, labels in item
                ]
        finally:
            stop.set()
            thread.join()

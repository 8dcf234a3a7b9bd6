"""One optimizer step over a global batch: what pipeline parallelism does in another way."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.loader import Batch, MicroBatch
from trainer.model import loss_of
from trainer.optimizers import set_rate


@dataclass
class TrainingStep:
    """Forward and backward over a rank's micro-batches, then the update."""

    engine: Any
    """DeepSpeed's."""
    device: torch.device
    """Where the micro-batches are."""
    averaged: int
    """Ranks over which the engine takes the mean of the gradients."""

    def run(self, batch: Batch, rate: float) -> torch.Tensor:
        """Train on a batch.

        The loss is the mean over the labels of the whole global batch, of which sequences with padding have
        fewer: each micro-batch gives its sum, scaled so that the engine's means over micro-batches and ranks
        come out at that.

        Args:
            rate: the learning rate, as a share of its peak.

        Returns:
            The rank's part of that mean, times the number of averaged ranks: a float32 scalar on the device.
        """
        set_rate(self.engine.optimizer, rate)
        total = torch.zeros((), device=self.device)
        parts = len(batch.micro_batches)
        scale = parts * self.averaged / batch.tokens
        for part in batch.micro_batches:
            loss = scale * loss_of(self.engine, part.inputs, part.labels, part.positions, reduction="sum")
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / parts

    def evaluate(self, parts: Iterable[MicroBatch]) -> torch.Tensor:
        """The summed loss of micro-batches in evaluation mode: a float64 scalar on the device.

        Every rank has to call it, with as many micro-batches.
        """
        self.engine.eval()
        total = torch.zeros((), dtype=torch.double, device=self.device)
        with torch.no_grad():
            for part in parts:
                total += loss_of(self.engine, part.inputs, part.labels, part.positions, reduction="sum")
        self.engine.train()
        return total

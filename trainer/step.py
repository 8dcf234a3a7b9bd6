"""One optimizer step over a global batch: what pipeline parallelism does in another way."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer.config import TrainConfig
from trainer.data.loader import Batch, MicroBatch
from trainer.model import loss_of, training_loss_of
from trainer.optimizers import set_rate
from trainer.parts.routing import Routing
from trainer.ulysses import SequenceShare


@dataclass
class TrainingStep:
    """Forward and backward over a rank's micro-batches, then the update."""

    engine: Any
    """DeepSpeed's."""
    device: torch.device
    """Where the micro-batches are."""
    averaged: int
    """Ranks over which the engine takes the mean of the gradients."""
    config: TrainConfig
    """What the objective adds to the cross-entropy."""
    z_loss: torch.Tensor = field(init=False)
    """The last step's, like its loss: the rank's part of the mean over all labels, times the averaged ranks."""
    routing: Routing | None = None
    """What knows a mixture of experts' auxiliary loss."""
    share: SequenceShare | None = None
    """This rank's part of every sequence, where ranks share them."""

    def run(self, batch: Batch, rate: float) -> torch.Tensor:
        """Train on a batch.

        The objective is a mean over the labels of the whole global batch, of which sequences with padding have
        fewer: each micro-batch gives its sum, scaled so that the engine's means over micro-batches and ranks
        come out at that.

        Args:
            rate: the learning rate, as a share of its peak.

        Returns:
            The cross-entropy, without what the objective adds to it: the rank's part of the mean over all
            labels, times the number of averaged ranks; a float32 scalar on the device.
        """
        set_rate(self.engine.optimizer, rate)
        cross_entropy, z_loss = torch.zeros(2, device=self.device)
        a_label = self.averaged / max(1, batch.tokens)  # a batch may be without an answer
        scale = a_label * len(batch.micro_batches)
        for part in map(self._mine, batch.micro_batches):
            loss = training_loss_of(
                self.engine,
                part.inputs,
                part.labels,
                part.positions,
                self.config.z_loss,
                self.config.label_smoothing,
            )
            objective = scale * loss.objective
            self.engine.backward(objective + self.routing.penalty() if self.routing else objective)
            self.engine.step()
            cross_entropy += loss.cross_entropy
            z_loss += loss.z_loss
        self.z_loss = z_loss * a_label
        return cross_entropy * a_label

    def evaluate(self, parts: Iterable[MicroBatch]) -> torch.Tensor:
        """The summed loss of micro-batches in evaluation mode: a float64 scalar on the device.

        Every rank has to call it, with as many micro-batches.
        """
        self.engine.eval()
        total = torch.zeros((), dtype=torch.double, device=self.device)
        with torch.no_grad():
            for part in map(self._mine, parts):
                total += loss_of(self.engine, part.inputs, part.labels, part.positions, reduction="sum")
        self.engine.train()
        if self.share:
            self.share.sum(total)
        return total

    def _mine(self, part: MicroBatch) -> MicroBatch:
        return self.share.of(part) if self.share else part

"""Scores the model on held-out text while it trains."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trainer.data.loader import MicroBatch
from trainer.evaluation import Windows
from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class PeriodicEvaluation(Part):
    """Records `validation/loss` over the same first windows of the validation split, whatever the ranks.

    It comes before the checkpoint of the step, which keeps the loss. Where a run ended in between, what is due
    at the step of the checkpoint is done on going on.
    """

    every: int
    """Steps between evaluations; the last step always has one."""
    windows: Windows
    """The first of the validation split."""
    evaluated_step: int = 0
    """The step that was last evaluated."""

    def at_start(self, run: "Run") -> None:
        """Do what was cut off."""
        if run.progress.step > self.evaluated_step:
            self.after_step(run)

    def before_step(self, run: "Run") -> None:
        """The weights will not be those that were scored."""
        run.validation_loss = None

    def after_step(self, run: "Run") -> None:
        """Evaluate where it is due."""
        if run.progress.step % self.every == 0 or run.is_last_step:
            with run.clock_stopped():
                run.validation_loss = self._loss(run)
            run.record({"validation/loss": run.validation_loss})
            self.evaluated_step = run.progress.step

    def _loss(self, run: "Run") -> float:
        """Mean negative log-likelihood in nats a token, over all ranks."""
        loader = run.loader
        # as many forward passes on every rank, because sharded weights are gathered in each
        passes = math.ceil(len(self.windows) / (loader.world_size * loader.micro_batch))
        counted = torch.zeros((), dtype=torch.double, device=run.device)

        def parts() -> Iterator[MicroBatch]:
            for first in range(loader.rank * passes, (loader.rank + 1) * passes):
                numbers = range(first * loader.micro_batch, (first + 1) * loader.micro_batch)
                part = self.windows.read(numbers).to(run.device)
                counted.add_((part.labels >= 0).sum())
                yield part

        shared = torch.stack([run.step.evaluate(parts()), counted])
        if distributed.get_world_size() > 1:
            distributed.all_reduce(shared)
        return (shared[0] / shared[1]).item()

    def state(self) -> dict[str, Any]:
        """What is done."""
        return {"evaluated_step": self.evaluated_step}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.evaluated_step = state["evaluated_step"]

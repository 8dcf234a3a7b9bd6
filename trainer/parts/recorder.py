"""Writes the record of the last steps into the journal and the log."""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainer.checkpoint import Progress
from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Recorder(Part):
    """Records means over the steps since the last record, and what the other parts add."""

    every: int
    """Steps between records; the last step always has one."""
    loss_sum: float = 0.0
    """Sum of the losses since the last record."""
    loss_count: int = 0
    """Steps since the last record."""
    recorded: Progress = field(default_factory=Progress)
    """How far the run was at the last record of this process."""
    waited: float = 0.0
    """Seconds that this process had waited for data by then."""

    def at_start(self, run: "Run") -> None:
        """Speeds are measured from here on."""
        self.recorded = replace(run.progress)

    def after_step(self, run: "Run") -> None:
        """Count the step, and record where a record is due."""
        self.loss_sum += run.loss
        self.loss_count += 1
        if run.progress.step % self.every == 0 or run.is_last_step:
            self._record(run)

    def _record(self, run: "Run") -> None:
        progress, waited = run.progress, run.loader.seconds_waited
        seconds = progress.seconds - self.recorded.seconds
        run.tokens_per_second = (progress.tokens - self.recorded.tokens) / seconds
        progress.last_loss = self.loss_sum / self.loss_count
        metrics = {
            "train/loss": progress.last_loss,
            "train/learning_rate": run.rate * run.settings.train.learning_rate,
            "train/tokens": progress.tokens,
            "train/tokens_per_second": run.tokens_per_second,
            "train/data_wait_fraction": (waited - self.waited) / seconds,
        }
        norm = run.engine.get_global_grad_norm()
        if norm is not None and math.isfinite(norm):  # unknown where nothing is clipped, infinite where it overflows
            metrics["train/gradient_norm"] = float(norm)
        for part in run.parts:
            metrics |= part.metrics(run)
        run.record(metrics)
        self.loss_sum, self.loss_count = 0.0, 0
        self.recorded, self.waited = replace(progress), waited

    def state(self) -> dict[str, Any]:
        """The mean that is under way."""
        return {"loss_sum": self.loss_sum, "loss_count": self.loss_count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on with that mean."""
        self.loss_sum, self.loss_count = state["loss_sum"], state["loss_count"]

"""Ends a run whose loss is no number any more."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.errors import DivergedError
from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class DivergenceCheck(Part):
    """Stops at the first loss that is not finite; it comes first, so that nothing of that step is kept."""

    def after_step(self, run: "Run") -> None:
        """Look at the loss."""
        if not math.isfinite(run.loss):
            raise DivergedError(
                f"{run.settings.name}: the loss is {run.loss} at step {run.progress.step}; the newest checkpoint is "
                "from before. Lower train.learning_rate, or check the text near there."
            )

"""Records the loss scale of fp16, and the steps it cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class LossScale(Part):
    """Adds `train/loss_scale` and `train/skipped_steps`, both of which the engine keeps in its checkpoints.

    A step whose gradients overflow halves the scale and leaves the weights as they are. It is a step all the
    same: its batch is consumed, its loss is right and recorded, and the schedule moves on.
    """

    def metrics(self, run: "Run") -> dict[str, float]:
        """The scale of the next step, and how many of all steps so far left the weights as they were."""
        return {"train/loss_scale": run.engine.optimizer.loss_scale, "train/skipped_steps": run.engine.skipped_steps}

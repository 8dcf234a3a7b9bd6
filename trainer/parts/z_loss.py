"""Records the z-loss, which the recorded loss leaves out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed

from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class ZLoss(Part):
    """Adds `train/z_loss`, of the last step."""

    def metrics(self, run: "Run") -> dict[str, float]:
        """The mean over all labels of the global batch, its coefficient included."""
        total = run.step.z_loss.clone()
        distributed.all_reduce(total)
        return {"train/z_loss": total.item() / distributed.get_world_size()}

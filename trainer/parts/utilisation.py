"""Tells how much of what the devices can do the training uses."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import distributed

from trainer.flops import peak_flops
from trainer.parts import Part
from trainer.precision import PRODUCTS

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Utilisation(Part):
    """Adds the model flops utilisation to the journal; padding counts as no work."""

    flops_per_token: float
    """What the model needs, see `trainer.flops`."""
    peak: float = math.inf
    """What all ranks together can do, in operations a second; known to rank 0."""

    def at_start(self, run: "Run") -> None:
        """Find the devices' peak, and note at the run's beginning which was taken."""
        if run.leads:
            found = peak_flops(run.device, PRODUCTS[run.settings.precision], run.settings.run_dir)
            self.peak = found["flops"] * distributed.get_world_size()
            if run.progress.step == 0:
                run.note("device_peak", **found)

    def metrics(self, run: "Run") -> dict[str, float]:
        """The utilisation over the steps of the record, from 0 to 1."""
        return {"train/mfu": self.flops_per_token * run.tokens_per_second / self.peak}

"""Ends a run in good order when the machine is wanted back (SIGTERM)."""

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import PreemptedError
from trainer.parts import Part
from trainer.parts.checkpoints import Checkpoints

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Preemption(Part):
    """Takes SIGTERM from its construction on: once any rank has it, every rank ends with a checkpoint of that step."""

    checkpoints: Checkpoints
    """What writes it."""
    told: bool = False
    """Whether this process was asked to end."""

    def __post_init__(self) -> None:
        signal.signal(signal.SIGTERM, self._stop_soon)

    def _stop_soon(self, *_: Any) -> None:
        self.told = True

    def says(self) -> float:
        """Whether this rank was asked to end."""
        return float(self.told)

    def after_step(self, run: "Run") -> None:
        """Save and end, unless the run is finished anyway."""
        if self.heard and not run.is_last_step:
            self.checkpoints.save(run)
            self.checkpoints.at_end(run)
            raise PreemptedError(
                f"{run.settings.name}: told to end at step {run.progress.step}; a checkpoint was written."
            )

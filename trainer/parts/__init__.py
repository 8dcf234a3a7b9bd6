"""What hangs on the training loop: one part a concern, each with its own state, none known to the loop by name."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.loop import Run


class Part:
    """Hears of every step, on every rank, in the order of the run's list of parts.

    All ranks call a hook at the same step, so that it may hold collectives. What only some ranks know when a
    step ends (a signal, a clock) goes through `says`: it travels with the loss in the step's one collective.
    """

    heard: float = 0.0
    """Mean over all ranks of what they said when the last step ended; the same on every rank."""

    def says(self) -> float:
        """A number of this rank for every rank to hear before `after_step`."""
        return 0.0

    def at_start(self, run: "Run") -> None:
        """Before the first step, with the checkpoint's state loaded."""

    def before_step(self, run: "Run") -> None:
        """With `run.rate` set for the step."""

    def after_step(self, run: "Run") -> None:
        """With `run.progress` and `run.loss` of the completed step."""

    def at_end(self, run: "Run") -> None:
        """After the last step, before the export."""

    def metrics(self, run: "Run") -> dict[str, float]:
        """What this part adds to a record of the journal, asked whenever one is due."""
        return {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this part: plain data, of which rank 0's is kept."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""

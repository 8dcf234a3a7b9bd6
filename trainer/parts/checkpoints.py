"""Writes checkpoints when they are due, and goes on from one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed

from trainer import checkpoint
from trainer.data.loader import MicroBatch
from trainer.errors import DataError
from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Checkpoints(Part):
    """A checkpoint every so many steps and at the last one; it comes last, so that it holds all of a step."""

    every: int
    """Steps between checkpoints."""
    saving: Any = None
    """What writes them beside training."""

    def at_start(self, run: "Run") -> None:
        """From here on, something may go wrong beside training."""
        self.saving = run.engine.checkpoint_engine

    def says(self) -> float:
        """Whether this rank could not write its part of the last checkpoint."""
        return float(self.saving.error is not None)

    def after_step(self, run: "Run") -> None:
        """Save where it is due; trouble with the last checkpoint comes out there too."""
        if self.heard or run.progress.step % self.every == 0 or run.is_last_step:
            self.save(run)

    def save(self, run: "Run") -> None:
        """Save the completed step; what that takes is no time of a step."""
        with run.clock_stopped():
            checkpoint.save(
                run.engine,
                run.settings,
                run.progress,
                parts={type(part).__name__: state for part in run.parts if (state := part.state())},
                validation_loss=run.validation_loss,
                fixed_batch_loss=fixed_batch_loss(run),
                journal_bytes=run.journal.size if run.journal else 0,
            )

    def at_end(self, run: "Run") -> None:
        """Training ends when the last checkpoint is on the disk."""
        checkpoint.finish_saving(run.engine)


def go_on(run: "Run", resume: checkpoint.Resume | None, passed_over: list[str]) -> None:
    """Go on from a checkpoint, or from the next older one where its weights are not those that were saved.

    Args:
        resume: the newest valid one; None where there is none.
        passed_over: why newer ones are not.

    Raises:
        DataError: there are checkpoints, and with none of them the fixed batch has the loss that it had.
    """
    wrong: list[str] = []
    while True:
        for reason in passed_over:
            run.note("checkpoint_passed_over", reason=reason)
        if resume is None:
            break
        try:
            go_on_from(run, resume)
            run.note("resumed", step=run.progress.step, world_size=distributed.get_world_size())
            return
        except DataError as error:
            wrong.append(str(error))
        resume, passed_over = checkpoint.prepare_resume(run.settings, older_than=resume.directory)
        passed_over = [wrong[-1], *passed_over]
    if wrong:
        raise DataError(
            f"{run.settings.run_dir}: no checkpoint is left to go on from. {'; '.join(wrong)}. Remove its checkpoints "
            "to train from the start."
        )


def go_on_from(run: "Run", resume: checkpoint.Resume) -> None:
    """Bring the run into the state of a checkpoint, and make sure that its weights are those that were saved."""
    run.progress = checkpoint.load(run.engine, resume)
    checkpoint.check_fixed_batch(resume, fixed_batch_loss(run))
    for part in run.parts:
        if state := resume.manifest["parts"].get(type(part).__name__):
            part.load_state(state)


def fixed_batch_loss(run: "Run") -> float:
    """The loss of the order's first tokens in evaluation mode: a witness that weights were restored.

    They are few, as training waits meanwhile, and pass through all weights but most rows of the embeddings.
    """
    sequences, tokens = run.loader.sequences, 48  # which any usual number of ranks of a sequence divides
    rows = sequences.gather(np.zeros(1, dtype=np.int64))
    positions = sequences.positions(rows)
    held = None if positions is None else torch.from_numpy(positions[:, :tokens])
    ids = np.maximum(rows[:, : tokens + 1], 0)  # a conversation may begin without any answer, whose tokens alone count
    part = MicroBatch(torch.from_numpy(ids), held).to(run.device)
    return run.step.evaluate([part]).item() / int((part.labels >= 0).sum())

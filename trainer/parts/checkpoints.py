"""Writes checkpoints when they are due, and goes on from one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer import checkpoint
from trainer.data.loader import MicroBatch
from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Checkpoints(Part):
    """A checkpoint every so many steps and at the last one; it comes last, so that it holds all of a step."""

    every: int
    """Steps between checkpoints."""

    def after_step(self, run: "Run") -> None:
        """Save where it is due."""
        if run.progress.step % self.every == 0 or run.is_last_step:
            self.save(run)

    def save(self, run: "Run") -> None:
        """Write the checkpoint of the completed step; what it takes is no time of a step."""
        with run.clock_stopped():
            checkpoint.save(
                run.engine,
                run.settings,
                run.progress,
                parts={type(part).__name__: state for part in run.parts if (state := part.state())},
                validation_loss=run.validation_loss,
                fixed_batch_loss=fixed_batch_loss(run),
                journal_bytes=run.journal.sync() if run.journal else 0,
            )


def go_on_from(run: "Run", resume: checkpoint.Resume) -> None:
    """Bring the run into the state of a checkpoint, and make sure that its weights are those that were saved."""
    run.progress = checkpoint.load(run.engine, resume)
    checkpoint.check_fixed_batch(resume, fixed_batch_loss(run))
    for part in run.parts:
        if state := resume.manifest["parts"].get(type(part).__name__):
            part.load_state(state)


def fixed_batch_loss(run: "Run") -> float:
    """The loss of the order's first sequences in evaluation mode: a witness that weights were restored."""
    sequences = run.loader.sequences
    rows = sequences.gather(torch.arange(min(4, run.settings.micro_batch)).numpy())
    positions = sequences.positions(rows)
    held = None if positions is None else torch.from_numpy(positions)
    part = MicroBatch(torch.from_numpy(rows), held).to(run.device)
    return run.step.evaluate([part]).item() / int((part.labels >= 0).sum())

"""Event files hold what the journal holds, as TensorBoard's own reader sees it."""

from pathlib import Path

import pytest

from tests.conftest import eventually
from trainer.journal import Journal
from trainer.tensorboard import EventFileWriter

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def seen(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve that TensorBoard shows for a run directory."""
    reader = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def started(run_dir: Path) -> EventFileWriter:
    """A writer at work."""
    writer = EventFileWriter(run_dir)
    writer.start()
    return writer


def test_each_step_shows_once_over_several_attempts(tmp_path: Path) -> None:
    for attempt in range(3):
        journal = Journal(tmp_path / "metrics.jsonl")
        journal.event("resumed", step=10 * attempt)
        writer = started(tmp_path)
        for step in range(1, 10 * attempt + 11):  # those of earlier attempts again, as after a resume
            journal.record(step, {"train/loss": 0.5 * step, "train/tokens": 64.0 * step})
        writer.stop()
    steps = range(1, 31)
    assert seen(tmp_path) == {
        "train/loss": [(step, 0.5 * step) for step in steps],
        "train/tokens": [(step, 64.0 * step) for step in steps],
    }


def test_an_open_tensorboard_sees_new_steps_at_once_and_forgets_the_attempt_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.record(1, {"train/loss": 3.0})
    writer = started(tmp_path)
    eventually(lambda: (tmp_path / "tensorboard").exists() and seen(tmp_path), "the first step")
    reader = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    journal.record(2, {"train/loss": 2.0})
    eventually(lambda: len(reader.Reload().Scalars("train/loss")) == 2, "the second step")
    writer.stop()
    started(tmp_path).stop()
    assert [event.step for event in reader.Reload().Scalars("train/loss")] == [1, 2]

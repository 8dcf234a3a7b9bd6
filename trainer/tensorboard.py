"""TensorBoard's view of a training run: event files beside the journal, written from it behind the training's back."""

import shutil
from pathlib import Path
from typing import Any

from trainer.journal import JournalFollower, metrics_of, read_records


class EventFileWriter(JournalFollower):
    """Carries one run's journal into `tensorboard/` of its run directory.

    The journal has each step once, so the events are written anew from its beginning at every attempt:
    there is no state that a kill could leave wrong, and a TensorBoard that is open forgets what it had.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__("tensorboard-writer")
        self._journal, self._directory = run_dir / "metrics.jsonl", run_dir / "tensorboard"
        self._offset = 0
        self._file: Any = None

    def carry(self) -> None:
        """Write the records that are new."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter as File

        if self._file is None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._file = File(str(self._directory))
            # TensorBoard drops what it had from this step on, when a session starts
            self._file.add_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        for record, self._offset in read_records(self._journal, self._offset):  # noqa: B020
            if metrics := metrics_of(record):
                values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
                event = Event(step=record["step"], wall_time=record["time"], summary=Summary(value=values))
                self._file.add_event(event)
        self._file.flush()

    def stop(self) -> None:
        """Write the rest and close the file; what went wrong is in `last_error`."""
        self.finish()
        if self._file is not None:
            self._file.close()

"""The journal `metrics.jsonl`: every record of a run, appended by rank 0 before anyone else hears of it.

A record is one JSON object a line: either metrics, with `step` and `time` (Unix seconds), or an
event, with `event` and `time`. The file only ever grows. After a resume, steps that are repeated
find their metrics already there and do not write them again.
"""

import contextlib
import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Each complete record from byte ``offset`` on, with the offset of its end."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            with contextlib.suppress(ValueError):  # a damaged line costs its own record only
                yield json.loads(line), offset


def metrics_of(record: dict[str, Any]) -> dict[str, float]:
    """The metrics in a record; none in an event."""
    return {} if "event" in record else {key: record[key] for key in record if key not in ("step", "time")}


class Journal:
    """Appends to the journal; opening it removes a half-written last line."""

    def __init__(self, path: Path) -> None:
        end = 0
        self._last_step: dict[str, int] = {}
        for record, end in read_records(path):  # noqa: B007  # the last end is where whole records end
            self._last_step |= dict.fromkeys(metrics_of(record), record.get("step", 0))
        self._file = open(path, "ab")  # noqa: SIM115  # open as long as the run
        self._file.truncate(end)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Append those metrics of ``step`` that the journal does not have from before a resume."""
        new = {name: value for name, value in metrics.items() if step > self._last_step.get(name, 0)}
        if new:
            self._append({"step": step, "time": time.time(), **new})
            self._last_step |= dict.fromkeys(new, step)

    def event(self, name: str, **details: Any) -> None:
        """Append something that happened."""
        self._append({"event": name, "time": time.time(), **details})

    def _append(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._file.tell()


class JournalFollower(threading.Thread, ABC):
    """Carries the journal elsewhere from a thread of the process that launched the training.

    Training never waits for it, and nothing that happens to it reaches training.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._stop_requested = threading.Event()
        self.last_error: Exception | None = None
        """What went wrong at the last attempt; None while all is well."""

    @abstractmethod
    def carry(self) -> None:
        """Carry over what is new in the journal; called about once a second, and a last time at the end."""

    def run(self) -> None:
        """Carry until asked to stop and nothing is left."""
        pause = 1.0
        while True:
            stopping = self._stop_requested.is_set()
            try:
                self.carry()
                self.last_error, pause = None, 1.0
            except Exception as error:
                self.last_error, pause = error, min(30.0, pause * 2)
            if stopping:
                return
            self._stop_requested.wait(pause)

    def finish(self) -> None:
        """Carry the rest over, then end."""
        self._stop_requested.set()
        self.join()

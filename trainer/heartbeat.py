"""The heartbeat: `heartbeat.json` tells whoever watches how far training is, and whether it still moves."""

import json
import os
import time
from pathlib import Path
from typing import Any


class Heartbeat:
    """Written by rank 0, at most once a second; replaced by rename, never fsynced (it describes the moment)."""

    def __init__(self, run_dir: Path, steps: int, rank: int, pids: list[int]) -> None:
        self._path = run_dir / "heartbeat.json"
        self._steps = steps
        self._last = 0.0
        self._loss: float | None = None
        self._leads = rank == 0
        self._pids = pids

    def beat(
        self, step: int, loss: float | None = None, tokens_per_second: float | None = None, force: bool = False
    ) -> None:
        """Report ``step`` completed steps."""
        now = time.time()
        self._loss = loss if loss is not None else self._loss
        if not self._leads or (not force and now - self._last < 1.0):
            return
        self._last = now
        aside = self._path.with_suffix(".partial")
        aside.write_text(
            json.dumps(
                {
                    "step": step,
                    "steps": self._steps,
                    "time": now,
                    "loss": self._loss,
                    "tokens_per_second": tokens_per_second,
                    "pids": self._pids,
                }
            )
        )
        os.replace(aside, self._path)


def read_heartbeat(run_dir: Path) -> dict[str, Any] | None:
    """The last heartbeat, or None where there is none yet."""
    try:
        return json.loads((run_dir / "heartbeat.json").read_text())
    except (OSError, ValueError):
        return None

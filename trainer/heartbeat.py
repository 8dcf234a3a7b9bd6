"""The heartbeat: `heartbeat.json` tells whoever watches how far training is, and whether it still moves."""

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


@dataclass
class Heartbeat(Part):
    """Written by rank 0, at most once a second; replaced by rename, never fsynced (it describes the moment)."""

    pids: list[int] = field(default_factory=list)
    """Process id of every rank."""
    written: float = 0.0
    """When it was last written, in Unix seconds."""

    def at_start(self, run: "Run") -> None:
        """Say that training begins."""
        from torch import distributed  # whoever only reads heartbeats has no use for torch

        self.pids = [0] * distributed.get_world_size()
        distributed.all_gather_object(self.pids, os.getpid())
        self._write(run)

    def after_step(self, run: "Run") -> None:
        """Tell of the step where the last word is a second old, and of the last step."""
        if time.time() - self.written >= 1.0 or run.is_last_step:
            self._write(run)

    def _write(self, run: "Run") -> None:
        if not run.leads:
            return
        self.written = time.time()
        path = run.settings.run_dir / "heartbeat.json"
        aside = path.with_suffix(".partial")
        aside.write_text(
            json.dumps(
                {
                    "step": run.progress.step,
                    "steps": run.settings.steps,
                    "time": self.written,
                    "loss": None if math.isnan(run.loss) else run.loss,
                    "tokens_per_second": run.tokens_per_second,
                    "pids": self.pids,
                }
            )
        )
        os.replace(aside, path)


def read_heartbeat(run_dir: Path) -> dict[str, Any] | None:
    """The last heartbeat, or None where there is none yet."""
    try:
        return json.loads((run_dir / "heartbeat.json").read_text())
    except (OSError, ValueError):
        return None

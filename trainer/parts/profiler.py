"""Looks closely at a few steps: a trace of every operation, and a table of the dearest."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from trainer.parts import Part
from trainer.settings import OPERATIONAL, Settings

if TYPE_CHECKING:
    from trainer.loop import Run


class ProfileConfig(Settings):
    """Which steps torch's profiler looks at, on rank 0."""

    start_step: Annotated[int, Ge(2), OPERATIONAL] = 10
    """First step that is recorded; the profiler warms up in the step before."""
    steps: Annotated[int, Ge(1), OPERATIONAL] = 3
    """Number of steps that are recorded; a few are enough, and a trace of many is large."""


@dataclass
class Profiler(Part):
    """Writes `profile/step-…/trace.json.gz` (Chrome's format: open it in Perfetto) and `operators.txt`."""

    config: ProfileConfig
    """Which steps."""
    profile: Any = None
    """torch's profiler while it is at work."""

    def before_step(self, run: "Run") -> None:
        """Start in the step before the first that is recorded."""
        if run.leads and run.progress.step + 2 == self.config.start_step:
            from torch.profiler import profile, schedule  # who only reads the configuration has no use for torch

            self.profile = profile(
                schedule=schedule(wait=0, warmup=1, active=self.config.steps, repeat=1),
                on_trace_ready=lambda profile: self._write(run, profile),
            )
            self.profile.start()

    def after_step(self, run: "Run") -> None:
        """Tell the profiler that a step is over; it calls `_write` after the last one that is recorded."""
        if self.profile:
            with run.clock_stopped():
                self.profile.step()
            if run.progress.step == self.config.start_step + self.config.steps - 1 or run.is_last_step:
                self.profile.stop()
                self.profile = None

    def _write(self, run: "Run", profile: Any) -> None:
        directory = run.settings.run_dir / "profile" / f"step-{self.config.start_step:08d}"
        directory.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(directory / "trace.json.gz"))
        order = "self_cpu_time_total" if run.device.type == "cpu" else "self_device_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
        (directory / "operators.txt").write_text(table + "\n", encoding="utf-8")
        files = ["trace.json.gz", "operators.txt"]
        run.note("profiled", artifacts=[str((directory / name).relative_to(run.settings.run_dir)) for name in files])

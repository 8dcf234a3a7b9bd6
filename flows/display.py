"""What a person at a terminal sees of a run: a live display, or log lines where there is no terminal."""

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from tasks.progress import Progress, log_every, watcher


@contextmanager
def display(quiet_stdout: bool) -> Iterator["Display"]:
    """Show the progress of the stages that run inside the block.

    Args:
        quiet_stdout: everything goes to stderr.
    """
    # Prefect's own console lines would only repeat what is shown here; its server still gets them
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    console = Console(stderr=quiet_stdout)
    shown = Display(console, sys.stderr.isatty() and console.is_terminal)
    logger = logging.getLogger("forgeline")
    handler = _ConsoleLines(console)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    token = watcher.set(shown.watch)
    try:
        with shown.bars if shown.live else contextlib.nullcontext():
            yield shown
    finally:
        watcher.reset(token)
        logger.removeHandler(handler)


class _ConsoleLines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._console.print(f"{at} {record.getMessage()}", markup=False, highlight=False, soft_wrap=True)


class Display:
    """The live bars of one run, or its log lines."""

    def __init__(self, console: Console, live: bool) -> None:
        self.console, self.live = console, live
        self.bars = Bars(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[details]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._rows: dict[str, TaskID] = {}
        self._log = log_every(5.0)
        self._lock = threading.Lock()

    def watch(self, progress: Progress) -> None:
        """Show a stage's progress."""
        if not self.live:
            return self._log(progress)
        with self._lock:
            row = self._rows.get(progress.stage)
            if row is None:
                row = self._rows[progress.stage] = self.bars.add_task(progress.stage, amount="", details="")
        digits = 1 if progress.unit == "MB" else 0
        total = f"/{progress.total:,.{digits}f}" if progress.total else ""
        self.bars.update(
            row,
            completed=progress.done,
            total=progress.total,
            amount=f"{progress.done:,.{digits}f}{total} {progress.unit}",
            details=escape(progress.details),
        )

    def summary(self, summary: Any) -> None:
        """Print what a finished run did and made."""
        stages = Table("stage", "state", "seconds", title=f"{summary.name}", title_justify="left")
        for stage in summary.stages:
            stages.add_row(stage.name, stage.state, f"{stage.seconds:,.1f}")
        metrics = Table("metric", "value")
        for key, value in summary.metrics.items():
            metrics.add_row(key, f"{value:,.0f}" if value >= 1000 or value.is_integer() else f"{value:,.4f}")
        model = summary.model
        out = self.console.print
        out(stages)
        out(metrics)
        out(f"sample: {summary.sample!r}", markup=False, highlight=False, soft_wrap=True)
        out(f"registered: {model.name} version {model.version} ({', '.join(model.aliases) or 'no alias'})")
        out(f"export:     {summary.export_dir}", soft_wrap=True)
        # as it can be typed here, whether or not the environment is activated
        programs = "" if shutil.which("forgeline") else f"{os.path.relpath(Path(sys.executable).parent)}/"
        out("\nlook at it:")
        for command in (
            f"forgeline generate models:/{model.name}/{model.version} --prompt 'TEXT'",
            f"forgeline why models:/{model.name}/{model.version}",
            f"mlflow ui --backend-store-uri {summary.tracking_uri}",
            "prefect server start     (or both, with a worker: make up)",
        ):
            out(f"  {programs}{command}", soft_wrap=True, highlight=False)


def plan_table(name: str, facts: dict[str, Any]) -> None:
    """Print a plan as a table."""
    gib = 2**30
    rows = {
        "source files": f"{facts['source_files']:,}",
        "text": f"{facts['text_bytes'] / 1e6:,.1f} MB",
        "steps": f"{facts['steps']:,}" if facts["steps"] else "known after tokenization",
        "tokens": f"{facts['tokens']:,}" if facts["tokens"] else "known after tokenization",
        "parameters": f"{facts['parameters']:,}",
        "memory a rank": f"{facts['memory_bytes_a_rank'] / gib:.2f} GiB, and about "
        f"{facts['activation_bytes_a_rank'] / gib:.2f} GiB of activations "
        f"({facts['memory_bytes_available'] / gib:.1f} GiB on this host for all)",
        "disk": f"{facts['disk_bytes_needed'] / gib:.2f} GiB of {facts['disk_bytes_free'] / gib:.1f} GiB free",
        "expected time": f"about {facts['seconds_expected']:,.0f} s of training on this device",
    }
    table = Table("check", "finding", title=f"plan of {name}", title_justify="left")
    for check, finding in rows.items():
        table.add_row(check, finding)
    Console().print(table)

"""How a running stage tells whoever watches how far it is, without knowing who watches."""

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

logger = logging.getLogger("forgeline")


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    stage: str
    done: float
    total: float | None
    """None while the amount of work is unknown."""
    unit: str
    details: str = ""


Watcher = Callable[[Progress], None]


def log_every(seconds: float) -> Watcher:
    """A watcher that writes a log line a stage at most every ``seconds``."""
    last: dict[str, float] = {}

    def watch(progress: Progress) -> None:
        now = time.monotonic()
        if now - last.get(progress.stage, 0.0) >= seconds:
            last[progress.stage] = now
            of = f"/{progress.total:,.0f}" if progress.total else ""
            logger.info("%s %s=%s%s %s", progress.stage, progress.unit, f"{progress.done:,.0f}", of, progress.details)

    return watch


watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""Who is told; unset, as in a flow run on a worker, it is the log."""

_to_log = log_every(30.0)


def current_watcher() -> Watcher:
    """Who is told in this context, for work that goes on in another thread."""
    return watcher.get() or _to_log


def report(progress: Progress) -> None:
    """Tell the watcher."""
    current_watcher()(progress)

"""What all stages share: an output that is built once, a small reference to it, and how Prefect shows it."""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from tasks.home import Home
from trainer.durable import complete_directory, exclusive, faults, hash_file
from trainer.errors import ForgelineError, may_retry

logger = logging.getLogger("forgeline")


class Reference(BaseModel):
    """What a stage hands to the next: where its output is and which it is, never the data."""

    model_config = ConfigDict(frozen=True)

    path: Path
    """Directory or file of the output, absolute."""
    fingerprint: str
    """The output's fingerprint."""
    cached: bool = False
    """Whether it was already there."""
    seconds: float = 0.0
    """Time this stage took."""


R = TypeVar("R", bound=Reference)


def timed(stage: Callable[..., R]) -> Callable[..., R]:
    """Note in the reference that ``stage`` returns how long it took."""

    def run(*arguments: Any, **named: Any) -> R:
        began = time.monotonic()
        reference = stage(*arguments, **named)
        return reference.model_copy(update={"seconds": time.monotonic() - began})

    run.__name__, run.__doc__ = stage.__name__, stage.__doc__
    return run


def build_once(
    home: Home, kind: str, name: str, build: Callable[[Path], dict[str, Any]], known: Mapping[Path, str] | None = None
) -> tuple[Path, bool]:
    """The output directory `HOME/<kind>/<name>`, built unless it is there and whole.

    A second run that wants the same output waits for the first. A damaged output is rebuilt.

    Args:
        build: fills the directory it is given and returns the manifest's content.
        known: SHA-256 of files that ``build`` made and that need not be read again.

    Returns:
        The directory, and whether it was already there.
    """
    final = home.directory(kind, name)
    with exclusive(home.lock(kind, name), lambda: logger.info("%s: waiting for another run that builds it", final)):
        if final.exists():
            found = faults(final, home.hashes())
            if not found:
                return final, True
            logger.warning("%s; building it again", found[0])
        content: dict[str, Any] = {}
        with complete_directory(final, content, lambda path: (known or {}).get(path) or hash_file(path)) as directory:
            content.update(build(directory))
        home.hashes().remember(final)
        return final, False


# --- Prefect -----------------------------------------------------------------------------------


def shown(reference: R) -> Any:
    """What a Prefect task returns for ``reference``: a state named Cached where nothing had to be done."""
    from prefect.states import Completed

    if reference.cached:
        return Completed(name="Cached", message=f"{reference.path} is complete and unchanged", data=reference)
    return reference


def retry_condition(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's question whether a failed task may be tried again; the exception's class answers it."""
    try:
        state.result()
    except Exception as error:
        if may_retry(error):
            logger.warning("%s: %s", task.name, error)
            return True
    return False


def retried(task: Any, limit: int, delay_seconds: float) -> Callable[..., Any]:
    """Call the Prefect task ``task`` with retries, whose delay doubles, for failures that can pass."""
    from prefect.states import State

    delays = [delay_seconds * 2**attempt for attempt in range(limit)]
    patient = task.with_options(retries=limit, retry_delay_seconds=delays, retry_condition_fn=retry_condition)

    def call(*arguments: Any) -> Any:
        value = patient(*arguments)
        return value.result() if isinstance(value, State) else value  # a state named Cached holds the reference

    return call


class _NoTracebackForOwnErrors(logging.Filter):
    """Our errors carry a message for the reader; Prefect's traceback under it would only hide that."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], ForgelineError):
            record.exc_info, record.exc_text = None, None
        return True


logger.setLevel(logging.INFO)  # the deployments have Prefect keep this log, at whatever level it has (prefect.yaml)

for _name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
    logging.getLogger(_name).addFilter(_NoTracebackForOwnErrors())

"""Every way a run can fail, as one class each, and the one place that decides what may be retried.

A message names what was wrong, where, and what to do; nobody adds a traceback to it.
"""


class ForgelineError(Exception):
    """A failure with a message written for the person who reads it."""

    exit_code = 1
    retryable = False


class UserError(ForgelineError):
    """The user can mend this: configuration, data, or the machine's set-up. Never retried."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value is unknown, malformed, or clashes with another."""


class DataError(UserError):
    """The text, a shard set, a tokenizer or a checkpoint cannot be used as it is."""


class MachineError(UserError):
    """The machine lacks something: disk space, write permission, a free port, a program."""


class DivergedError(ForgelineError):
    """The loss is no longer a finite number. Repeating the same steps would repeat it."""


class IncompleteRunError(ForgelineError):
    """Training ended with another number of steps or tokens than planned. Never registered."""


class RetryableError(ForgelineError):
    """It can pass when tried again: training goes on from its newest valid checkpoint."""

    retryable = True


class TrainerDiedError(RetryableError):
    """A rank or the launcher ended without finishing: killed, crashed, or the node failed."""


class WorkerDiedError(RetryableError):
    """A tokenization process ended without finishing its unit; what others finished stays."""


class TrainerHungError(RetryableError):
    """No rank finished a step for far longer than a step takes."""


class OutOfMemoryError(RetryableError):
    """The accelerator's memory was exhausted; a smaller micro-batch may fit."""


class TrackingUnreachableError(RetryableError):
    """MLflow does not answer, and what has to be done now needs it."""


class PreemptedError(RetryableError):
    """The process was asked to stop (SIGTERM) and wrote a checkpoint first."""

    exit_code = 75


def may_retry(error: BaseException) -> bool:
    """Whether a stage that raised ``error`` may be tried again.

    Our own errors say so by their class. Of all others only lost connections and time-outs
    can pass by themselves; anything else is a defect and repeating it would hide it.
    """
    if isinstance(error, ForgelineError):
        return error.retryable
    return isinstance(error, (ConnectionError, TimeoutError))

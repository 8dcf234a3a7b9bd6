"""The only module that starts training processes: launches the ranks, watches them, explains their end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer import errors
from trainer.config import TrainerInput
from trainer.errors import ForgelineError, TrainerDiedError, TrainerHungError
from trainer.heartbeat import read_heartbeat
from trainer.processes import end_with_parent

FAILURE = "failure.json"
_GRACE_SECONDS = 30.0
_KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Lets glibc use a step's memory again in the next one; giving it back costs up to a tenth of a step on CPUs."""


def launch(
    settings: TrainerInput, on_progress: Callable[[dict[str, Any] | None], None], lock: int | None = None
) -> None:
    """Run every rank of a training run on this host under torchrun, to its end.

    Args:
        on_progress: called about twice a second with the newest heartbeat of this attempt (None before the first).
        lock: descriptor of the run's lock, which the launcher keeps until its last rank has ended.

    Raises:
        ForgelineError: of the class that the failing rank named; TrainerDiedError where it could
            name none; TrainerHungError when no step ended for ``train.hang_timeout`` seconds.
    """
    run_dir = settings.run_dir
    for stale in (FAILURE, "heartbeat.json"):
        (run_dir / stale).unlink(missing_ok=True)
    (run_dir / "logs").mkdir(exist_ok=True)
    ranks = settings.train.ranks
    threads = settings.train.threads or max(1, (os.cpu_count() or 1) // ranks)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m", "trainer", str(run_dir / "config.yaml"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in _KEPT_MEMORY.items():
        environment.setdefault(name, value)
    me = os.getpid()
    with open(run_dir / "logs" / "launcher.log", "ab") as log:
        log_begin = log.tell()
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, preexec_fn=lambda: end_with_parent(signal.SIGTERM, me),
            pass_fds=() if lock is None else (lock,),
        )  # fmt: skip
    try:
        _watch(process, settings, on_progress)
    finally:
        _end(process)
    if process.returncode:
        raise _explain(run_dir, process.returncode, log_begin)


def _watch(
    process: subprocess.Popen, settings: TrainerInput, on_progress: Callable[[dict[str, Any] | None], None]
) -> None:
    moved, last_step = time.monotonic(), None
    while process.poll() is None:
        heartbeat = read_heartbeat(settings.run_dir)
        on_progress(heartbeat)
        step = heartbeat and heartbeat["step"]
        if step != last_step:
            moved, last_step = time.monotonic(), step
        if time.monotonic() - moved > settings.train.hang_timeout:
            for pid in heartbeat["pids"] if heartbeat else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # each rank writes its stacks into its log
            time.sleep(1.0)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TrainerHungError(
                f"{settings.name}: no step ended for train.hang_timeout={settings.train.hang_timeout:g} s after step "
                f"{step or 0}. Every rank's stack is in {settings.run_dir / 'logs'}."
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
    on_progress(read_heartbeat(settings.run_dir))


def _end(process: subprocess.Popen) -> None:
    """End the whole process group: politely first, so that the ranks can write a checkpoint."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _explain(run_dir: Path, returncode: int, log_begin: int) -> ForgelineError:
    """What ended a launch: what the failing rank wrote down, or what torchrun saw of its end."""
    with contextlib.suppress(OSError, ValueError):
        failure = json.loads((run_dir / FAILURE).read_text())
        return getattr(errors, failure["error"])(failure["message"])
    logs = run_dir / "logs"
    with open(logs / "launcher.log", "rb") as log:
        log.seek(log_begin)
        text = log.read().decode(errors="replace")
    # the last one listed is what torchrun saw first, but a killed rank takes others along within the same glance
    found = re.findall(r"\n +rank +: (\d+).*?exitcode\s*: (-?\d+)", text, re.DOTALL)
    ends = [(rank, int(code)) for rank, code in found]
    killed = [end for end in ends if end[1] < 0 and end[1] != -signal.SIGTERM]
    if not ends:
        cause = f"the launcher ended with code {returncode}"
    elif killed:
        cause = f"rank {killed[-1][0]} was ended by {signal.Signals(-killed[-1][1]).name}"
    else:
        rank, code = ends[-1]
        lines = (logs / f"rank-{rank}.log").read_text(errors="replace").strip().split("\n")
        cause = f"rank {rank} ended with code {code}: {lines[-1]}"
    return TrainerDiedError(f"training ended before its last step: {cause}. Logs: {logs}")

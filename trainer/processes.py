"""Processes that never outlive whoever started them.

Run as a script, this file is a guard around one command; it needs nothing but Python's own library.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

# loaded here, because the child of a process with threads must not load a library
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: int, parent: int | None = None) -> None:
    """Have the kernel send this process the signal ``number`` when the thread that started it ends (Linux).

    Args:
        parent: the pid that started this process: where that one is gone already, this process ends at once.
    """
    if _LIBC:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def start_guarded(
    command: list[str], grace: float, environment: dict[str, str], log: IO[bytes], directory: Path | None = None
) -> subprocess.Popen:
    """Start ``command`` in a session of its own, with a guard, which is the process returned.

    The guard ends with the command's exit code. SIGTERM to the guard, or the end of the thread that
    started it, sends the command SIGTERM and kills it after ``grace`` seconds; a second SIGTERM kills
    it at once. Whatever the command leaves behind, even in sessions of its own, ends the same way.
    """
    me = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(grace), *command],
        env=environment, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True, preexec_fn=lambda: end_with_parent(signal.SIGTERM, me),
    )  # fmt: skip


class _Guard:
    """The guard's side: runs one command and sees to its end."""

    def __init__(self, grace: float, command: list[str]) -> None:
        self.grace = grace
        self.number = signal.SIGTERM
        if _LIBC:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of the guard
        signals = [signal.SIGTERM, signal.SIGALRM]
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        me = os.getpid()

        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it; some end by it
            end_with_parent(signal.SIGKILL, me)

        self.command = subprocess.Popen(command, preexec_fn=prepare)
        self.running, self.asked = True, False
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGALRM, self._end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _end(self, *_: object) -> None:
        if self.asked:
            self.number = signal.SIGKILL
        self.asked = True
        if self.running:
            _send(self.command.pid, self.number)
        signal.setitimer(signal.ITIMER_REAL, self.grace)

    def wait(self) -> int:
        """Wait for the command, then end what it left behind; returns the command's exit code."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self.command.pid:
                break
        self.running = False
        if not self.asked:
            self._end()
        sent: set[tuple[int, int]] = set()
        while left := _children():
            for child in {(pid, self.number) for pid in left} - sent:
                _send(*child)
                sent.add(child)
            time.sleep(0.02)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children() -> list[int]:
    """The pids of this process's children (Linux; elsewhere orphans are not ours)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(_Guard(float(sys.argv[1]), sys.argv[2:]).wait())

"""Guarded processes: whatever happens to whoever started them, nothing is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from trainer.processes import start_guarded

# a command that leaves a child in a session of its own; both write their pids, and say when they are asked to end
_COMMAND = """
import os, signal, sys, time
directory, obedient = sys.argv[1], sys.argv[2] == "obedient"
def asked(*_):
    open(f"{directory}/{name}-asked", "w").close()
    if obedient:
        sys.exit(7)
signal.signal(signal.SIGTERM, asked)
child = os.fork()
name = "parent" if child else "child"
if not child:
    os.setsid()
with open(f"{directory}/{name}.partial", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{directory}/{name}.partial", f"{directory}/{name}")
while True:
    time.sleep(1)
"""


def start(directory: Path, behaviour: str = "obedient", grace: float = 20.0) -> "subprocess.Popen[Any]":
    with open(directory / "log", "wb") as log:
        return start_guarded([sys.executable, "-c", _COMMAND, str(directory), behaviour], grace, dict(os.environ), log)


def pids(directory: Path) -> list[int]:
    files = [directory / "parent", directory / "child"]
    eventually(lambda: all(file.exists() for file in files), "the processes", 30)
    return [int(file.read_text()) for file in files]


def gone(pid: int) -> bool:
    """Whether no process has this pid, other than one that is dead and not yet collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_terminated_guard_ends_the_command_and_what_it_left(tmp_path: Path) -> None:
    guard = start(tmp_path)
    left = pids(tmp_path)
    guard.terminate()
    assert guard.wait(30) == 7
    assert all(map(gone, left))
    assert (tmp_path / "child-asked").exists()  # politely, though it has a session of its own


def test_a_command_that_dies_leaves_no_orphan(tmp_path: Path) -> None:
    guard = start(tmp_path)
    parent, child = pids(tmp_path)
    os.kill(parent, signal.SIGKILL)
    assert guard.wait(30) == 128 + signal.SIGKILL
    assert gone(child)


def test_the_stubborn_are_killed_after_the_grace_time(tmp_path: Path) -> None:
    guard = start(tmp_path, "stubborn", grace=0.5)
    left = pids(tmp_path)
    guard.terminate()
    guard.wait(30)
    assert all(map(gone, left))
    assert (tmp_path / "parent-asked").exists()


def test_a_second_request_kills_at_once(tmp_path: Path) -> None:
    guard = start(tmp_path, "stubborn", grace=300.0)
    left = pids(tmp_path)
    guard.terminate()
    eventually(lambda: (tmp_path / "parent-asked").exists(), "the request", 30)
    guard.terminate()
    guard.wait(30)
    assert all(map(gone, left))


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_nothing_outlives_a_killed_starter(tmp_path: Path) -> None:
    starter = (
        "import os, sys, time; from trainer.processes import start_guarded;"
        "start_guarded(sys.argv[1:], 20.0, dict(os.environ), sys.stdout.buffer); time.sleep(300)"
    )
    command = [sys.executable, "-c", _COMMAND, str(tmp_path), "obedient"]
    process = subprocess.Popen([sys.executable, "-c", starter, *command])
    left = pids(tmp_path)
    process.kill()
    process.wait()
    for pid in left:
        eventually(lambda pid=pid: gone(pid), f"the end of {pid}", 30)

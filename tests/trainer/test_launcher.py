"""What happens to a run when its processes are killed, stopped, or asked to end."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from tests.trainer.conftest import journal, losses, run
from trainer.checkpoint import checkpoint_directories
from trainer.config import TrainerInput
from trainer.durable import write_file
from trainer.errors import DivergedError, PreemptedError, TrainerDiedError, TrainerHungError, may_retry
from trainer.heartbeat import read_heartbeat
from trainer.launcher import launch


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def launch_and_disturb(settings: TrainerInput, disturb: Callable[[list[int]], Any], after_step: int = 4) -> list[int]:
    """Launch a run, and once it has passed a step, do something to its ranks; returns their pids."""
    write_file(settings.run_dir / "config.yaml", settings.text())
    pids: list[int] = []

    def watch(heartbeat: dict[str, Any] | None) -> None:
        if heartbeat and heartbeat["step"] >= after_step and not pids:
            pids.extend(heartbeat["pids"])
            disturb(pids)

    launch(settings, watch)
    return pids


@pytest.fixture
def long_run(new_run: Callable[..., TrainerInput]) -> TrainerInput:
    """A run that takes some seconds, with a checkpoint every 3 steps."""
    return new_run("long", steps=400)


def test_a_killed_rank_ends_the_others_and_the_next_launch_resumes(long_run: TrainerInput) -> None:
    pids: list[int] = []

    def kill(found: list[int]) -> None:
        pids.extend(found)
        os.kill(found[1], signal.SIGKILL)

    with pytest.raises(TrainerDiedError) as caught:
        launch_and_disturb(long_run, kill)
    assert may_retry(caught.value)
    assert "rank 1 was ended by SIGKILL" in str(caught.value)
    eventually(lambda: not any(map(alive, pids)), "the end of every rank")

    records = run(long_run)
    assert sum(record.get("event") == "resumed" for record in records) == 1
    assert sorted(losses(records)) == list(range(1, 401))
    assert sum("event" not in record for record in records) == 400


def test_a_run_that_stands_still_is_ended_with_every_ranks_stack_in_the_logs(
    new_run: Callable[..., TrainerInput],
) -> None:
    settings = new_run("hung", steps=5000, hang_timeout=25.0)
    with pytest.raises(TrainerHungError) as caught:
        launch_and_disturb(settings, lambda pids: os.kill(pids[1], signal.SIGSTOP))
    assert may_retry(caught.value)
    assert "train.hang_timeout=25" in str(caught.value)
    assert "Thread" in (settings.run_dir / "logs" / "rank-0.log").read_text()
    heartbeat = read_heartbeat(settings.run_dir)
    assert heartbeat is not None
    eventually(lambda: not any(map(alive, heartbeat["pids"])), "the end of every rank")


def test_asked_to_end_it_writes_a_checkpoint_first_and_says_so(new_run: Callable[..., TrainerInput]) -> None:
    settings = new_run("preempted", steps=5000)

    def ask(pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    with pytest.raises(PreemptedError) as caught:
        launch_and_disturb(settings, ask)
    assert may_retry(caught.value) and caught.value.exit_code == 75
    stopped_at = int(str(caught.value).partition("at step ")[2].partition(";")[0])
    assert checkpoint_directories(settings.run_dir)[0].name == f"step-{stopped_at:08d}"
    assert max(losses(journal(settings))) == stopped_at


def test_a_loss_that_is_not_finite_stops_and_is_never_retried(new_run: Callable[..., TrainerInput]) -> None:
    settings = new_run("diverged", steps=200, learning_rate=1e30, gradient_clipping=0.0)
    with pytest.raises(DivergedError) as caught:
        run(settings)
    assert not may_retry(caught.value)
    assert "train.learning_rate" in str(caught.value)


def test_no_rank_survives_the_process_that_launched_it(new_run: Callable[..., TrainerInput]) -> None:
    settings = new_run("orphaned", steps=5000)
    write_file(settings.run_dir / "config.yaml", settings.text())
    code = (
        "import sys; from pathlib import Path\n"
        "from trainer.config import TrainerInput\n"
        "from trainer.launcher import launch\n"
        "launch(TrainerInput.read(Path(sys.argv[1])), lambda heartbeat: None)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(settings.run_dir / "config.yaml")])
    heartbeat = eventually(lambda: read_heartbeat(settings.run_dir), "the first heartbeat")
    assert all(map(alive, heartbeat["pids"]))
    owner.kill()
    owner.wait()
    eventually(lambda: not any(map(alive, heartbeat["pids"])), "the end of every rank", 40)


def test_compiling_without_a_compiler_stays_eager_and_says_so(
    new_run: Callable[..., TrainerInput], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    settings = new_run("eager", ranks=1, compile=True)
    assert len(losses(run(settings))) == 6
    assert "no C++ compiler" in (settings.run_dir / "logs" / "rank-0.log").read_text()


def test_two_launches_in_one_process_do_not_disturb_each_other(new_run: Callable[..., TrainerInput]) -> None:
    runs = [new_run(name, ranks=1) for name in ("one", "other")]
    threads = [threading.Thread(target=run, args=(settings,)) for settings in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses(journal(runs[0])) == losses(journal(runs[1]))
    assert len(losses(journal(runs[0]))) == 6

"""The forwarder: MLflow ends up with every record once, whatever happens to it, and training never notices."""

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import eventually
from trainer.durable import write_record
from trainer.journal import Journal
from trainer.tracking import Forwarder, log_once, mlflow_client, read_tracking


def forwarder(run_dir: Path, uri: str) -> Forwarder:
    """A started forwarder of a run directory's journal."""
    made = Forwarder(run_dir, uri, "experiment", "run", "fp", {"train.steps": "20"}, {"kind": "test"})
    made.start()
    return made


def history(uri: str, run_id: str) -> list[tuple[int, float]]:
    """What MLflow has of the loss."""
    return sorted((metric.step, metric.value) for metric in mlflow_client(uri).get_metric_history(run_id, "train/loss"))


@pytest.fixture
def uri(tmp_path: Path, mlflow_template: Path) -> str:
    """A store of its own."""
    (tmp_path / "mlflow.db").write_bytes(mlflow_template.read_bytes())
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_every_record_arrives_once_over_several_attempts(tmp_path: Path, uri: str) -> None:
    expected = []
    run_ids = set()
    for attempt in range(3):
        journal = Journal(tmp_path / "metrics.jsonl")
        journal.event("resumed", step=attempt * 1000)
        first = forwarder(tmp_path, uri)
        for step in range(attempt * 1000 + 1, attempt * 1000 + 1001):
            journal.record(step, {"train/loss": 1.0 / step, "train/tokens": float(step)})
            expected.append((step, 1.0 / step))
        run_ids.add(first.stop("FINISHED"))
    assert len(run_ids) == 1
    run_id = run_ids.pop()
    assert run_id is not None
    assert history(uri, run_id) == expected
    run = mlflow_client(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"train.steps": "20"} and run.data.tags["kind"] == "test"


def test_a_batch_sent_twice_shows_once(tmp_path: Path, uri: str) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 11):
        journal.record(step, {"train/loss": float(step)})
    run_id = forwarder(tmp_path, uri).stop(None)
    assert run_id is not None
    state = read_tracking(tmp_path)
    # as after a kill between MLflow's answer and the note of it
    write_record(tmp_path / "tracking.json", {**state, "offset": 0})
    assert forwarder(tmp_path, uri).stop("FINISHED") == run_id
    assert history(uri, run_id) == [(step, float(step)) for step in range(1, 11)]


def test_a_run_whose_id_was_not_noted_is_found_again(tmp_path: Path, uri: str) -> None:
    Journal(tmp_path / "metrics.jsonl").record(1, {"train/loss": 1.0})
    run_id = forwarder(tmp_path, uri).stop(None)
    write_record(tmp_path / "tracking.json", {"key": read_tracking(tmp_path)["key"]})
    assert forwarder(tmp_path, uri).stop("FINISHED") == run_id
    assert history(uri, str(run_id)) == [(1, 1.0)]


def test_an_unreachable_server_stops_nothing_and_gets_everything_later(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        journal = Journal(tmp_path / "metrics.jsonl")
        lost: Any = forwarder(tmp_path, nobody)
        journal.record(1, {"train/loss": 1.0})
        eventually(lambda: lost.last_error, "an error of the forwarder")
        assert lost.stop("FINISHED") is None
    run_id = forwarder(tmp_path, uri).stop("FINISHED")
    assert history(uri, str(run_id)) == [(1, 1.0)]


def test_metrics_logged_twice_with_the_same_moment_show_once(tmp_path: Path, uri: str) -> None:
    Journal(tmp_path / "metrics.jsonl").event("started")
    run_id = str(forwarder(tmp_path, uri).stop(None))
    for _ in range(2):
        log_once(uri, run_id, {"train/loss": 3.0}, step=7, at=1000.0)
    assert history(uri, run_id) == [(7, 3.0)]

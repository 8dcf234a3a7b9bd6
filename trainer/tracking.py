"""MLflow's view of a training run: a forwarder carries the journal there, behind the training's back.

Training never waits for it. The offset of what has arrived is kept in `tracking.json`, so that a
server that was slow, down or restarted ends up with every record once.
"""

import getpass
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.durable import fsync, read_record, write_record
from trainer.errors import TrackingUnreachableError
from trainer.journal import JournalFollower, metrics_of, read_records

_BATCH = 1000
"""Metrics in one call: the most that MLflow's batch API takes."""


def mlflow_client(tracking_uri: str) -> Any:
    """A client of the store at ``tracking_uri``, whose calls give up after seconds rather than minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri)


def experiment_of(client: Any, name: str) -> str:
    """The id of the experiment ``name``, created where there is none.

    An SQLite store keeps its artifacts beside the database, `mlartifacts/`; a server decides itself.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens with the view for training
            return client.create_experiment(name, artifact_location=artifact_root(client.tracking_uri), tags=kind)
        except MlflowException:  # somebody else created it in between
            found = client.get_experiment_by_name(name)
    return found.experiment_id


def artifact_root(tracking_uri: str) -> str | None:
    """Where a store at ``tracking_uri`` keeps artifacts, as a URI; None where a server decides."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return (Path(tracking_uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()


@contextmanager
def reachable(tracking_uri: str) -> Iterator[None]:
    """Turn MLflow's errors of a store that does not answer into one that may be retried.

    Raises:
        TrackingUnreachableError: the store at ``tracking_uri`` failed or did not answer.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code not in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"):
            raise
        raise TrackingUnreachableError(
            f"MLflow at {tracking_uri} cannot be reached ({str(error).splitlines()[0]}). Start it, or set "
            "MLFLOW_TRACKING_URI to one that runs; the same command then goes on from here."
        ) from None


def is_tracked(run_dir: Path, tracking_uri: str) -> bool:
    """Whether the store at ``tracking_uri`` has this run, with its whole journal."""
    from mlflow.exceptions import MlflowException

    state = read_tracking(run_dir)
    if state.get("tracking_uri") != tracking_uri or state["offset"] != (run_dir / "metrics.jsonl").stat().st_size:
        return False
    try:
        return mlflow_client(tracking_uri).get_run(state["run_id"]).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


class Forwarder(JournalFollower):
    """Carries one run's journal to MLflow, and the files that its events name as artifacts."""

    def __init__(
        self,
        run_dir: Path,
        tracking_uri: str,
        experiment: str,
        name: str,
        fingerprint: str,
        parameters: dict[str, str],
        tags: dict[str, str],
    ) -> None:
        super().__init__("mlflow-forwarder")
        self._journal = run_dir / "metrics.jsonl"
        self._state_file = run_dir / "tracking.json"
        self._uri, self._experiment, self._name = tracking_uri, experiment, name
        self._fingerprint, self._parameters, self._tags = fingerprint, parameters, tags
        self._state: dict[str, Any] = {}
        self._client: Any = None

    def carry(self) -> None:
        """Connect where that has not been done, then forward."""
        self._client = self._client or self._connect()
        self._forward(self._client)

    def stop(self, status: str | None) -> str | None:
        """Carry the rest over and set the MLflow run's status.

        Returns:
            The MLflow run's id, or None where MLflow could not be reached (see ``last_error``).
        """
        self.finish()
        if self.last_error is None and status:
            mlflow_client(self._uri).set_terminated(self._state["run_id"], status)
        return self._state.get("run_id") if self.last_error is None else None

    def _connect(self) -> Any:
        client = mlflow_client(self._uri)
        state = read_tracking(self._state_file.parent)
        if "key" not in state:  # noted before the run is created, so that a kill in between makes no second one
            state = {"key": uuid.uuid4().hex}
            write_record(self._state_file, state)
        found = self._find_run(client, state["key"])
        if state.get("tracking_uri") != self._uri or state["run_id"] != found:
            run_id = found or self._create_run(client, state["key"])
            offset = state.get("offset", 0) if state.get("run_id") == run_id else 0
            state = {"key": state["key"], "tracking_uri": self._uri, "run_id": run_id, "offset": offset}
            write_record(self._state_file, state)
        self._state = state
        client.update_run(state["run_id"], status="RUNNING")
        return client

    def _find_run(self, client: Any, key: str) -> str | None:
        experiment = experiment_of(client, self._experiment)
        found = client.search_runs([experiment], f"tags.`forgeline.key` = '{key}'", max_results=1)
        return found[0].info.run_id if found else None

    def _create_run(self, client: Any, key: str) -> str:
        from mlflow.entities import Param

        tags = {
            **self._tags,
            "forgeline.run": self._fingerprint,
            "forgeline.key": key,
            "mlflow.user": getpass.getuser(),
            "mlflow.source.name": "forgeline",
        }
        run = client.create_run(experiment_of(client, self._experiment), tags=tags, run_name=self._name)
        parameters = [Param(key, value[:6000]) for key, value in self._parameters.items()]
        for first in range(0, len(parameters), 100):
            client.log_batch(run.info.run_id, params=parameters[first : first + 100])
        return run.info.run_id

    def _forward(self, client: Any) -> None:
        from mlflow.entities import Metric

        metrics: list[Any] = []
        offset = self._state["offset"]
        for record, end in read_records(self._journal, offset):
            metrics += [
                Metric(key, value, int(record["time"] * 1000), record["step"])
                for key, value in metrics_of(record).items()
            ]
            for name in record.get("artifacts", ()):
                if (file := self._journal.parent / name).exists():
                    client.log_artifact(self._state["run_id"], str(file), str(Path(name).parent))
            offset = end
            if len(metrics) > _BATCH - 50:
                self._send(client, metrics, offset)
                metrics = []
        if offset != self._state["offset"]:
            self._send(client, metrics, offset)

    def _send(self, client: Any, metrics: list[Any], offset: int) -> None:
        fsync(self._journal)  # what MLflow knows, the journal must not lose
        client.log_batch(self._state["run_id"], metrics=metrics)
        self._state["offset"] = offset
        write_record(self._state_file, self._state)


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """Which MLflow run shows this training, and how much of the journal it has; empty before the first contact."""
    return read_record(run_dir / "tracking.json") or {}


def log_once(tracking_uri: str, run_id: str, metrics: dict[str, float], step: int, at: float) -> None:
    """Log metrics of one moment; repeating the call with the same ``at`` (Unix seconds) changes nothing."""
    from mlflow.entities import Metric

    stamp = int(at * 1000)
    mlflow_client(tracking_uri).log_batch(run_id, metrics=[Metric(k, v, stamp, step) for k, v in metrics.items()])

"""`forgeline up`, end to end: real servers, a real worker, the deployments run as anyone would run them."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, TaskRun

from tests.conftest import REPOSITORY, eventually, free_ports, write_tiny_config

EVERYTHING = {"plan", "tokenizer", "tokenize", "train", "evaluate", "register"}


@dataclasses.dataclass
class Up:
    """A running `forgeline up`."""

    process: "subprocess.Popen[str]"
    environment: dict[str, str]
    home: Path
    prefect_port: int
    mlflow_url: str
    api: SyncPrefectClient

    def start(self, deployment: str, **parameters: Any) -> FlowRun:
        """Run a deployment with Prefect's command line, as a person would."""
        command = [sys.executable, "-m", "prefect", "deployment", "run", deployment]
        for name, value in parameters.items():
            command += ["-p", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
        address = {"PREFECT_API_URL": f"http://127.0.0.1:{self.prefect_port}/api"}
        done = subprocess.run(
            command, env=self.environment | address, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        identifier = re.search(r"flow-run/([0-9a-f-]{36})", done.stdout.replace("\n", ""))
        assert identifier, done.stdout
        return self.api.read_flow_run(identifier[1])

    def finished(self, run: FlowRun) -> FlowRun:
        """The run when it is in its terminal state."""

        def ended() -> FlowRun | None:
            assert self.process.poll() is None
            now = self.api.read_flow_run(run.id)
            return now if now.state and now.state.is_final() else None

        return eventually(ended, f"the end of {run.name}", 90)

    def task_runs(self, run: FlowRun) -> dict[str, TaskRun]:
        """The task runs by the task's name, once the server has heard of the end of all of them."""

        def all_final() -> dict[str, TaskRun] | None:
            found = self.api.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id])))
            final = all(task.state and task.state.is_final() for task in found)
            return {task.task_key.partition("_task")[0]: task for task in found} if found and final else None

        return eventually(all_final, "the task runs", 30)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[Up]:
    directory = tmp_path_factory.mktemp("up")
    prefect_port, mlflow_port = free_ports(2)
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"} | {
        "FORGELINE_HOME": "home",  # relative to where the user stands, and nowhere else
        "PREFECT_HOME": str(directory / "prefect"),
    }
    command = [sys.executable, "-m", "flows", "up", "--prefect-port", str(prefect_port)]
    process = subprocess.Popen(
        [*command, "--mlflow-port", str(mlflow_port)],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Ctrl-C"):
                break
        api, mlflow_url = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
        assert process.poll() is None, said
        assert f"export PREFECT_API_URL={api}/api" in said
        assert f" {api}\n" in said
        assert f" {mlflow_url}\n" in said
        with SyncPrefectClient(f"{api}/api") as client:
            yield Up(process, environment, directory / "home", prefect_port, mlflow_url, client)
    finally:
        process.terminate()
        process.wait(90)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, texts: list[Path]) -> Callable[..., str]:
    def write(name: str, **changes: Any) -> str:
        settings = {"name": name, "register.name": f"{name}-model", **changes}
        return str(write_tiny_config(tmp_path_factory.mktemp(name) / f"{name}.yaml", texts, settings))

    return write


@pytest.fixture(scope="module")
def trained(up: Up, config: Callable[..., str]) -> tuple[str, FlowRun]:
    """A configuration, and the flow run that trained it on the worker."""
    path = config("tiny")
    run = up.finished(up.start("train/train", preset=path, overrides={"train.steps": 12}))
    assert run.state
    assert run.state.name == "Completed", run.state.message
    return path, run


def test_a_deployed_run_shows_in_both_servers(up: Up, trained: tuple[str, FlowRun]) -> None:
    _, run = trained
    tasks = up.task_runs(run)
    assert set(tasks) >= EVERYTHING
    assert {task.state_name for task in tasks.values()} == {"Completed"}
    artifacts = up.api.read_artifacts(
        artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id]))
    )
    assert "summary" in {artifact.key for artifact in artifacts}
    logs = up.api.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
    assert any(log.message.startswith("train step=") for log in logs), [log.message for log in logs]

    mlflow = MlflowClient(up.mlflow_url)
    champion = mlflow.get_model_version_by_alias("tiny-model", "champion")
    shown = mlflow.get_run(champion.run_id)
    assert shown.info.status == "FINISHED"
    assert shown.data.metrics["train/tokens"] == 12 * 8 * 64
    assert "eval/bits_per_byte" in shown.data.metrics
    assert shown.data.params["train.steps"] == "12"
    assert [metric.step for metric in mlflow.get_metric_history(champion.run_id, "train/loss")] == [2, 4, 6, 8, 10, 12]


def test_the_store_is_the_one_of_runs_without_a_server(up: Up, trained: tuple[str, FlowRun]) -> None:
    directly = MlflowClient(f"sqlite:///{up.home}/mlflow.db")
    champion = directly.get_model_version_by_alias("tiny-model", "champion")
    experiment = directly.get_experiment_by_name("tiny")
    assert experiment
    assert directly.get_run(champion.run_id).info.experiment_id == experiment.experiment_id
    assert experiment.artifact_location.startswith((up.home / "mlartifacts").as_uri())


def test_retraining_on_the_same_text_is_skipped(up: Up, trained: tuple[str, FlowRun]) -> None:
    path, _ = trained
    began = time.monotonic()
    run = up.finished(up.start("retrain/retrain", preset=path, overrides={"train.steps": 12}))
    assert run.state
    assert (run.state.name, run.state.type.value) == ("Skipped", "COMPLETED"), run.state.message
    assert time.monotonic() - began < 30
    assert set(up.task_runs(run)) == {"plan"}


def test_a_killed_rank_is_retried_and_the_run_completes(up: Up, config: Callable[..., str]) -> None:
    # slow enough to be caught in the act, on any machine
    path = config("killed", **{"train.steps": 400, "train.checkpoint.every": 50, "train.log_every": 10})
    run = up.start("train/train", preset=path)
    (heartbeat,) = eventually(lambda: list(up.home.glob("runs/killed-*/heartbeat.json")), "the first heartbeat", 60)

    def past_first_checkpoint() -> list[int] | None:
        beat = json.loads(heartbeat.read_text())
        return beat["pids"] if beat["step"] > 50 else None

    os.kill(eventually(past_first_checkpoint, "a step after the checkpoint", 60)[1], signal.SIGKILL)
    run = up.finished(run)
    assert run.state
    assert run.state.name == "Completed", run.state.message
    assert up.task_runs(run)["train"].run_count == 2
    records = [json.loads(line) for line in (heartbeat.parent / "metrics.jsonl").read_text().splitlines()]
    assert [record["event"] for record in records if "event" in record].count("resumed") == 1
    assert [record["step"] for record in records if "train/loss" in record] == list(range(10, 401, 10))
    assert not list(up.home.glob("runs/*/failure.json"))


def test_a_port_in_use_is_named_before_anything_starts(up: Up, tmp_path: Path) -> None:
    environment = up.environment | {"FORGELINE_HOME": str(tmp_path)}
    other = str(free_ports(1)[0])
    taken = up.mlflow_url.rpartition(":")[2]
    for option, port, rest in (
        ("--prefect-port", str(up.prefect_port), ["--mlflow-port", other]),
        ("--mlflow-port", taken, ["--prefect-port", other]),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "flows", "up", option, port, *rest],
            env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr.startswith(f"forgeline: port {port} ")
        assert option in done.stderr
        assert not (tmp_path / "logs").exists()


def test_ctrl_c_ends_everything_and_leaves_a_checkpoint(up: Up, config: Callable[..., str]) -> None:
    path = config("interrupted", **{"train.steps": 10**6, "train.checkpoint.every": 10**6})
    up.start("train/train", preset=path)
    (heartbeat,) = eventually(lambda: list(up.home.glob("runs/interrupted-*/heartbeat.json")), "a heartbeat", 60)
    eventually(lambda: json.loads(heartbeat.read_text())["step"] > 0, "a step", 30)
    family = descendants(up.process.pid)
    assert {"server start", "mlflow server", "worker start", "prefect.engine", "-m trainer"} <= {
        part for part in ("server start", "mlflow server", "worker start", "prefect.engine", "-m trainer")
        for command in family.values() if part in command
    }  # fmt: skip
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(60) == 0
    assert not {pid: command for pid, command in family.items() if alive(pid)}
    assert list((heartbeat.parent / "checkpoints").glob("step-*"))


def descendants(root: int) -> dict[int, str]:
    """Pid and command of every process below ``root``."""
    parents, commands = {}, {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(directory.name)] = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    found, rest = {}, [root]
    while rest:
        children = [pid for pid, parent in parents.items() if parent == rest[0]]
        found |= {pid: commands[pid] for pid in children if pid in commands}
        rest = rest[1:] + children
    return found


def alive(pid: int) -> bool:
    """Whether a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""`forgeline up`: a Prefect server, an MLflow server and a worker on this machine, for as long as it runs."""

import atexit
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from tasks.home import Home
from trainer.durable import explained
from trainer.errors import ForgelineError, MachineError
from trainer.processes import start_guarded
from trainer.tracking import artifact_root

logger = logging.getLogger("forgeline")

HOST = "127.0.0.1"
POOL = "forgeline"
_REPOSITORY = Path(__file__).resolve().parent.parent

_SERVER_GRACE = 5.0
"""Seconds in which a server may end by itself."""
_WORKER_GRACE = 45.0
"""The same for the worker, whose flow runs write a checkpoint first."""
_START_SECONDS = 180.0
_POLL_SECONDS = 0.2


def serve(home: Home, prefect_port: int, mlflow_port: int) -> int:
    """Start the servers and a worker, deploy, and wait until interrupted or until one of them dies.

    A server that `PREFECT_API_URL` or `MLFLOW_TRACKING_URI` names is used in place of one of our own.

    Returns:
        The exit code after Ctrl-C or SIGTERM: 0.

    Raises:
        MachineError: a port is taken, or the Prefect server that the environment names does not answer.
        ForgelineError: a process died or would not start; the message names its log.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    services = _Services(home, prefect_port, mlflow_port)
    try:
        services.start()
        print(services.greeting(), flush=True)
        while True:
            services.check()
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        print("ending everything; a running flow writes a checkpoint first (again: end at once)", flush=True)
        return 0
    finally:
        services.end()


class _Process:
    """One process under a guard, which ends it when this program ends, however that happens."""

    def __init__(
        self, title: str, log: Path, grace: float, arguments: list[str], environment: dict[str, str], directory: Path
    ) -> None:
        self.title, self.log = title, log
        with explained(log), open(log, "ab") as file:
            self.guard = start_guarded([sys.executable, *arguments], grace, environment, file, directory)

    def check(self) -> None:
        """Raise where it has ended."""
        if self.guard.poll() is not None:
            raise ForgelineError(f"the {self.title} ended with code {self.guard.returncode}. Log: {self.log}")


class _Services:
    """What runs, and where it answers."""

    def __init__(self, home: Home, prefect_port: int, mlflow_port: int) -> None:
        self.home = home
        self.processes: list[_Process] = []
        self.api_url = f"http://{HOST}:{prefect_port}/api"
        self.mlflow_url = f"http://{HOST}:{mlflow_port}"
        ours = {self.api_url, self.api_url.replace(HOST, "localhost")}  # exported for an `up` before this one
        named = os.environ.get("PREFECT_API_URL", "").rstrip("/")
        self.own_prefect = not named or named in ours
        # any other kind of address is that of a store, for a server to serve
        self.own_mlflow = urlsplit(home.tracking_uri).scheme not in ("http", "https", "databricks")
        if not self.own_prefect:
            self.api_url = named
            if not _answers(f"{named}/health"):
                raise MachineError(
                    f"PREFECT_API_URL={named}: no Prefect server answers there. Start it, or unset the variable to "
                    "have one started here."
                )
        if not self.own_mlflow:
            self.mlflow_url = home.tracking_uri
        _check_ports(
            {
                **({"--prefect-port": prefect_port} if self.own_prefect else {}),
                **({"--mlflow-port": mlflow_port} if self.own_mlflow else {}),
            }
        )
        self.environment = {
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            **os.environ,
            "FORGELINE_HOME": str(home.path),
            "MLFLOW_TRACKING_URI": self.mlflow_url,
            "PREFECT_API_URL": self.api_url,
        }

    def start(self) -> None:
        """Start everything; returns when all of it answers and the flows are deployed."""
        print("starting the servers and a worker (well under a minute)", flush=True)
        if self.own_prefect:
            port = str(urlsplit(self.api_url).port)
            self._start("Prefect server", "prefect", "server", "start", "--host", HOST, "--port", port)
        if self.own_mlflow:
            store = self.home.tracking_uri
            self._start(
                "MLflow server", "mlflow", "server", "--host", HOST, "--port", str(urlsplit(self.mlflow_url).port),
                "--workers", "1", "--uvicorn-opts", "--log-level warning", "--backend-store-uri", store,
                "--default-artifact-root",
                artifact_root(store) or (self.home.path / "mlartifacts").as_uri(),
            )  # fmt: skip
        _import_prefect()  # takes a second or two, in which the servers start
        self._wait("Prefect server", lambda: _answers(f"{self.api_url}/health"))
        _create_pool(self.api_url)
        self._start(
            "worker", "prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", socket.gethostname()
        )
        self._deploy()
        if self.own_mlflow:
            self._wait("MLflow server", lambda: _answers(f"{self.mlflow_url}/health"))

    def _start(self, title: str, *arguments: str, directory: Path | None = None) -> _Process:
        environment = dict(self.environment)
        if title == "MLflow server":
            del environment["MLFLOW_TRACKING_URI"]  # its own address is no store
            environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        logs = self.home.path / "logs"
        with explained(logs):
            logs.mkdir(exist_ok=True)
        process = _Process(
            title,
            logs / f"{title.lower().replace(' ', '-')}.log",
            _WORKER_GRACE if title == "worker" else _SERVER_GRACE,
            ["-m", *arguments],
            environment,
            directory or Path.cwd(),
        )
        self.processes.append(process)
        return process

    def _deploy(self) -> None:
        deploy = self._start("deployment", "prefect", "--no-prompt", "deploy", "--all", directory=_REPOSITORY)
        self.processes.remove(deploy)
        try:
            self._wait("deployment", lambda: deploy.guard.poll() is not None)
        finally:
            _end(deploy)
        if deploy.guard.returncode:
            deploy.check()

    def _wait(self, title: str, done: Callable[[], bool]) -> None:
        """Wait until ``done``, as long as every process lives."""
        deadline = time.monotonic() + _START_SECONDS
        while not done():
            self.check()
            if time.monotonic() > deadline:
                logs = self.home.path / "logs"
                raise ForgelineError(f"the {title} was not ready within {_START_SECONDS:g} s. Logs: {logs}")
            time.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Raise where a process has ended."""
        for process in self.processes:
            process.check()

    def end(self) -> None:
        """End every process: the worker first, so that its flow runs can still report how they ended."""
        try:
            for title in ("worker", "MLflow server", "Prefect server"):
                _end(*[process for process in self.processes if process.title == title])
        except KeyboardInterrupt:
            _end(*self.processes, at_once=True)

    def greeting(self) -> str:
        """Where everything is, and what to do next."""
        prefect = Path(sys.executable).with_name("prefect")
        command = "prefect" if shutil.which("prefect") == str(prefect) else str(prefect)
        return "\n".join(
            [
                f"Prefect  {self.api_url.removesuffix('/api')}{_whose(self.own_prefect, 'PREFECT_API_URL')}",
                f"MLflow   {self.mlflow_url}{_whose(self.own_mlflow, 'MLFLOW_TRACKING_URI')}",
                f"logs     {self.home.path / 'logs'}",
                "",
                "In another terminal:",
                f"  export PREFECT_API_URL={self.api_url}",
                f"  {command} deployment run train/train -p preset=quickstart",
                f"  {command} deployment run train/train -p preset=quickstart -p 'overrides={{\"train.steps\": 100}}'",
                f"  {command} deployment run retrain/retrain -p preset=quickstart",
                "",
                "Ctrl-C ends all of it.",
            ]
        )


def _end(*processes: _Process, at_once: bool = False) -> None:
    for process in processes:
        if process.guard.poll() is None:
            process.guard.terminate()
            if at_once:
                process.guard.terminate()
    for process in processes:
        process.guard.wait()


def _check_ports(ports: dict[str, int]) -> None:
    """Refuse ports that cannot be had; ``ports`` is by command-line option."""
    if len(set(ports.values())) < len(ports):
        raise MachineError(f"{' and '.join(ports)} are both {min(ports.values())}: give each server a port of its own.")
    for option, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last server's closed connections linger
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else "there is no such port"
                raise MachineError(f"port {port} cannot be used ({reason}). Choose another: {option} PORT.") from None


def ensure_prefect_server(home: Home, meanwhile: Callable[[], None]) -> None:
    """Have a Prefect API for this process: the one that is configured, or a temporary server until it ends.

    The temporary one is out of reach of the terminal's Ctrl-C, and ends with this process however that ends.

    Args:
        meanwhile: called while the server starts.

    Raises:
        MachineError: the configured API does not answer, or the temporary server would not start.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import PREFECT_API_URL

    if configured := PREFECT_API_URL.value():
        if not _listens(configured):
            raise MachineError(
                f"PREFECT_API_URL={configured}: no Prefect server answers there. Start it, or unset the variable (or "
                "the profile's setting) to have a temporary one started."
            )
        return
    logger.info("starting a temporary Prefect server (a few seconds; `make up` keeps one)")
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    log = home.directory("logs", "temporary-prefect-server.log")
    command = [sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--host", HOST, "--port", str(port)]
    with explained(log), open(log, "wb") as output:
        server = start_guarded(command, _SERVER_GRACE, dict(os.environ), output)
    # Prefect's own threads send what is left before handlers of this kind run
    atexit.register(server.wait)
    atexit.register(server.terminate)
    meanwhile()
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(f"http://{HOST}:{port}/api/health"):
        if server.poll() is not None or time.monotonic() > deadline:
            raise MachineError(f"the temporary Prefect server did not start. Its log: {log}")
        time.sleep(0.05)
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{port}/api"
    refresh_global_settings_context()


def _listens(url: str) -> bool:
    """Whether anything answers at a URL, be it a refusal."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=10):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, HTTPException):
        return False


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError, ValueError, HTTPException), urllib.request.urlopen(url, timeout=5) as response:
        return response.status == 200
    return False


def _import_prefect() -> None:
    import prefect.client.orchestration
    import prefect.workers.process  # noqa: F401


def _create_pool(api_url: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.workers.process import ProcessWorker

    pool = WorkPoolCreate(name=POOL, type="process", base_job_template=ProcessWorker.get_default_base_job_template())
    with (
        temporary_settings({PREFECT_API_URL: api_url}),
        get_client(sync_client=True) as client,
        contextlib.suppress(ObjectAlreadyExists),
    ):
        client.create_work_pool(pool)


def _whose(ours: bool, variable: str) -> str:
    return "" if ours else f"   (yours: {variable})"

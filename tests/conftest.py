"""What the tests share: one Prefect server for all of them, a tiny configuration, work directories, the CLI."""

import atexit
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.home import Home
from trainer.processes import start_guarded
from trainer.tracking import mlflow_client

HOST = "127.0.0.1"
REPOSITORY = Path(__file__).resolve().parent.parent
_OURS = ("PREFECT_", "MLFLOW_", "FORGELINE_")


def free_ports(count: int) -> list[int]:
    """Ports on the loopback that nobody listens on."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((HOST, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


# Prefect reads its settings when it is first imported, so they are set before any test module is. A test that
# needs the server without asking for `prefect_server` finds nobody at the address, and never starts one of its own.
for _name in [name for name in os.environ if name.startswith(_OURS)]:
    del os.environ[_name]
_PREFECT_HOME = Path(tempfile.mkdtemp(prefix="forgeline-tests-"))
os.environ |= {
    "PREFECT_HOME": str(_PREFECT_HOME),
    "PREFECT_API_URL": f"http://{HOST}:{free_ports(1)[0]}/api",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


atexit.register(shutil.rmtree, _PREFECT_HOME, ignore_errors=True)


def eventually(found: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value that ``found`` returns."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.1)
    return value


def answers(url: str) -> bool:
    """Whether a server at ``url`` says that all is well."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[str]:
    """The address of the API of the session's Prefect server, which `PREFECT_API_URL` names as well."""
    url = os.environ["PREFECT_API_URL"]
    port = url.rpartition(":")[2].removesuffix("/api")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", port, "--no-ui"]
    with open(_PREFECT_HOME / "server.log", "wb") as log:
        server = start_guarded(command, 5.0, dict(os.environ), log)
    try:
        eventually(lambda: server.poll() is not None or answers(f"{url}/health"), "the Prefect server", 120)
        assert server.poll() is None, (_PREFECT_HOME / "server.log").read_text()
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def run_cli(prefect_server: str) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs `forgeline` with the given arguments, in a process of its own."""

    def run(
        *arguments: Any, home: Home | None = None, env: dict[str, str] | None = None, timeout: float = 300
    ) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, **({"FORGELINE_HOME": str(home.path)} if home else {}), **(env or {})}
        command = [sys.executable, "-m", "flows", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; a copy saves the second and a half in which MLflow makes a new one."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow_client(f"sqlite:///{path}").search_experiments()
    return path


def new_home(path: Path, mlflow_template: Path) -> Home:
    """A work directory with an empty MLflow store."""
    path.mkdir()
    shutil.copy(mlflow_template, path / "mlflow.db")
    return Home(path)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": _flip,
    "cut": lambda path: os.truncate(path, 100),
    "gone": Path.unlink,
}
"""What can happen to a file."""


@contextmanager
def python_process(code: str, *arguments: Any) -> Iterator["subprocess.Popen[str]"]:
    """A Python program with pipes for its input and output, which ends with the block, or after a minute."""
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        limit = threading.Timer(60, process.kill)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()


@pytest.fixture
def work(tmp_path: Path) -> Home:
    """An empty work directory, for stages that track nothing."""
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home")


@pytest.fixture
def home(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A fresh work directory, which `FORGELINE_HOME` names as well."""
    made = new_home(tmp_path / "home", mlflow_template)
    monkeypatch.setenv("FORGELINE_HOME", str(made.path))
    return made


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two directories of about twenty small documents each, cut from Python's library."""
    directories = []
    for module in ("textwrap", "shlex"):
        text = (Path(sysconfig.get_path("stdlib")) / f"{module}.py").read_text(encoding="utf-8")
        directory = tmp_path_factory.mktemp(module)
        for number in range(0, len(text), 800):
            (directory / f"{number:06}.txt").write_text(text[number : number + 800], encoding="utf-8")
        directories.append(directory)
    return directories


def write_tiny_config(path: Path, texts: list[Path], changes: dict[str, Any]) -> Path:
    """Write a configuration that trains in a second; ``changes`` are set by dotted key, None removes one."""
    content: dict[str, Any] = {
        "name": "tiny",
        "data": {
            "sources": [str(directory) for directory in texts],
            "tokenizer": "byte",
            "sequence_length": 64,
            "validation_fraction": 0.2,
        },
        "model": {
            "type": "llama",
            "config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "tie_word_embeddings": True,
            },
        },
        "train": {
            "steps": 20,
            "global_batch": 8,
            "ranks": 2,
            "threads": 1,
            "learning_rate": 0.01,
            "precision": "fp32",
            "log_every": 2,
            "checkpoint": {"every": 5, "keep": 2},
        },
        "evaluate": {"sample_tokens": 16},
        "register": {"name": "tiny-model"},
        "retry": {"limit": 2, "delay_seconds": 0.1},
    }
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = content
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def tiny_config(tmp_path: Path, texts: list[Path]) -> Callable[..., Path]:
    """Writes the tiny configuration, with changes by dotted key: `tiny_config({"train.steps": 40})`."""

    def write(changes: dict[str, Any] | None = None, file: str = "tiny.yaml") -> Path:
        return write_tiny_config(tmp_path / file, texts, changes or {})

    return write


@dataclasses.dataclass(frozen=True)
class TrainedHome:
    """A work directory in which the tiny configuration has run."""

    home: Home
    config: Path
    result: dict[str, Any]
    """What `forgeline run --json` printed."""


@pytest.fixture(scope="session")
def trained_home(
    tmp_path_factory: pytest.TempPathFactory, texts: list[Path], mlflow_template: Path, run_cli: Callable[..., Any]
) -> TrainedHome:
    """The tiny configuration's run, for tests that only look at what it made."""
    directory = tmp_path_factory.mktemp("trained")
    watched = {"train.tensorboard": True, "train.profile": {"start_step": 8, "steps": 1}}
    config = write_tiny_config(directory / "tiny.yaml", texts, watched)
    made = new_home(directory / "home", mlflow_template)
    done = run_cli("run", config, "--json", home=made)
    assert done.returncode == 0, done.stderr
    return TrainedHome(made, config, json.loads(done.stdout))

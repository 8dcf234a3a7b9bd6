"""The whole line through the command line: real Prefect, real MLflow on SQLite, real torchrun and DeepSpeed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.home import Home
from tests.conftest import REPOSITORY, TrainedHome, eventually
from trainer.durable import read_record, write_record

RESULT_KEYS = {
    "name",
    "run_dir",
    "shards_dir",
    "export_dir",
    "mlflow_run_id",
    "tracking_uri",
    "model",
    "metrics",
    "sample",
    "stages",
}
METRICS = {
    "eval/loss",
    "eval/perplexity",
    "eval/bits_per_byte",
    "eval/unigram_entropy",
    "eval/tokens",
    "train/loss",
    "train/steps",
    "train/tokens",
    "train/tokens_per_second",
}
STAGES = ["tokenizer", "tokenize", "train", "evaluate", "register"]


@pytest.fixture(scope="session")
def trained(trained_home: TrainedHome) -> dict[str, Any]:
    """What `forgeline run --json` printed for the tiny configuration."""
    return trained_home.result


def states(result: dict[str, Any]) -> dict[str, str]:
    """What each stage did."""
    return {stage["name"]: stage["state"] for stage in result["stages"]}


def test_the_json_interface_is_frozen(trained: dict[str, Any]) -> None:
    assert set(trained) == RESULT_KEYS
    assert set(trained["metrics"]) == METRICS
    assert set(trained["model"]) == {"name", "version", "aliases"}
    assert [set(stage) for stage in trained["stages"]] == [{"name", "state", "seconds"}] * 5
    assert states(trained) == dict.fromkeys(STAGES, "ran")
    assert trained["model"]["version"] == "1" and trained["model"]["aliases"] == ["champion"]
    assert trained["metrics"]["train/steps"] == 20
    assert trained["metrics"]["train/tokens"] == 20 * 8 * 64


def test_the_export_loads_with_transformers_and_scores_as_evaluated(trained: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trainer.data.shards import ShardSet

    model = AutoModelForCausalLM.from_pretrained(trained["export_dir"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained["export_dir"])
    stream = ShardSet.open(Path(trained["shards_dir"])).stream("validation")
    import numpy as np

    tokens = np.empty(len(stream), dtype=np.int64)
    stream.read(0, tokens)
    ids = torch.from_numpy(tokens)
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, 64):
            window = ids[start : start + 65]
            logits = model(window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert total / (len(ids) - 1) == pytest.approx(trained["metrics"]["eval/loss"], abs=1e-4)
    assert tokenizer.decode(tokenizer.encode("Zoë 🦊")) == "Zoë 🦊"


def test_the_registered_model_loads_with_mlflow(trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained["tracking_uri"])
    pipeline = mlflow.transformers.load_model(f"models:/{trained['model']['name']}@champion")
    assert pipeline("import", max_new_tokens=5)[0]["generated_text"].startswith("import")


def test_mlflow_shows_the_run_as_the_journal_has_it(trained: dict[str, Any]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(trained["tracking_uri"])
    run = client.get_run(trained["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.learning_rate"] == "0.01"
    assert run.data.metrics["eval/loss"] == trained["metrics"]["eval/loss"]
    journal = [json.loads(line) for line in (Path(trained["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    in_journal = [(record["step"], record["train/loss"]) for record in journal if "train/loss" in record]
    history = client.get_metric_history(trained["mlflow_run_id"], "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == in_journal
    assert len(in_journal) == 10
    files = {file.path for file in client.list_artifacts(trained["mlflow_run_id"], "profile/step-00000008")}
    assert files == {f"profile/step-00000008/{name}" for name in ("trace.json.gz", "operators.txt")}


def test_tensorboard_shows_the_run_as_the_journal_has_it(trained: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = Path(trained["run_dir"])
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("train/loss")
    journal = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    in_journal = [(record["step"], record["train/loss"]) for record in journal if "train/loss" in record]
    assert [(event.step, event.value) for event in events] == [(n, pytest.approx(loss)) for n, loss in in_journal]


def test_everything_a_run_makes_is_below_the_work_directory(trained: dict[str, Any], trained_home: TrainedHome) -> None:
    from mlflow import MlflowClient

    for key in ("run_dir", "shards_dir", "export_dir"):
        assert Path(trained[key]).is_relative_to(trained_home.home.path)
    run = MlflowClient(trained["tracking_uri"]).get_run(trained["mlflow_run_id"])
    assert str(trained_home.home.path) in run.info.artifact_uri


def test_why_leads_back_to_the_raw_files(
    trained: dict[str, Any], run_cli: Callable[..., Any], trained_home: TrainedHome
) -> None:
    import hashlib

    for model in (trained["export_dir"], f"models:/{trained['model']['name']}@champion"):
        done = run_cli("why", model, "--json", home=trained_home.home)
        found = json.loads(done.stdout)
        assert found["export"]["faults"] == []
        assert Path(found["checkpoint"]).is_dir()
        assert found["config"]["train"]["steps"] == 20
        assert found["run"]["run_dir"] == trained["run_dir"]
        raw = found["raw_files"]
        assert raw
        for file in raw:
            assert hashlib.sha256(Path(file["path"]).read_bytes()).hexdigest() == file["sha256"]


def test_generate_continues_the_prompt(
    trained: dict[str, Any], run_cli: Callable[..., Any], trained_home: TrainedHome
) -> None:
    uri = f"models:/{trained['model']['name']}@champion"
    done = run_cli("generate", uri, "--prompt", "def f(", "--tokens", "8", "--temperature", "0", home=trained_home.home)
    assert done.returncode == 0
    assert done.stdout.startswith("def f(")
    again = run_cli("generate", trained["export_dir"], "--prompt", "def f(", "--tokens", "8", "--temperature", "0")
    assert again.stdout == done.stdout


def test_data_verify_finds_a_flipped_byte(trained: dict[str, Any], run_cli: Callable[..., Any], tmp_path: Path) -> None:
    copy = tmp_path / "shards"
    shutil.copytree(trained["shards_dir"], copy)
    assert run_cli("data", "verify", str(copy)).returncode == 0
    info = json.loads(run_cli("data", "info", str(copy), "--json").stdout)
    assert info["splits"]["train"]["tokens"] > 0
    shard = next((copy / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    done = run_cli("data", "verify", str(copy), "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["faults"] == [f"{shard}: content differs from its checksum"]


def test_what_is_done_is_cached_and_a_change_repeats_what_follows_it(
    run_cli: Callable[..., Any], tiny_config: Callable[..., Path], home: Home
) -> None:
    def run(*more: str) -> dict[str, Any]:
        done = run_cli("run", str(config), "--json", *more, home=home)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    config = tiny_config()
    first = run()
    assert states(run()) == dict.fromkeys(STAGES, "cached")

    changed = run("--set", "train.learning_rate=0.005")
    assert states(changed) == {
        "tokenizer": "cached",
        "tokenize": "cached",
        "train": "ran",
        "evaluate": "ran",
        "register": "ran",
    }
    assert changed["model"]["version"] == "2"
    better = changed["metrics"]["eval/bits_per_byte"] < first["metrics"]["eval/bits_per_byte"]
    assert changed["model"]["aliases"] == (["champion"] if better else ["challenger"])

    assert states(run("--set", "train.checkpoint.keep=3")) == dict.fromkeys(STAGES, "cached")

    shutil.rmtree(first["export_dir"])
    rebuilt = run()
    assert states(rebuilt)["train"] == "ran"
    assert rebuilt["metrics"]["eval/loss"] == first["metrics"]["eval/loss"]
    assert rebuilt["model"]["version"] == "1"


def test_a_users_mistake_is_one_message_without_a_traceback_and_exit_code_2(
    run_cli: Callable[..., Any], tiny_config: Callable[..., Path], home: Home, tmp_path: Path
) -> None:
    config = tiny_config()
    mistakes = {
        "train.stepz=3": "Did you mean steps?",
        "data.sources=[nowhere/*.txt]": "nothing is at 'nowhere/*.txt'",
        "train.micro_batch=3": "does not divide",
        "model.config.hidden_sise=3": "Did you mean hidden_size?",
        "data.tokenizer={type: bpe, vocabulary_size: 100000}": "more than the text allows",
        "data.text_field": "write it as section.key=value",
        "register.name=a/b": "register.name",
        "train.seed=99999999999999999999999": "train.seed",
        "train.deepspeed={gradient_accumulation_steps: 4}": "gradient_accumulation_steps cannot be set here",
        "train.deepspeed={zero_optimization: {round_robin_gradients: 7.5}}": "train.deepspeed: refused by DeepSpeed",
        "model.config.max_position_embeddings=8": "more than the model's context of 8",
    }
    for setting, expected in mistakes.items():
        done = run_cli("run", str(config), "--set", setting, home=home)
        assert done.returncode == 2, (setting, done.stderr)
        assert expected in done.stderr, setting
        assert "Traceback" not in done.stderr + done.stdout, setting
    for kind in ("tokenizers", "shards", "exports"):
        leftovers = [path.name for path in (home.path / kind).glob(".*")] if (home.path / kind).exists() else []
        assert leftovers == []


def test_a_work_directory_that_cannot_be_written_is_named(
    run_cli: Callable[..., Any], tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = run_cli("run", str(tiny_config()), home=Home(tmp_path / "file" / "home"))
    assert done.returncode == 2
    assert "FORGELINE_HOME" in done.stderr and "Traceback" not in done.stderr


def test_a_run_with_other_steps_than_planned_is_not_registered(
    trained: dict[str, Any],
    trained_home: TrainedHome,
    run_cli: Callable[..., Any],
    tiny_config: Callable[..., Path],
    tmp_path: Path,
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(trained_home.home.path, home.path)
    for result_file in home.path.glob("runs/*/result.json"):
        write_record(result_file, {**(read_record(result_file) or {}), "steps": 19})
    done = run_cli("run", str(tiny_config()), "--json", home=home)
    assert done.returncode == 1
    assert "19 steps were done and 20 were planned" in done.stderr


def test_help_answers_without_loading_anything_heavy(run_cli: Callable[..., Any]) -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    for command in ("run", "plan", "data", "why", "generate", "config", "up"):
        assert command in done.stdout


def test_ctrl_c_ends_a_run_and_its_temporary_server_cleanly_and_it_goes_on_afterwards(
    tiny_config: Callable[..., Path], home: Home, tmp_path: Path
) -> None:
    config = tiny_config({"train.steps": 100_000})
    environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "FORGELINE_HOME": str(home.path)}
    command = [sys.executable, "-m", "flows", "run", str(config)]
    running = subprocess.Popen(
        command, env=environment, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def steps_done() -> int:
        return max((json.loads(p.read_text())["step"] for p in home.path.glob("runs/*/heartbeat.json")), default=0)

    eventually(lambda: steps_done() > 5, "the sixth step", 120)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130
    assert errors.splitlines()[-1] == "interrupted; the same command goes on from here"
    assert "Traceback" not in errors
    assert list(home.path.glob("runs/*/checkpoints/step-*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)  # the server is gone as well


def test_a_run_whose_mlflow_store_is_lost_or_unreachable_is_completed_in_the_next_one(
    trained_home: TrainedHome, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(trained_home.home.path, home.path)
    (home.path / "mlflow.db").unlink()
    command = ("run", str(trained_home.config), "--json", "--set", "retry.limit=0")
    nobody = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    refused = run_cli(*command, home=home, env=nobody)
    assert refused.returncode == 1
    assert "MLflow at http://127.0.0.1:9 cannot be reached" in refused.stderr and "Traceback" not in refused.stderr
    done = run_cli(*command, home=home)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["metrics"]["eval/loss"] == trained_home.result["metrics"]["eval/loss"]
    assert result["model"]["aliases"] == ["champion"]
    from mlflow import MlflowClient

    client = MlflowClient(result["tracking_uri"])
    assert len(client.get_metric_history(result["mlflow_run_id"], "train/loss")) == 10
    assert client.get_run(result["mlflow_run_id"]).data.metrics["eval/loss"] == result["metrics"]["eval/loss"]


def test_damaged_records_of_a_finished_run_are_never_trusted(
    trained_home: TrainedHome, run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(trained_home.home.path, home.path)
    run_dir = next(home.path.glob("runs/*"))
    for file in ("evaluation-*.json", "tracking.json", "result.json"):
        path = next(run_dir.glob(file))
        path.write_text(path.read_text().replace("e", "f", 1))
    shutil.rmtree(next(home.path.glob("exports/*")))
    with open(run_dir / "metrics.jsonl", "a") as journal:
        journal.write("garbage\n")
    shutil.rmtree(home.path / "mlartifacts", ignore_errors=True)
    done = run_cli("run", str(trained_home.config), "--json", home=home)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"]["eval/loss"] == trained_home.result["metrics"]["eval/loss"]


def test_other_weights_under_the_same_path_are_another_run(
    trained: dict[str, Any], run_cli: Callable[..., Any], tiny_config: Callable[..., Path], home: Home, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    origin = tmp_path / "origin"
    shutil.copytree(trained["export_dir"], origin)
    config = tiny_config({"model": {"pretrained": str(origin)}, "train.steps": 2, "data.tokenizer": str(origin)})
    first = json.loads(run_cli("run", config, "--json", home=home).stdout)
    model = AutoModelForCausalLM.from_pretrained(origin)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model.save_pretrained(origin)
    second = json.loads(run_cli("run", config, "--json", home=home).stdout)
    assert second["run_dir"] != first["run_dir"]
    assert states(second) == {**dict.fromkeys(STAGES, "ran"), "tokenizer": "cached", "tokenize": "cached"}


def test_a_prefect_api_that_does_not_answer_is_named(
    run_cli: Callable[..., Any], tiny_config: Callable[..., Path], home: Home
) -> None:
    done = run_cli("run", str(tiny_config()), home=home, env={"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    assert done.returncode == 2
    assert "PREFECT_API_URL=http://127.0.0.1:9/api" in done.stderr and "Traceback" not in done.stderr

"""A small shard set and runs of the real trainer on it: torchrun, DeepSpeed, gloo."""

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.home import Home
from tasks.sources import SourceConfig, resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import TokenizerConfig, build_tokenizer
from trainer.config import ModelConfig, TrainConfig, TrainerInput
from trainer.durable import write_file
from trainer.launcher import launch

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of a byte tokenizer and of the shard set of Python's json package."""
    home = Home(tmp_path_factory.mktemp("shards-home"))
    source = SourceConfig(path=f"{sysconfig.get_path('stdlib')}/json/*.py")
    data = DataConfig(sources=[source], tokenizer=TokenizerConfig(type="byte"), validation_fraction=0.3)
    files = resolve(home, data.sources, "data.sources")
    tokenizer = build_tokenizer(home, data.tokenizer, data.reading, files)
    return tokenizer.path, tokenize(home, data, files, [], tokenizer).path


@pytest.fixture
def new_run(tmp_path: Path, small_shards: tuple[Path, Path]) -> Callable[..., TrainerInput]:
    """Makes the input of a run in a directory of its own; keywords go to the training section."""
    return runs_in(tmp_path, small_shards)


@pytest.fixture(scope="module")
def new_shared_run(
    tmp_path_factory: pytest.TempPathFactory, small_shards: tuple[Path, Path]
) -> Callable[..., TrainerInput]:
    """The same for a run that several tests of a module only look at."""
    return runs_in(tmp_path_factory.mktemp("runs"), small_shards)


def runs_in(directory: Path, small_shards: tuple[Path, Path]) -> Callable[..., TrainerInput]:
    """What makes the inputs of runs in a directory."""

    def make(
        name: str, steps: int = 6, precision: str = "fp32", model: dict[str, Any] | None = None, **train: Any
    ) -> TrainerInput:
        settings = {"global_batch": 8, "ranks": 2, "threads": 1, "micro_batch": 2, "log_every": 1}
        settings |= {"checkpoint": {"every": 3, "keep": 4}, **train}
        config = TrainConfig(steps=steps, precision=precision, **settings)
        run_dir = directory / name
        run_dir.mkdir(exist_ok=True)
        return TrainerInput(
            name=name,
            fingerprint="0123456789abcdef",
            run_dir=run_dir,
            export_dir=directory / f"{name}-export",
            shards_dir=small_shards[1],
            tokenizer_dir=small_shards[0],
            sequence_length=32,
            weights=None,
            steps=steps,
            precision=precision,
            micro_batch=config.micro_batch or 8,
            model=ModelConfig(type="llama", config={**LLAMA, **(model or {})}),
            train=config,
            lineage={},
        )

    return make


def run(settings: TrainerInput) -> list[dict[str, Any]]:
    """Launch a run to its end; returns the journal."""
    write_file(settings.run_dir / "config.yaml", settings.text())
    launch(settings, lambda heartbeat: None)
    return journal(settings)


def journal(settings: TrainerInput) -> list[dict[str, Any]]:
    """The records of a run's journal."""
    return [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> dict[int, float]:
    """The loss of each step in a journal."""
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}

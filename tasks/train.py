"""The train stage: prepares a run directory, launches the trainer, and sees it to its planned end."""

import logging
import math
from pathlib import Path
from typing import Any

import yaml
from prefect import task

from tasks.home import Home, content_of
from tasks.pack import sequences_and_tokens
from tasks.progress import Progress, report
from tasks.stage import Reference, shown, timed
from tasks.tokenize import DataConfig
from trainer.config import ModelConfig, TrainConfig, TrainerInput
from trainer.data.shards import ShardSet
from trainer.durable import exclusive, explained, faults, read_record, write_file
from trainer.errors import ConfigError, IncompleteRunError, OutOfMemoryError, PreemptedError, TrackingUnreachableError
from trainer.launcher import launch
from trainer.schedule import steps_of_warmup
from trainer.settings import fingerprint
from trainer.tensorboard import EventFileWriter
from trainer.tracking import Forwarder, is_tracked, reachable, read_tracking

logger = logging.getLogger("forgeline")

FORMAT_VERSION = 1


class Trained(Reference):
    """A finished training: `path` is its run directory."""

    export_dir: Path
    """The model in transformers' format."""
    mlflow_run_id: str
    """The MLflow run that shows it."""
    steps: int
    """Steps done, which are the steps planned."""
    tokens: int
    """Tokens trained on."""
    tokens_per_second: float
    """Over all steps, without start-up, evaluation and checkpoints."""
    loss: float
    """The last recorded training loss."""


def planned_steps(train: TrainConfig, tokens_a_sequence: float, training_sequences: int) -> int:
    """Steps that the configuration asks for, given the number of sequences in one epoch."""
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return math.ceil(train.tokens / (train.global_batch * tokens_a_sequence))
    assert train.epochs is not None
    return math.ceil(train.epochs * training_sequences / train.global_batch)


def run_fingerprint(home: Home, model: ModelConfig, train: TrainConfig, data: DataConfig, shards: str) -> str:
    """Which run this is: everything that changes the weights that come out."""
    return fingerprint(
        "train",
        FORMAT_VERSION,
        # by the content of what it continues from, wherever that is
        model={**model.identity(), **({"pretrained": content_of(home, model.pretrained)} if model.pretrained else {})},
        train=train.identity(),
        sequence_length=data.sequence_length,
        weights=data.weights,
        packing=data.packing,
        document_mask=data.document_mask,
        shards=shards,
    )


def run_directory(home: Home, name: str, run: str) -> Path:
    """The run directory, `HOME/runs/<name>-<fingerprint>`."""
    return home.directory("runs", f"{name}-{run}")


@timed
def train(
    home: Home,
    name: str,
    model: ModelConfig,
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Reference,
    shards: Reference,
    packing: Reference | None,
    parameters: dict[str, str],
    sources: str,
) -> Trained:
    """Train to the planned number of steps, going on from the newest valid checkpoint.

    Args:
        name: the run's name, and its MLflow experiment.
        packing: the plan of `data.packing: best_fit`.
        parameters: shown as the MLflow run's parameters.
        sources: fingerprint of the raw text, kept with the run.

    Raises:
        IncompleteRunError: it ended with another number of steps than planned.
        ForgelineError: what the trainer reported.
    """
    run = run_fingerprint(home, model, config, data, shards.fingerprint)
    run_dir = run_directory(home, name, run)
    export_dir = home.directory("exports", f"{name}-{run}")
    shard_set = ShardSet.open(shards.path)
    sequences = max(0, shard_set.total("train", "tokens") - 1) // data.sequence_length
    tokens_a_sequence = float(data.sequence_length)
    if packing is not None:
        sequences, tokens = sequences_and_tokens(packing.path)
        tokens_a_sequence = tokens / sequences
    if shard_set.conversations:  # only the answers count
        tokens_a_sequence *= shard_set.total("train", "answer_tokens") / shard_set.total("train", "tokens")
    steps = planned_steps(config, tokens_a_sequence, sequences)
    warmup_steps = steps_of_warmup(config.schedule, steps, config.global_batch * tokens_a_sequence)
    with exclusive(
        home.lock("runs", run_dir.name), lambda: logger.info("%s: waiting for another run of it", run_dir)
    ) as lock:
        result = _finished(run_dir, export_dir, home)
        with reachable(home.tracking_uri):
            lacks_events = config.tensorboard and not (run_dir / "tensorboard").exists()
            if result and not lacks_events and is_tracked(run_dir, home.tracking_uri):
                return _reference(run_dir, export_dir, run, steps, result, cached=True)
        with explained(run_dir):
            run_dir.mkdir(exist_ok=True)
        forwarder = Forwarder(
            run_dir,
            home.tracking_uri,
            experiment=name,
            name=f"{name}-{run[:6]}",
            fingerprint=run,
            parameters=parameters,
            tags={
                "forgeline.sources": sources,
                "forgeline.shards": shards.fingerprint,
                "forgeline.run_dir": str(run_dir),
            },
        )
        forwarder.start()
        events = EventFileWriter(run_dir) if config.tensorboard else None
        if events:
            events.start()
        status = "FAILED"
        try:
            cached = result is not None  # then only MLflow or TensorBoard lacks it
            if not result:
                settings = _trainer_input(
                    run_dir,
                    name,
                    run,
                    export_dir,
                    model,
                    config,
                    data,
                    tokenizer,
                    shards,
                    packing,
                    steps,
                    warmup_steps,
                    sources,
                )
                _launch_until_it_fits(settings, lock)
                result = _finished(run_dir, export_dir, home)
            if not result:
                raise IncompleteRunError(f"{run_dir}: training ended without a result. Logs: {run_dir / 'logs'}")
            reference = _reference(run_dir, export_dir, run, steps, result, cached)
            status = "FINISHED"
        except (KeyboardInterrupt, PreemptedError):
            status = "KILLED"
            raise
        finally:
            if events:
                events.stop()
            run_id = forwarder.stop(status)
            if run_id is None:
                logger.warning("MLflow at %s cannot be reached: %s", home.tracking_uri, forwarder.last_error)
        if run_id is None:
            raise TrackingUnreachableError(
                f"{run_dir}: training is finished, and MLflow at {home.tracking_uri} cannot be reached "
                f"({str(forwarder.last_error).splitlines()[0]}). Start it; the same command then goes on from here."
            )
        return reference.model_copy(update={"mlflow_run_id": run_id})


def _finished(run_dir: Path, export_dir: Path, home: Home) -> dict[str, Any] | None:
    """The result of a training whose export is whole; None where there is something left to do."""
    result = read_record(run_dir / "result.json")
    return None if result is None or faults(export_dir, home.hashes()) else result


def _reference(run_dir: Path, export_dir: Path, run: str, steps: int, result: dict[str, Any], cached: bool) -> Trained:
    if result["steps"] != steps:
        raise IncompleteRunError(
            f"{run_dir}: {result['steps']} steps were done and {steps} were planned, so the model is not registered. "
            "Remove the directory to train again."
        )
    return Trained(
        path=run_dir,
        fingerprint=run,
        cached=cached,
        export_dir=export_dir,
        mlflow_run_id=read_tracking(run_dir).get("run_id", ""),
        steps=result["steps"],
        tokens=result["tokens"],
        tokens_per_second=result["tokens_per_second"],
        loss=result["loss"],
    )


def _trainer_input(
    run_dir: Path,
    name: str,
    run: str,
    export_dir: Path,
    model: ModelConfig,
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Reference,
    shards: Reference,
    packing: Reference | None,
    steps: int,
    warmup_steps: int,
    sources: str,
) -> TrainerInput:
    """Write the trainer's one input file. What was resolved on an earlier attempt stays as it was."""
    file = run_dir / "config.yaml"
    share = config.global_batch // config.layout.data
    micro_batch = config.micro_batch or share
    precision: Any = config.precision
    earlier = _earlier(file)
    if earlier:
        precision = earlier.precision
        if earlier.micro_batch < micro_batch and share % earlier.micro_batch == 0:
            micro_batch = earlier.micro_batch
    if precision == "auto":
        precision = _measured_precision(model, config, data.sequence_length, tokenizer.path)
    settings = TrainerInput(
        name=name,
        fingerprint=run,
        run_dir=run_dir,
        export_dir=export_dir,
        shards_dir=shards.path,
        tokenizer_dir=tokenizer.path,
        sequence_length=data.sequence_length,
        weights=data.weights,
        packing_dir=packing.path if packing else None,
        document_mask=data.document_mask,
        steps=steps,
        warmup_steps=warmup_steps,
        precision=precision,
        micro_batch=micro_batch,
        model=model,
        train=config,
        lineage={
            "sources": sources,
            "shards": {"fingerprint": shards.fingerprint, "path": str(shards.path)},
            "tokenizer": {"fingerprint": tokenizer.fingerprint, "path": str(tokenizer.path)},
        },
    )
    write_file(file, settings.text())
    return settings


def _earlier(file: Path) -> TrainerInput | None:
    """The input of an earlier attempt, where there is one that can be read."""
    try:
        return TrainerInput.read(file)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _measured_precision(model: ModelConfig, config: TrainConfig, sequence_length: int, tokenizer_dir: Path) -> str:
    import torch

    from trainer.model import load_tokenizer
    from trainer.precision import pick_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return pick_precision(model, config, load_tokenizer(tokenizer_dir), sequence_length, device)


def _launch_until_it_fits(settings: TrainerInput, lock: int) -> None:
    """Launch; while memory runs out, halve the micro-batch (the global batch and its order stay) and go on."""

    def watch(heartbeat: dict[str, Any] | None) -> None:
        if heartbeat is None:
            return report(Progress("train", 0, settings.steps, "step", "starting"))
        details = f"loss={heartbeat['loss']:.4f}" if heartbeat["loss"] is not None else ""
        if heartbeat["tokens_per_second"]:
            details += f" tokens/s={heartbeat['tokens_per_second']:,.0f}"
        report(Progress("train", heartbeat["step"], settings.steps, "step", details))

    while True:
        try:
            return launch(settings, watch, lock)
        except OutOfMemoryError as error:
            if settings.micro_batch % 2:
                raise ConfigError(
                    f"{error} It cannot be halved further. Lower data.sequence_length, raise train.zero_stage, "
                    "or set train.activation_checkpointing: full."
                ) from None
            settings = settings.model_copy(update={"micro_batch": settings.micro_batch // 2})
            write_file(settings.run_dir / "config.yaml", settings.text())
            logger.warning(
                "memory ran out; going on with micro_batch=%d from the last checkpoint", settings.micro_batch
            )


@task(name="train", task_run_name="train-{name}")
def train_task(
    home: Home,
    name: str,
    model: ModelConfig,
    config: TrainConfig,
    data: DataConfig,
    tokenizer: Reference,
    shards: Reference,
    packing: Reference | None,
    parameters: dict[str, str],
    sources: str,
) -> Trained:
    """Train the model."""
    return shown(train(home, name, model, config, data, tokenizer, shards, packing, parameters, sources))

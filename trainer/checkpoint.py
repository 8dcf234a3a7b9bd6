"""Checkpoints: the only module that writes, verifies, chooses, loads and removes them.

A checkpoint `checkpoints/step-00001200/` is a sealed directory (see `trainer.durable`): the engine's
files, each rank's random state, and in the manifest the step, the data position and the journal's
length. It becomes visible by rename, and there is no pointer to a latest one that could be wrong.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from trainer.config import TrainerInput
from trainer.durable import discard, explained, faults, fsync, hash_file, read_manifest, read_record, seal
from trainer.engine import convert_to_universal, shards_optimizer
from trainer.errors import DataError
from trainer.tracking import read_tracking

ENGINE = "engine"


@dataclass
class Progress:
    """How far a run is: all that training needs besides the engine's own state."""

    step: int = 0
    """Completed steps."""
    position: int = 0
    """Sequences consumed by completed steps."""
    tokens: int = 0
    """Labels trained on in completed steps."""
    seconds: float = 0.0
    """Time spent in completed steps, over all attempts."""
    last_loss: float = 0.0
    """The loss of the last journal record."""


def checkpoint_directories(run_dir: Path) -> list[Path]:
    """The run's checkpoints, newest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"), reverse=True)


def find_newest_valid(run_dir: Path, older_than: Path | None = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every byte is as recorded, and why each newer one was passed over."""
    passed_over: list[str] = []
    for directory in checkpoint_directories(run_dir):
        if older_than and directory.name >= older_than.name:
            continue
        found = faults(directory)
        if not found:
            return directory, passed_over
        passed_over.append(f"{directory.name}: {found[0]}")
    return None, passed_over


def save(engine: Any, settings: TrainerInput, progress: Progress, **content: Any) -> None:
    """Save the completed step: copied at once, written while training goes on. Every rank has to call it.

    It waits for the save before to end, so that one at most is in flight; then retention is applied.

    Args:
        content: what else the checkpoint's manifest holds, as plain data.

    Raises:
        MachineError: the save before could not be written.
    """
    finish_saving(engine)
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    final = settings.run_dir / "checkpoints" / f"step-{progress.step:08d}"
    aside = final.with_name(f".{final.name}.partial")
    with explained(final):
        if rank == 0:
            discard(aside)
            aside.mkdir(parents=True)
        distributed.barrier()
        # beside an adapter the weights are frozen, and are those of `model.pretrained`
        engine.save_checkpoint(str(aside), tag=ENGINE, save_latest=False, exclude_frozen_parameters=True)
    saving = engine.checkpoint_engine
    saving.save(_random_state(), aside / f"random-rank-{rank:05d}.pt")
    manifest = {
        "kind": "checkpoint",
        "run": settings.fingerprint,
        "identity": _identity(settings),
        "progress": dict(vars(progress)),
        "mlflow_run_id": read_tracking(settings.run_dir).get("run_id"),
        "world_size": world_size,
        "expert": settings.train.parallel.expert,
        "micro_batch": settings.micro_batch,
        **content,
    }
    records = [aside / f".rank-{number:05d}.json" for number in range(world_size)]

    def complete() -> None:
        if rank == 0 and (files := _written_by_all(records, saving)) is not None:
            _seal(settings, aside, final, manifest, files)

    saving.start(records[rank], complete)


def _written_by_all(records: list[Path], saving: Any) -> dict[str, Any] | None:
    """The files that all ranks have written, once they have; None where that was given up."""
    files: dict[str, Any] = {}
    for record in records:
        while (written := read_record(record)) is None:
            if saving.abandoned.wait(0.05):
                return None
        files |= written["files"]
    for record in records:
        record.unlink()
    return files


def _seal(
    settings: TrainerInput, aside: Path, final: Path, manifest: dict[str, Any], files: dict[str, dict[str, Any]]
) -> None:
    def hash_of(path: Path) -> str:
        known = files.get(str(path.relative_to(aside)))
        return known["sha256"] if known else hash_file(path)  # DeepSpeed copies some by itself

    with explained(final):
        fsync(settings.run_dir / "metrics.jsonl")  # the journal is at least as long as the manifest says
        seal(aside, final, manifest, hash_of)
        for newer in checkpoint_directories(settings.run_dir):
            if newer.name > final.name:
                discard(newer)  # training went back behind it, and would begin with it again
        _apply_retention(settings)


def finish_saving(engine: Any) -> None:
    """Wait until the save in flight, where there is one, is a checkpoint. Every rank has to call it.

    Raises:
        MachineError: it could not be written, on whichever rank; what was written of it is removed.
    """
    saving = engine.checkpoint_engine
    if not saving.in_flight:
        return
    for done in (saving.written, saving.ended):
        done.wait()
        errors: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(errors, saving.error)
        for error in filter(None, errors):
            saving.abandoned.set()
            if distributed.get_rank() == 0:
                saving.ended.wait()
                shutil.rmtree(saving.directory, ignore_errors=True)  # it may be in the way of saying why
            raise error
    saving.in_flight = False


def _apply_retention(settings: TrainerInput) -> None:
    """Remove what need not be kept, judging by what is on disk; the newest has just been sealed."""
    policy = settings.train.checkpoint
    directories = checkpoint_directories(settings.run_dir)
    best = _best(directories) if policy.keep_best else None
    for directory in directories[policy.keep :]:
        step = int(directory.name.removeprefix("step-"))
        if directory != best and not (policy.keep_every and step % policy.keep_every == 0):
            discard(directory)


def _best(directories: list[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss, of those that were evaluated."""
    losses = {directory: (read_manifest(directory) or {}).get("validation_loss") for directory in directories}
    evaluated = {directory: loss for directory, loss in losses.items() if loss is not None}
    return min(evaluated, key=lambda directory: evaluated[directory], default=None)


@dataclass
class Resume:
    """A checkpoint to go on from, chosen and prepared before the engine starts."""

    directory: Path
    manifest: dict[str, Any]
    universal: Path | None
    """The converted engine state, when the world size has changed."""


def _identity(settings: TrainerInput) -> dict[str, Any]:
    """What makes the run this one and no other, as plain data."""
    return {
        "model": settings.model.identity(),
        "train": settings.train.identity(),
        "data": {
            "sequence_length": settings.sequence_length,
            "weights": settings.weights,
            "document_mask": settings.document_mask,
            "shards": settings.shards_dir.name,
        },
    }


def _differences(there: Any, here: Any, key: str) -> Iterator[str]:
    """Each key under which two nested mappings differ, with both values."""
    if isinstance(there, dict) and isinstance(here, dict):
        for name in sorted(there.keys() | here.keys()):
            yield from _differences(there.get(name), here.get(name), f"{key}.{name}".lstrip("."))
    elif there != here:
        yield f"{key} is {there!r} there and {here!r} here"


def prepare_resume(settings: TrainerInput, older_than: Path | None = None) -> tuple[Resume | None, list[str]]:
    """Choose the newest valid checkpoint on rank 0, convert it if the world size changed, tell every rank.

    Args:
        older_than: the choice is among those before this one.

    Returns:
        The choice (None to start from step 0), and the checkpoints passed over with the reason.

    Raises:
        DataError: the checkpoint belongs to another run, or its state cannot be divided in the way now asked for.
    """
    choice: list[Any] = [None, None, []]
    if distributed.get_rank() == 0:
        for leftover in (settings.run_dir / "checkpoints").glob(".step-*"):
            shutil.rmtree(leftover)
        directory, passed_over = find_newest_valid(settings.run_dir, older_than)
        universal = None
        if directory is not None:
            manifest = read_manifest(directory) or {}
            if manifest["run"] != settings.fingerprint:
                found = "; ".join(_differences(manifest["identity"], _identity(settings), ""))
                raise DataError(
                    f"{directory}: belongs to another run: "
                    f"{found or 'its fingerprint is ' + manifest['run'] + ', not ' + settings.fingerprint}. "
                    "Move it away, or give this run another name."
                )
            if manifest["expert"] != settings.train.parallel.expert:
                raise DataError(
                    f"{directory}: was written with train.parallel.expert={manifest['expert']} and can only go on with "
                    f"that, not with {settings.train.parallel.expert}. Set it back, or give this run another name."
                )
            changed = manifest["world_size"] != distributed.get_world_size()
            if changed and shards_optimizer(settings):
                if settings.train.optimizer != "adamw":
                    raise DataError(
                        f"{directory}: written by {manifest['world_size']} ranks, and DeepSpeed can divide the state "
                        f"of optimizer={settings.train.optimizer} over no other number. Go on with "
                        f"train.ranks={manifest['world_size']}."
                    )
                universal = settings.run_dir / "universal"
                shutil.rmtree(universal, ignore_errors=True)
                convert_to_universal(str(directory / ENGINE), str(universal / ENGINE))
        choice = [directory, universal, passed_over]
    distributed.broadcast_object_list(choice, src=0)
    directory, universal, passed_over = choice
    if directory is None:
        return None, passed_over
    return Resume(directory, read_manifest(directory) or {}, universal), passed_over


def load(engine: Any, resume: Resume) -> Progress:
    """Put the engine and the random generators into the checkpoint's state. Every rank has to call it."""
    complete = all(parameter.requires_grad for parameter in engine.module.parameters())
    engine._config.load_universal_checkpoint = resume.universal is not None  # it may be another than at the start
    loaded, _ = engine.load_checkpoint(
        str(resume.universal or resume.directory), tag=ENGINE, load_module_strict=complete
    )
    if loaded is None:
        raise DataError(f"{resume.directory}: DeepSpeed could not load it.")
    if resume.manifest["world_size"] == distributed.get_world_size():
        name = f"random-rank-{distributed.get_rank():05d}.pt"
        _restore_random_state(engine.checkpoint_engine.load(resume.directory / name))
    if resume.universal is not None:
        distributed.barrier()
        if distributed.get_rank() == 0:
            shutil.rmtree(resume.universal)
    return Progress(**resume.manifest["progress"])


def check_fixed_batch(resume: Resume, loss: float) -> None:
    """Compare the loss of the fixed batch with what it was when the checkpoint was written.

    Raises:
        DataError: they differ by more than rounding can explain, on any rank.
    """
    expected = resume.manifest["fixed_batch_loss"]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, loss)
    for loss in found:
        if not abs(loss - expected) <= 1e-3 * max(1.0, abs(expected)):
            raise DataError(
                f"{resume.directory.name}: a fixed batch had loss {expected:.6f} when it was saved and has {loss:.6f} "
                "after loading: its weights are not those that were saved"
            )


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

"""The training loop: get a batch, forward, backward, step, record."""

import math
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from trainer import checkpoint
from trainer.checkpoint import Progress
from trainer.config import TrainerInput
from trainer.data.loader import Batch, Loader, MicroBatch, Sequences
from trainer.data.shards import ShardSet
from trainer.durable import complete_directory, write_record
from trainer.engine import start_engine, whole_weights
from trainer.errors import DivergedError, PreemptedError
from trainer.heartbeat import Heartbeat
from trainer.journal import Journal
from trainer.model import DTYPES, build_model, check_document_mask, load_tokenizer, loss_of
from trainer.optimizers import set_rate
from trainer.schedule import rate_at


def train(settings: TrainerInput, device: torch.device) -> None:
    """Train one run from its newest checkpoint, or from the start, to its planned end.

    Every rank calls it with the same settings, inside an initialised process group. It leaves the
    export and then `result.json`.

    Raises:
        DivergedError: the loss is not finite.
        PreemptedError: the process was told to end; a checkpoint was written.
    """
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    shards = ShardSet.open(settings.shards_dir)
    shards.check_canary(lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    sequences = Sequences.open(
        shards,
        settings.sequence_length,
        settings.weights,
        settings.train.seed,
        settings.packing_dir,
        settings.document_mask,
    )
    loader = Loader(sequences, settings.train.global_batch, settings.micro_batch, rank, world_size, device)

    resume, passed_over = checkpoint.prepare_resume(settings)
    model = build_model(
        settings.model, tokenizer, settings.sequence_length, DTYPES[settings.precision], settings.train.seed
    )
    if settings.document_mask:
        check_document_mask(model, settings.sequence_length)
    if settings.train.activation_checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    engine = start_engine(model, settings, load_universal=resume is not None and resume.universal is not None)
    if settings.train.compile:
        compile_model(engine.module, device)
    torch.manual_seed(settings.train.seed + 1 + rank)

    run = Run(settings, engine, loader, device)
    for reason in passed_over:
        run.note("checkpoint_passed_over", reason=reason)
    if resume is not None:
        run.progress = checkpoint.load(engine, resume)
        checkpoint.check_fixed_batch(resume, run.fixed_batch_loss())
        run.note("resumed", step=run.progress.step, world_size=world_size)
    run.steps_to_the_end()
    run.finish(tokenizer, model)


class Run:
    """One training run in progress on one rank."""

    def __init__(self, settings: TrainerInput, engine: Any, loader: Loader, device: torch.device) -> None:
        self.settings = settings
        self.engine = engine
        self.loader = loader
        self.device = device
        self.progress = Progress()
        self.leads = distributed.get_rank() == 0
        self.journal = Journal(settings.run_dir / "metrics.jsonl") if self.leads else None
        pids: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(pids, os.getpid())
        self.heartbeat = Heartbeat(settings.run_dir, settings.steps, distributed.get_rank(), pids)
        self.tokens_per_second = 0.0
        self.told_to_stop = False
        signal.signal(signal.SIGTERM, self._stop_soon)

    def _stop_soon(self, *_: Any) -> None:
        self.told_to_stop = True

    def note(self, event: str, **details: Any) -> None:
        """Put an event into the journal and the log."""
        if self.journal:
            self.journal.event(event, **details)
            print(event, *(f"{key}={value}" for key, value in details.items()), flush=True)

    def steps_to_the_end(self) -> None:
        """Run every step that is still to do."""
        settings, progress, loader = self.settings, self.progress, self.loader
        recorded, waited = replace(progress), 0.0
        self.heartbeat.beat(progress.step, force=True)
        lap = time.perf_counter()
        for batch in loader.iterate(progress.position, settings.steps - progress.step):
            rate = rate_at(progress.step, settings.steps, settings.train.schedule)
            loss, stop = self._agree(self._step(batch, rate))
            progress.step += 1
            progress.position += settings.train.global_batch
            progress.tokens += batch.tokens
            progress.loss_sum += loss
            progress.loss_count += 1
            progress.seconds += time.perf_counter() - lap
            lap = time.perf_counter()
            if not math.isfinite(loss):
                raise DivergedError(
                    f"{settings.name}: the loss is {loss} at step {progress.step}; the newest checkpoint is from "
                    "before. Lower train.learning_rate, or check the text near there."
                )
            last = progress.step == settings.steps
            if progress.step % settings.train.log_every == 0 or last:
                seconds = progress.seconds - recorded.seconds
                self.tokens_per_second = (progress.tokens - recorded.tokens) / seconds
                self._record(rate, (loader.seconds_waited - waited) / seconds)
                recorded, waited = replace(progress), loader.seconds_waited
            self.heartbeat.beat(progress.step, loss, self.tokens_per_second)
            if progress.step % settings.train.checkpoint.every == 0 or last or stop:
                self._save()
                lap = time.perf_counter()  # what a checkpoint takes is no time of a step
            if stop and not last:
                raise PreemptedError(f"{settings.name}: told to end at step {progress.step}; a checkpoint was written.")

    def _step(self, batch: Batch, rate: float) -> torch.Tensor:
        """One optimizer step over the rank's micro-batches.

        The loss is the mean over the labels of the whole global batch, of which sequences with padding have
        fewer: each micro-batch gives its sum, scaled so that the engine's means over micro-batches and ranks
        come out at that.

        Returns:
            The rank's part of that mean, times the number of ranks.
        """
        set_rate(self.engine.optimizer, rate)
        total = torch.zeros((), device=self.device)
        parts = len(batch.micro_batches)
        scale = parts * distributed.get_world_size() / batch.tokens
        for part in batch.micro_batches:
            loss = scale * loss_of(self.engine, part.inputs, part.labels, part.positions, reduction="sum")
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach()
        return total / parts

    def _agree(self, loss: torch.Tensor) -> tuple[float, bool]:
        """The mean loss over all ranks, and whether any rank was told to stop."""
        shared = torch.stack(
            [loss.double(), torch.tensor(float(self.told_to_stop), dtype=torch.double, device=self.device)]
        )
        world_size = distributed.get_world_size()
        if world_size > 1:
            distributed.all_reduce(shared)
        loss_sum, stops = shared.tolist()
        return loss_sum / world_size, stops > 0

    def _record(self, rate: float, data_wait_fraction: float) -> None:
        progress, settings = self.progress, self.settings
        norm = self.engine.get_global_grad_norm()
        metrics = {
            "train/loss": progress.loss_sum / progress.loss_count,
            "train/learning_rate": rate * settings.train.learning_rate,
            "train/tokens": progress.tokens,
            "train/tokens_per_second": self.tokens_per_second,
            "train/data_wait_fraction": data_wait_fraction,
        }
        if norm is not None:  # unknown where nothing is clipped
            metrics["train/gradient_norm"] = float(norm)
        progress.last_loss = metrics["train/loss"]
        progress.loss_sum, progress.loss_count = 0.0, 0
        if self.journal:
            self.journal.record(progress.step, metrics)
            text = " ".join(f"{key.removeprefix('train/')}={value:.6g}" for key, value in metrics.items())
            print(f"step={progress.step} {text}", flush=True)

    def fixed_batch_loss(self) -> float:
        """The loss of the order's first sequences in evaluation mode: a witness that weights were restored."""
        count = min(4, self.settings.micro_batch)
        rows = self.loader.sequences.gather(torch.arange(count).numpy())
        positions = self.loader.sequences.positions(rows)
        held = None if positions is None else torch.from_numpy(positions)
        part = MicroBatch(torch.from_numpy(rows), held).to(self.device)
        self.engine.eval()
        with torch.no_grad():
            loss = loss_of(self.engine, part.inputs, part.labels, part.positions).item()
        self.engine.train()
        return loss

    def _save(self) -> None:
        witness = self.fixed_batch_loss()
        journal_bytes = self.journal.sync() if self.journal else 0
        checkpoint.save(self.engine, self.settings, self.progress, journal_bytes, witness)
        self.heartbeat.beat(self.progress.step, tokens_per_second=self.tokens_per_second, force=True)

    def finish(self, tokenizer: Any, model: nn.Module) -> None:
        """Export the model in transformers' format, then write the result."""
        weights = whole_weights(self.engine)
        settings, progress = self.settings, self.progress
        if weights is not None:
            export_model(settings, tokenizer, model, weights)
            write_record(
                settings.run_dir / "result.json",
                {
                    "steps": progress.step,
                    "tokens": progress.tokens,
                    "loss": progress.last_loss,
                    "seconds": progress.seconds,
                    "tokens_per_second": progress.tokens / progress.seconds if progress.seconds else 0.0,
                    "checkpoint": checkpoint.checkpoint_directories(settings.run_dir)[0].name,
                },
            )
        distributed.barrier()


def export_model(settings: TrainerInput, tokenizer: Any, model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write the sealed export directory: weights, configuration and tokenizer, as `from_pretrained` reads them."""
    content = {
        "kind": "export",
        "run": {"name": settings.name, "fingerprint": settings.fingerprint, "run_dir": str(settings.run_dir)},
        "checkpoint": f"step-{settings.steps:08d}",
        "lineage": settings.lineage,
    }
    with complete_directory(settings.export_dir, content) as directory:
        model.config.use_cache = True
        model.save_pretrained(directory, state_dict=weights)
        tokenizer.save_pretrained(directory)
        shutil.copy(settings.run_dir / "config.yaml", directory / "training.yaml")


def compile_model(module: nn.Module, device: torch.device) -> None:
    """Compile the model in place where that is possible; otherwise say why it stays eager."""
    compiler = Path(shutil.which("g++") or shutil.which("clang++") or "")
    if device.type == "cpu" and not compiler.name:
        print("compile=off reason='no C++ compiler (g++ or clang++) on this machine'", flush=True)
        return
    module.compile(dynamic=False)

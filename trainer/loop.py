"""The training loop: get a batch, forward, backward, step, record. Everything else hangs on it as parts."""

import math
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from trainer import checkpoint
from trainer.activations import checkpoint_activations
from trainer.adapters import merge_adapter
from trainer.checkpoint import Progress
from trainer.chunked_head import check_chunked_head, use_chunked_head
from trainer.config import TrainerInput
from trainer.data.loader import Loader, Sequences
from trainer.data.shards import ShardSet
from trainer.durable import complete_directory, write_record
from trainer.engine import shard_parts, start_engine, whole_weights
from trainer.evaluation import Windows
from trainer.flops import flops_per_token
from trainer.heartbeat import Heartbeat
from trainer.journal import Journal
from trainer.model import build_model, check_document_mask, load_pretrained, load_tokenizer, save_model
from trainer.parts import Part
from trainer.parts.checkpoints import Checkpoints, go_on
from trainer.parts.divergence import DivergenceCheck
from trainer.parts.evaluation import PeriodicEvaluation
from trainer.parts.loss_scale import LossScale
from trainer.parts.preemption import Preemption
from trainer.parts.profiler import Profiler
from trainer.parts.recorder import Recorder
from trainer.parts.routing import Routing
from trainer.parts.utilisation import Utilisation
from trainer.parts.z_loss import ZLoss
from trainer.precision import WEIGHTS, use_fp8
from trainer.schedule import rate_at
from trainer.step import TrainingStep
from trainer.ulysses import divide_sequences


def train(settings: TrainerInput, device: torch.device) -> None:
    """Train one run from its newest checkpoint, or from the start, to its planned end.

    Every rank calls it with the same settings, inside an initialised process group. It leaves the
    export and then `result.json`.

    Raises:
        DivergedError: the loss is not finite.
        PreemptedError: the process was told to end; a checkpoint was written.
    """
    rank, layout = distributed.get_rank(), settings.train.layout
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
    data_rank = layout.place(rank).data
    loader = Loader(sequences, settings.train.global_batch, settings.micro_batch, data_rank, layout.data, device)

    resume, passed_over = checkpoint.prepare_resume(settings)
    model = build_model(
        settings.model,
        tokenizer,
        settings.sequence_length,
        WEIGHTS[settings.precision],
        settings.train.seed,
        finish=shard_parts(settings),
    )
    if settings.train.cross_entropy == "chunked":
        use_chunked_head(model)
    routing = Routing.of(model)
    parts = parts_of(settings, shards, flops_per_token(model, settings.sequence_length), routing)
    if settings.precision == "fp8":
        use_fp8(model, device)
    checkpoint_activations(model, settings.train.activation_checkpointing)
    engine = start_engine(model, settings, load_universal=resume is not None and resume.universal is not None)
    if settings.document_mask:
        check_document_mask(model, settings.sequence_length)
    if settings.train.cross_entropy == "chunked":
        check_chunked_head(model)
    if settings.train.compile:
        compile_model(engine.module, device)
    torch.manual_seed(settings.train.seed + 1 + rank // layout.tensor)  # the same dropout where a layer is divided

    share = divide_sequences(engine, layout.sequence, device) if layout.sequence > 1 else None
    step = TrainingStep(engine, device, layout.averaged, settings.train, routing, share)
    run = Run(settings, engine, step, loader, device, parts)
    go_on(run, resume, passed_over)
    try:
        run.steps_to_the_end()
    finally:
        engine.checkpoint_engine.wait_briefly()
    finish(run, tokenizer, model)


def parts_of(settings: TrainerInput, shards: ShardSet, flops_per_token: float, routing: Routing | None) -> list[Part]:
    """What hangs on the loop, in the order in which it hears of a step."""
    train = settings.train
    checkpoints = Checkpoints(train.checkpoint.every)
    parts: list[Part] = [
        DivergenceCheck(),
        Utilisation(flops_per_token),
        Recorder(train.log_every),
        Heartbeat(),
        Preemption(checkpoints),
    ]
    if train.z_loss:
        parts.append(ZLoss())
    if routing:
        parts.append(routing)
    if settings.precision == "fp16":
        parts.append(LossScale())
    if train.evaluation.every:
        most = train.evaluation.batches * train.global_batch
        windows = Windows.of(shards, settings.sequence_length, settings.document_mask, most)
        parts.append(PeriodicEvaluation(train.evaluation.every, windows))
    parts.append(checkpoints)
    if train.profile:
        parts.append(Profiler(train.profile))
    return parts


@dataclass
class Run:
    """One training run in progress on one rank."""

    settings: TrainerInput
    """What was asked for."""
    engine: Any
    """DeepSpeed's engine over the model."""
    step: TrainingStep
    """What trains on a batch."""
    loader: Loader
    """Where the batches come from."""
    device: torch.device
    """Where the model is."""
    parts: list[Part]
    """What hangs on the loop."""
    progress: Progress = field(default_factory=Progress)
    """How far the run is."""
    rate: float = 0.0
    """Learning rate of the present step, as a share of its peak."""
    loss: float = math.nan
    """Loss of the last completed step, over all ranks; no number before there is one."""
    validation_loss: float | None = None
    """Loss of the present weights on the validation split; None where it was not measured."""
    tokens_per_second: float = 0.0
    """Over the steps of the last record."""

    def __post_init__(self) -> None:
        self.leads = distributed.get_rank() == 0
        self.journal = Journal(self.settings.run_dir / "metrics.jsonl") if self.leads else None
        self._lap = time.perf_counter()

    @property
    def is_last_step(self) -> bool:
        """Whether the last planned step is done."""
        return self.progress.step == self.settings.steps

    def steps_to_the_end(self) -> None:
        """Run every step that is still to do."""
        settings, progress = self.settings, self.progress
        for part in self.parts:
            part.at_start(self)
        self._lap = time.perf_counter()
        for batch in self.loader.iterate(progress.position, settings.steps - progress.step):
            self.rate = rate_at(progress.step, settings.steps, settings.warmup_steps, settings.train.schedule)
            for part in self.parts:
                part.before_step(self)
            self.loss = self._agree(self.step.run(batch, self.rate))
            self._count(batch.tokens)
            for part in self.parts:
                part.after_step(self)
        for part in self.parts:
            part.at_end(self)

    def _agree(self, loss: torch.Tensor) -> float:
        """Let every rank hear what each has to say; returns the mean loss over them."""
        said = [part.says() for part in self.parts]
        world_size = distributed.get_world_size()
        if world_size == 1:
            mean = loss.item()
        else:
            shared = torch.tensor([0.0, *said], dtype=torch.double, device=self.device)
            shared[0] = loss
            distributed.all_reduce(shared)
            mean, *said = (shared / world_size).tolist()
        for part, heard in zip(self.parts, said, strict=True):
            part.heard = heard
        return mean

    def _count(self, tokens: int) -> None:
        now = time.perf_counter()
        self.progress.step += 1
        self.progress.position += self.settings.train.global_batch
        self.progress.tokens += tokens
        self.progress.seconds += now - self._lap
        self._lap = now

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """What happens inside is no time of a step."""
        began = time.perf_counter()
        yield
        self._lap += time.perf_counter() - began

    def record(self, metrics: dict[str, float]) -> None:
        """Put metrics of the completed step into the journal and the log."""
        if self.journal:
            self.journal.record(self.progress.step, metrics)
            text = " ".join(f"{key.removeprefix('train/')}={value:.6g}" for key, value in metrics.items())
            print(f"step={self.progress.step} {text}", flush=True)

    def note(self, event: str, **details: Any) -> None:
        """Put an event into the journal and the log."""
        if self.journal:
            self.journal.event(event, **details)
            print(event, *(f"{key}={value}" for key, value in details.items()), flush=True)


def finish(run: Run, tokenizer: Any, model: nn.Module) -> None:
    """Export the model in transformers' format, then write the result. Every rank has to call it."""
    weights = whole_weights(run.engine)
    settings, progress = run.settings, run.progress
    if distributed.get_rank() == 0:
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
    else:
        deque(weights, maxlen=0)
    distributed.barrier()


def export_model(
    settings: TrainerInput, tokenizer: Any, model: Any, weights: Iterable[dict[str, torch.Tensor]]
) -> None:
    """Write the sealed export directory: weights, configuration and tokenizer, as `from_pretrained` reads them."""
    content = {
        "kind": "export",
        "run": {"name": settings.name, "fingerprint": settings.fingerprint, "run_dir": str(settings.run_dir)},
        "checkpoint": f"step-{settings.steps:08d}",
        "lineage": settings.lineage,
    }
    with complete_directory(settings.export_dir, content) as directory:
        model.config.use_cache = True
        if settings.model.adapter:
            base = load_pretrained(settings.model, WEIGHTS[settings.precision])
            merge_adapter(base, settings.model.adapter, weights, directory / "adapter").save_pretrained(directory)
        else:
            save_model(model, weights, directory)
        tokenizer.save_pretrained(directory)
        shutil.copy(settings.run_dir / "config.yaml", directory / "training.yaml")


def compile_model(module: nn.Module, device: torch.device) -> None:
    """Compile the model in place where that is possible; otherwise say why it stays eager."""
    compiler = Path(shutil.which("g++") or shutil.which("clang++") or "")
    if device.type == "cpu" and not compiler.name:
        print("compile=off reason='no C++ compiler (g++ or clang++) on this machine'", flush=True)
        return
    module.compile(dynamic=False)

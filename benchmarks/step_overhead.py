"""What a step of the trainer costs beside the same model in barer loops and in others' trainers.

Ours is the real thing: the launcher, its rank, the journal, the heartbeat, every check, and the forwarder that
carries the journal to an MLflow store. Between its turns the rank is stopped (SIGSTOP); its times are those of the
journal. The others are processes that stay up and take a turn when asked. In every round everyone has one turn.

    python benchmarks/step_overhead.py [--only large|tiny] [--json]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from claims import Claim, finish, note

ROUNDS = 7
WARM = 2
"""Steps of a turn that fill the caches again, and are not timed."""
BATCHES = 64
"""Batches that the others hold in memory."""


def main() -> int:
    """Measure; the exit code is 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("large", "tiny"), help="one model alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", nargs=3, metavar=("ROLE", "CONFIG", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        role, config, steps = options.worker
        return WORKERS[role](Path(config), int(steps))

    claims: list[Claim] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="forgeline-steps-") as name:
        for size, measure in (("large", large), ("tiny", tiny)):
            if options.only in (None, size):
                found, about = measure(Path(name) / size)
                claims += found
                details[size] = about
    return finish(claims, ("torch", "deepspeed", "transformers", "accelerate", "mlflow"), options.json, **details)


def large(directory: Path) -> tuple[list[Claim], dict[str, Any]]:
    """A Llama of 10 M parameters, beside everyone."""
    sizes = {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "num_attention_heads": 5}
    model = {"type": "llama", "config": {**sizes, "num_key_value_heads": 5, "tie_word_embeddings": True}}
    train = {"global_batch": 4, "log_every": 5, "precision": "fp32", "schedule": {"type": "constant", "warmup": 0.0}}
    config = prepare(directory, "ours", "byte", 128, model, train)
    roles = ("bare_engine", "plain_torch", "transformers_trainer", "accelerate")
    contestants: dict[str, Callable[[], Any]] = {"ours": partial(Ours, config, 5)}
    contestants |= {role: partial(Other, role, config, 5) for role in roles}
    times, memory = in_turns(contestants)
    claims = [
        Claim(
            "vs_bare_engine", ratio(times, "ours", "bare_engine"), 1.02, "the same engine in the barest loop", "ratio"
        ),
        Claim("vs_plain_torch", ratio(times, "ours", "plain_torch"), 1.05, "a plain torch loop", "ratio"),
        Claim("vs_transformers_trainer", ratio(times, "ours", "transformers_trainer"), 1.0, "its Trainer", "ratio"),
        Claim(
            "vs_accelerate", ratio(times, "ours", "accelerate"), 1.0, "Accelerate with its DeepSpeed plugin", "ratio"
        ),
        Claim("peak_memory_vs_bare", memory["ours"] / memory["bare_engine"], 1.05, "resident bytes a rank", "ratio"),
    ]
    return claims, about(times, memory)


def tiny(directory: Path) -> tuple[list[Claim], dict[str, Any]]:
    """The model and optimizer of configs/nanogpt-shakespeare.yaml, beside a plain torch loop, eager and compiled."""
    from flows.config import load_config

    preset = load_config("nanogpt-shakespeare")
    model, length = preset.model.model_dump(), preset.data.sequence_length
    forms = {"eager": False, "compiled": True} if shutil.which("g++") or shutil.which("clang++") else {"eager": False}
    contestants: dict[str, Callable[[], Any]] = {}
    for form, compiled in forms.items():
        train = {**preset.train.model_dump(exclude={"steps"}), "compile": compiled}
        config = prepare(directory, form, "char", length, model, train)
        contestants[f"ours, {form}"] = partial(Ours, config, 40)
        contestants[f"plain torch, {form}"] = partial(Other, "plain_torch", config, 40)
    times, memory = in_turns(contestants)
    ratios = {form: ratio(times, f"ours, {form}", f"plain torch, {form}") for form in forms}
    claim = Claim("tiny_step_vs_plain", max(ratios.values()), 1.15, f"the worst of {', '.join(ratios)}", "ratio")
    return [claim], {"ratios": ratios, **about(times, memory)}


def in_turns(contestants: dict[str, Callable[[], Any]]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds a step of everyone in every round, and everyone's peak of resident memory in MB."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    with ExitStack() as running:
        started = {}
        for name, start in contestants.items():
            started[name] = start()
            running.callback(started[name].end)
        for number in range(ROUNDS):
            for name, contestant in started.items():
                times[name].append(1000 * contestant.turn())
            note(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.1f} ms" for name, values in times.items()))
        memory = {name: contestant.peak_memory() / 2**20 for name, contestant in started.items()}
    return times, memory


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    """The median over the rounds of one's time over the other's."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def about(times: dict[str, list[float]], memory: dict[str, float]) -> dict[str, Any]:
    """The figures behind the claims."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"milliseconds_a_step": medians, "peak_memory_mb": memory, "all_milliseconds": times}


# --- ours --------------------------------------------------------------------------------------------


def prepare(
    directory: Path, name: str, tokenizer: Any, length: int, model: dict[str, Any], train: dict[str, Any]
) -> Path:
    """Tokenize some of Python's library and write the trainer's input file."""
    from tasks.home import Home
    from tasks.sources import SourceConfig, resolve
    from tasks.tokenize import DataConfig, tokenize
    from tasks.tokenizer import TokenizerConfig, build_tokenizer
    from trainer.config import ModelConfig, TrainConfig, TrainerInput
    from trainer.durable import write_file

    home = Home(directory)
    home.path.mkdir(parents=True, exist_ok=True)
    source = SourceConfig(path=f"{sysconfig.get_path('stdlib')}/asyncio/*.py")
    data = DataConfig(sources=[source], tokenizer=TokenizerConfig(type=tokenizer), validation_fraction=0.1)
    files = resolve(home, data.sources, "data.sources")
    tokens = build_tokenizer(home, data.tokenizer, data.reading, files)
    shards = tokenize(home, data, files, [], tokens)
    config = TrainConfig.model_validate({**train, "steps": 10**6, "checkpoint": {"every": 10**6}})
    run_dir = home.directory("runs", name)
    run_dir.mkdir(parents=True)
    settings = TrainerInput(
        name=name,
        fingerprint="0" * 16,
        run_dir=run_dir,
        export_dir=home.directory("exports", name),
        shards_dir=shards.path,
        tokenizer_dir=tokens.path,
        sequence_length=length,
        weights=None,
        steps=10**6,
        precision="fp32",
        micro_batch=config.global_batch,
        model=ModelConfig.model_validate(model),
        train=config,
        lineage={},
    )
    write_file(run_dir / "config.yaml", settings.text())
    return run_dir / "config.yaml"


class Ours:
    """A run of the trainer under its launcher, with its journal forwarded to MLflow."""

    def __init__(self, config: Path, steps: int) -> None:
        from trainer.config import TrainerInput
        from trainer.tracking import Forwarder

        note(f"starting ours: {config}")
        self._settings = TrainerInput.read(config)
        run_dir = self._settings.run_dir
        self._journal = run_dir / "metrics.jsonl"
        self._intervals = steps // self._settings.train.log_every
        uri = f"sqlite:///{run_dir.parent.parent / 'mlflow.db'}"
        self._forwarder = Forwarder(run_dir, uri, "steps", config.parent.name, "0" * 16, {}, {})
        self._forwarder.start()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._launch, daemon=True)
        self._thread.start()
        self._wait_for(1)
        (self._pid,) = json.loads((run_dir / "heartbeat.json").read_text())["pids"]
        os.kill(self._pid, signal.SIGSTOP)

    def _launch(self) -> None:
        from trainer.errors import PreemptedError
        from trainer.launcher import launch

        try:
            launch(self._settings, lambda heartbeat: None)
        except PreemptedError:
            pass  # as it was asked to
        except BaseException as error:
            self._failure = error

    def _wait_for(self, count: int) -> list[float]:
        """The times of all records of steps, once there are so many."""
        from trainer.journal import read_records

        while True:
            times = [record["time"] for record, _ in read_records(self._journal) if "train/loss" in record]
            if len(times) >= count:
                return times
            if self._failure:
                raise self._failure
            time.sleep(0.02)

    def turn(self) -> float:
        """Seconds a step, from the first record that lies wholly in this turn."""
        first = len(self._wait_for(1))
        os.kill(self._pid, signal.SIGCONT)
        times = self._wait_for(first + 1 + self._intervals)
        os.kill(self._pid, signal.SIGSTOP)
        return (times[first + self._intervals] - times[first]) / (self._intervals * self._settings.train.log_every)

    def peak_memory(self) -> int:
        """Most bytes that were ever resident."""
        return peak_memory(self._pid)

    def end(self) -> None:
        """Preempt the run."""
        os.kill(self._pid, signal.SIGTERM)
        os.kill(self._pid, signal.SIGCONT)
        self._thread.join()
        self._forwarder.stop("KILLED")


def peak_memory(pid: int | str) -> int:
    """Most bytes of a process that were ever resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


# --- the others --------------------------------------------------------------------------------------


class Other:
    """A worker process with another loop."""

    def __init__(self, role: str, config: Path, steps: int) -> None:
        note(f"starting {role}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "TOKENIZERS_PARALLELISM": "false"}
        if role in ("bare_engine", "accelerate"):
            environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--worker", role, str(config), str(steps)]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next JSON line; what libraries print in between is passed over."""
        for line in self._process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise RuntimeError(f"{' '.join(self._process.args)} ended with exit code {self._process.wait()}")

    def turn(self) -> float:
        """Seconds a step."""
        print("go", file=self._process.stdin, flush=True)
        return self._answer()["seconds"]

    def peak_memory(self) -> int:
        """Most bytes that were ever resident."""
        return peak_memory(self._process.pid)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def turns(steps: int) -> Iterator[None]:
    """A step after the other, a turn of them whenever asked to."""
    for _ in range(3):
        yield
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        for _ in range(WARM):
            yield
        began = time.perf_counter()
        for _ in range(steps):
            yield
        print(json.dumps({"seconds": (time.perf_counter() - began) / steps}), flush=True)


def material(config: Path) -> tuple[Any, Any, Any, Any]:
    """The settings, the model and its optimizer as ours has them, and batches: int64, [batch, length + 1] each."""
    import numpy as np
    import torch

    from trainer.config import TrainerInput
    from trainer.data.loader import Sequences
    from trainer.data.shards import ShardSet
    from trainer.model import build_model, load_tokenizer
    from trainer.optimizers import build_optimizer

    settings = TrainerInput.read(config)
    train = settings.train
    sequences = Sequences.open(ShardSet.open(settings.shards_dir), settings.sequence_length, None, train.seed)
    rows = torch.from_numpy(sequences.gather(np.arange(BATCHES * train.global_batch)))
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    model = build_model(settings.model, tokenizer, settings.sequence_length, torch.float32, train.seed)
    return settings, model, build_optimizer(model, train), rows.split(train.global_batch)


def bare_engine(config: Path, steps: int) -> int:
    """The same engine in the barest loop."""
    import torch

    from trainer.engine import start_engine, start_process_group
    from trainer.model import loss_of

    start_process_group(torch.device("cpu"))
    settings, model, _, batches = material(config)
    engine = start_engine(model, settings, load_universal=False)
    for number, _ in enumerate(turns(steps)):
        rows = batches[number % BATCHES]
        engine.backward(loss_of(engine, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
        engine.step()
    return 0


def plain_torch(config: Path, steps: int) -> int:
    """torch alone."""
    import torch

    from trainer.model import loss_of

    settings, model, optimizer, batches = material(config)
    if settings.train.compile:
        model.compile(dynamic=False)
    for number, _ in enumerate(turns(steps)):
        rows = batches[number % BATCHES]
        loss_of(model, rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        if settings.train.gradient_clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.train.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
    return 0


def transformers_trainer(config: Path, steps: int) -> int:
    """transformers' Trainer, which shifts the labels by itself."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings, model, optimizer, batches = material(config)
    rows = torch.cat(batches)[:, :-1]
    turn = turns(steps)

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            next(turn)

    arguments = TrainingArguments(
        output_dir=str(config.parent / "transformers"),
        per_device_train_batch_size=settings.train.global_batch,
        max_steps=settings.steps,
        max_grad_norm=settings.train.gradient_clipping,
        logging_steps=settings.train.log_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        callbacks=[Turns()],
    ).train()
    return 0


def accelerate(config: Path, steps: int) -> int:
    """Accelerate with its DeepSpeed plugin."""
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # as in ours
    settings, model, optimizer, batches = material(config)
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": settings.train.global_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": settings.train.gradient_clipping,
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    )
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, deepspeed.DeepSpeedEngine)
    for number, _ in enumerate(turns(steps)):
        rows = batches[number % BATCHES][:, :-1]
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        optimizer.zero_grad()
    return 0


WORKERS: dict[str, Callable[[Path, int], int]] = {
    "bare_engine": bare_engine,
    "plain_torch": plain_torch,
    "transformers_trainer": transformers_trainer,
    "accelerate": accelerate,
}

if __name__ == "__main__":
    sys.exit(main())

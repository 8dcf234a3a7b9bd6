"""One accelerator in under five minutes: is every path right that only a GPU takes, and how fast is training there?

    python benchmarks/gpu.py [--json] [--without-deepspeed] [--cpu-rehearsal]

It needs torch, transformers, pydantic, pyyaml and pyarrow. Where DeepSpeed is missing, the same steps run on torch's
own optimizer, and what is DeepSpeed's alone (fp16, resume) is left out and named. Exit codes: 0 every claim holds,
1 one does not, 3 there is no accelerator. `--cpu-rehearsal` takes every path at toy size on a CPU; what it says of
speed means nothing.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nothing has to be installed from this repository

import torch
from claims import Claim, finish, note
from loader import write_shards

from trainer.chunked_head import use_chunked_head
from trainer.config import ModelConfig, TrainConfig, TrainerInput
from trainer.data.loader import Batch, Loader, MicroBatch, Sequences
from trainer.data.shards import ShardSet
from trainer.durable import read_manifest, write_file
from trainer.flops import flops_per_token, peak_flops
from trainer.loop import compile_model
from trainer.model import attention_kernel, build_model
from trainer.optimizers import build_optimizer
from trainer.precision import WEIGHTS
from trainer.step import TrainingStep

NO_ACCELERATOR = 3
SECONDS = 300
"""When this much has passed, no further variant of a model is tried."""
STEPS = 8
VOCABULARY = 512
TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "124m": {
        "config": {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "tie_word_embeddings": True,
            "vocab_size": 50304,
        },
        "sequence_length": 1024,
        "micro_batch": 64,
    },
    "1b": {
        "config": {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        "sequence_length": 2048,
        "micro_batch": 16,
    },
}
HAS_DEEPSPEED = find_spec("deepspeed") is not None and "--without-deepspeed" not in sys.argv
CAN_COMPILE = bool(shutil.which("g++") or shutil.which("clang++"))


def main() -> int:
    """Check, then measure; see the exit codes above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--without-deepspeed", action="store_true", help="as if it were not installed")
    parser.add_argument("--cpu-rehearsal", action="store_true", help="every path at toy size, without an accelerator")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.cpu_rehearsal:
        print("No accelerator: torch sees no CUDA device here. --cpu-rehearsal takes the same paths on the CPU.")
        return NO_ACCELERATOR
    device = torch.device("cpu" if options.cpu_rehearsal else "cuda")
    began = time.perf_counter()
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), device)
        claims = [*bench.correctness(left_out)]
        speeds, fastest = {}, "full"
        for name, shape in MODELS.items():
            if device.type == "cpu":
                shape = {"config": {**TINY, "vocab_size": VOCABULARY}, "sequence_length": 64, "micro_batch": 2}
            found = {}
            for cross_entropy in [fastest, *({"full", "chunked"} - {fastest})]:
                if not found or device.type == "cpu" or time.perf_counter() - began < SECONDS * 0.6:
                    found[cross_entropy] = bench.speed(name, cross_entropy, **shape)
            fastest = max(found, key=lambda variant: found[variant]["mfu"])
            speeds[name] = {"cross_entropy": fastest, **found[fastest], "tried": found}
            if device.type == "cuda":
                against = "half of " + bench.peak["source"]
                claims.append(Claim(f"mfu_{name}", found[fastest]["mfu"], 0.5, against, "share", at_most=False))
    return finish(
        claims,
        tuple(
            name for name in ("torch", "transformers", "deepspeed", "flash-attn") if find_spec(name.replace("-", "_"))
        ),
        options.json,
        device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu, a rehearsal",
        peak=bench.peak,
        engine="deepspeed" if HAS_DEEPSPEED else "plain torch",
        speed=speeds,
        left_out=left_out,
        seconds=round(time.perf_counter() - began, 1),
    )


class PlainEngine:
    """What a step needs of DeepSpeed's engine, by torch alone: fp32 weights under autocast."""

    def __init__(self, module: Any, train: TrainConfig, precision: str, device: torch.device) -> None:
        self.module, self.optimizer = module.to(device), build_optimizer(module, train)
        self._clipping, self._autocast = train.gradient_clipping, precision == "bf16"

    def __call__(self, **inputs: Any) -> Any:
        with torch.autocast(self.module.device.type, torch.bfloat16, enabled=self._autocast):
            return self.module(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients."""
        loss.backward()

    def step(self) -> None:
        """Update the weights."""
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Bench:
    """What the measurements share: a small shard set, a tokenizer, and the process group of one rank."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        import numpy as np
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        self.directory, self.device = directory, device
        words = Tokenizer(models.WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        self.tokenizer.save_pretrained(directory / "tokenizer")
        # every token is the last one plus a little, so that there is something to learn
        steps = np.random.default_rng(0).integers(1, 4, 400_000)
        tokens = (np.cumsum(steps) % VOCABULARY).astype(np.uint16)
        canary = {"text": "7", "ids": [7]}
        write_shards(
            directory / "shards", [tokens], VOCABULARY, canary=canary, tokenizer={"end_id": None, "fingerprint": ""}
        )
        self.peak = peak_flops(device, torch.bfloat16, directory)
        start_rank(device)

    def inputs(self, name: str, precision: str, sequence_length: int = 64, **train: Any) -> TrainerInput:
        """The trainer's input for a run of the tiny model on one rank."""
        settings = {"global_batch": 8, "log_every": 1, "learning_rate": 3e-3, "compile": False, **train}
        model = settings.pop("model", TINY)
        attention = settings.pop("attention", "auto")
        config = TrainConfig(steps=STEPS, precision=precision, zero_stage=int(precision != "fp32"), **settings)
        run_dir = self.directory / name
        run_dir.mkdir(exist_ok=True)
        return TrainerInput(
            name=name,
            fingerprint="0123456789abcdef",
            run_dir=run_dir,
            export_dir=self.directory / f"{name}-export",
            shards_dir=self.directory / "shards",
            tokenizer_dir=self.directory / "tokenizer",
            sequence_length=sequence_length,
            weights=None,
            steps=STEPS,
            precision=precision,
            micro_batch=config.micro_batch or config.global_batch,
            model=ModelConfig(type="llama", config=model, attention=attention),
            train=config,
            lineage={},
        )

    def step_of(self, settings: TrainerInput) -> tuple[TrainingStep, float]:
        """What trains a fresh model on a batch, and the model's operations a token."""
        train, device = settings.train, self.device
        dtype = WEIGHTS[settings.precision] if HAS_DEEPSPEED else torch.float32
        model = build_model(settings.model, self.tokenizer, settings.sequence_length, dtype, train.seed)
        if train.cross_entropy == "chunked":
            use_chunked_head(model)
        flops = flops_per_token(model, settings.sequence_length)
        if HAS_DEEPSPEED:
            from trainer.engine import start_engine

            engine = start_engine(model, settings, load_universal=False)
        else:
            engine = PlainEngine(model, train, settings.precision, device)
        if train.compile:
            compile_model(engine.module, device)
        return TrainingStep(engine, device, 1, train), flops

    def losses(self, name: str, precision: str, **options: Any) -> list[float]:
        """The losses of a few steps from the same weights on the same batches, in this process."""
        note(name)
        settings = self.inputs(name, precision, **options)
        step, _ = self.step_of(settings)
        batches = self.loader(self.device).iterate(0, STEPS)
        return [step.run(batch, 1.0).item() for batch in batches]

    def loader(self, device: torch.device) -> Loader:
        """Batches of eight sequences of 64 tokens."""
        sequences = Sequences.open(ShardSet.open(self.directory / "shards"), 64, None, seed=1)
        return Loader(sequences, 8, 8, 0, 1, device)

    def correctness(self, left_out: dict[str, str]) -> list[Claim]:
        """A claim for each path that differs on a GPU."""

        def claim(name: str, difference: float, bound: float, against: str) -> Claim:
            return Claim(name, difference, bound, against, "nats" if against.endswith("losses") else "difference")

        from torch import distributed

        claims = []
        pairs = zip(
            self.loader(self.device).iterate(0, 50), self.loader(torch.device("cpu")).iterate(0, 50), strict=True
        )
        wrong = sum(
            int((here.micro_batches[0].rows.cpu() != there.micro_batches[0].rows).sum()) for here, there in pairs
        )
        claims.append(claim("copies_to_device", wrong, 0, "the loader's batches in the host's memory"))
        summed = torch.arange(1000.0, device=self.device)
        distributed.all_reduce(summed)
        wrong = (summed.cpu() - torch.arange(1000.0)).abs().max().item()
        claims.append(claim("all_reduce_of_one_rank", wrong, 0, distributed.get_backend()))

        fp32 = self.losses("fp32", "fp32")
        claims.append(Claim("learns", fp32[-1] / fp32[0], 0.9, "the first loss", "ratio"))
        bf16 = self.losses("bf16", "bf16")
        claims.append(claim("bf16", apart(bf16, fp32), 0.1, "fp32's losses"))
        variants: dict[str, dict[str, Any]] = {
            "eager_attention": {"attention": "eager"},
            "chunked_cross_entropy": {"cross_entropy": "chunked"},
        }
        if CAN_COMPILE:
            variants["compile_chunked"] = {"compile": True, "cross_entropy": "chunked"}
        else:
            left_out["compile"] = "no C++ compiler"
        for name, options in variants.items():
            claims.append(claim(name, apart(self.losses(name, "fp32", **options), fp32), 5e-3, "fp32's losses"))
        try:
            kernel = attention_kernel("flash")
            claims.append(
                claim(kernel, apart(self.losses("flash", "bf16", attention="flash"), bf16), 0.1, "bf16's losses")
            )
        except Exception as error:
            left_out["flash_attention"] = str(error)
        if not HAS_DEEPSPEED:
            left_out["fp16"] = left_out["resume"] = "no DeepSpeed"
            return claims
        if self.device.type == "cuda":
            fp16 = self.losses("fp16", "fp16")  # steps whose scaled gradients overflow are skipped
            claims.append(Claim("fp16_learns", fp16[-1] / fp16[0], 0.98, "the first loss", "ratio"))
        else:
            left_out["fp16"] = "needs an accelerator"
        claims.append(claim("resume", self.resumed(), 2e-3, "an undisturbed run's losses"))
        return claims

    def resumed(self) -> float:
        """How far a real run with dropout is from itself after a resume: its random state has to come back."""
        from trainer.launcher import launch

        note("resume")
        model = {**TINY, "attention_dropout": 0.3}
        precision = "fp16" if self.device.type == "cuda" else "bf16"
        settings = self.inputs("resume", precision, model=model, checkpoint={"every": STEPS // 2, "keep": 2})
        write_file(settings.run_dir / "config.yaml", settings.text())
        launch(settings, lambda heartbeat: None)
        whole = journalled(settings)
        kept, last = sorted((settings.run_dir / "checkpoints").glob("step-*"))
        length = (read_manifest(kept) or {})["journal_bytes"]
        with open(settings.run_dir / "metrics.jsonl", "r+b") as journal:
            journal.truncate(length)
        shutil.rmtree(last)
        shutil.rmtree(settings.export_dir)
        (settings.run_dir / "result.json").unlink()
        launch(settings, lambda heartbeat: None)
        return apart(journalled(settings), whole)

    def speed(
        self, name: str, cross_entropy: str, config: Any, sequence_length: int, micro_batch: int
    ) -> dict[str, Any]:
        """Tokens a second and MFU of bf16 training, compiled, with a micro-batch that fits."""
        while True:
            with suppress(torch.OutOfMemoryError):
                return self._speed(name, cross_entropy, config, sequence_length, micro_batch)
            note(f"{name}: a micro-batch of {micro_batch} does not fit")
            micro_batch //= 2
            gc.collect()
            torch.cuda.empty_cache()

    def _speed(
        self, name: str, cross_entropy: str, config: Any, sequence_length: int, micro_batch: int
    ) -> dict[str, Any]:
        settings = self.inputs(
            f"{name}-{cross_entropy}", "bf16", sequence_length, model=config, global_batch=micro_batch,
            compile=CAN_COMPILE and self.device.type == "cuda", cross_entropy=cross_entropy,
        )  # fmt: skip
        step, flops = self.step_of(settings)
        rows = torch.randint(config["vocab_size"], (micro_batch, sequence_length + 1), device=self.device)
        tokens = micro_batch * sequence_length
        batch = Batch([MicroBatch(rows)], tokens)
        began = time.perf_counter()
        for _ in range(3):
            step.run(batch, 1.0).item()
        warm_up = time.perf_counter() - began
        times: list[float] = []
        while len(times) < 3 or (sum(times) < 8 and len(times) < 50 and self.device.type == "cuda"):
            began = time.perf_counter()
            step.run(batch, 1.0).item()
            times.append(time.perf_counter() - began)
        rate = tokens / statistics.median(times)
        mfu = flops * rate / self.peak["flops"]
        note(f"{name}, {cross_entropy} cross-entropy: {rate:,.0f} tokens/s, MFU {mfu:.3f}, {warm_up:.0f} s before")
        result = {"tokens_per_second": rate, "mfu": mfu, "micro_batch": micro_batch, "warm_up_seconds": warm_up}
        if self.device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            del step
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return result


def start_rank(device: torch.device) -> None:
    """Make this process the only rank of a group."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if HAS_DEEPSPEED:
        from trainer.engine import start_process_group

        start_process_group(device)
    else:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


def apart(one: list[float], other: list[float]) -> float:
    """The largest distance between two runs' losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def journalled(settings: TrainerInput) -> list[float]:
    """The losses in a run's journal."""
    lines = (settings.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record["train/loss"] for record in map(json.loads, lines) if "train/loss" in record]


if __name__ == "__main__":
    sys.exit(main())

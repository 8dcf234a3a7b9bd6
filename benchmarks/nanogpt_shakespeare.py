"""Character-level Shakespeare: the loss that nanoGPT's budget buys, and what a step costs beside a plain torch loop.

nanoGPT's README gives a validation loss of 1.88 for 2,000 steps of 12 x 64 characters on a CPU
(4 layers, 4 heads, width 128, 0.80 M parameters). The preset trains on as many tokens with at most
0.81 M parameters; its export is scored here from outside, with transformers alone, over the whole
validation text in windows of 64.

    python benchmarks/nanogpt_shakespeare.py --text FILE [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from claims import Claim, finish, note

PRESET = "nanogpt-shakespeare"
WINDOW = 64
FIRST_STEPS = 20
"""Steps that pay for what is set up once, and are not timed."""


def main() -> int:
    """Measure loss and time; the exit code is 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="tinyshakespeare's input.txt")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of timed runs, ours and the plain loop in turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(plain_loop(options.plain)))
        return 0

    with tempfile.TemporaryDirectory() as home:
        os.environ["FORGELINE_HOME"] = home
        losses, parameters, tokens = [], 0, 0.0
        for seed in range(1, options.seeds + 1):
            result = train(options.text, {"train.seed": seed})
            parameters, loss = score_from_outside(Path(result["export_dir"]), options.text)
            tokens = result["metrics"]["train/tokens"]
            losses.append(loss)
            note(f"seed {seed}: {loss:.4f} from outside, {result['metrics']['eval/loss']:.4f} in the pipeline")
        ours, plain = [], []
        for pair in range(options.pairs):
            steps = 150 + pair  # another fingerprint each time, so that none is found finished
            result = train(options.text, {"train.steps": steps})
            ours.append(1000 * seconds_a_step(result))
            plain.append(1000 * plain_seconds(Path(result["run_dir"]) / "config.yaml"))
            note(f"pair {pair + 1}: {ours[-1]:.1f} ms a step, {plain[-1]:.1f} ms in the plain loop")
        batch_tokens = result["metrics"]["train/tokens"] / steps

    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    claims = [
        Claim("validation_loss_mean", statistics.mean(losses), 1.62, "nanoGPT's README: 1.88", "nats a character"),
        Claim("parameters", parameters, 810_000, "nanoGPT: 0.80 M", "parameters"),
        Claim("training_tokens", tokens, 2000 * 12 * 64, "nanoGPT's 2,000 steps of 12 x 64", "tokens"),
        Claim("tiny_step_vs_plain", ratio, 1.15, "the same model and optimizer in a plain torch loop", "ratio"),
    ]
    return finish(
        claims,
        ("torch", "transformers", "deepspeed"),
        options.json,
        losses=losses,
        milliseconds_a_step=statistics.median(ours),
        milliseconds_a_step_plain=statistics.median(plain),
        tokens_per_second=1000 * batch_tokens / statistics.median(ours),
    )


def train(text: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Run the preset; returns what `forgeline run --json` prints."""
    command = [sys.executable, "-m", "flows", "run", PRESET, "--json", "--set", f'data.sources=["{text.absolute()}"]']
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def seconds_a_step(result: dict[str, Any]) -> float:
    """Seconds a step of a finished run, after its first 20 steps."""
    lines = (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line)).get("step", 0) >= FIRST_STEPS]
    tokens = [later["train/tokens"] - earlier["train/tokens"] for earlier, later in pairwise(records)]
    spent = [n / record["train/tokens_per_second"] for n, record in zip(tokens, records[1:], strict=True)]
    return sum(spent) / (records[-1]["step"] - records[0]["step"])


def plain_seconds(config: Path) -> float:
    """Seconds a step of the plain loop over the same batches, in a process of its own."""
    command = [sys.executable, __file__, "--text", "-", "--plain", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)


def plain_loop(config: Path) -> float:
    """The barest loop that trains this model: batches in memory, forward, backward, clip, step."""
    import numpy as np
    import torch

    from trainer.config import TrainerInput
    from trainer.data.loader import Sequences
    from trainer.data.shards import ShardSet
    from trainer.loop import compile_model
    from trainer.model import build_model, load_tokenizer, loss_of
    from trainer.optimizers import build_optimizer, set_rate
    from trainer.schedule import rate_at

    settings = TrainerInput.read(config)
    train_config = settings.train
    sequences = Sequences.open(ShardSet.open(settings.shards_dir), settings.sequence_length, None, train_config.seed)
    batch = train_config.global_batch
    rows = torch.from_numpy(sequences.gather(np.arange(settings.steps * batch)))
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    model = build_model(settings.model, tokenizer, settings.sequence_length, torch.float32, train_config.seed)
    if train_config.compile:
        compile_model(model, torch.device("cpu"))
    optimizer = build_optimizer(model, train_config)
    began = 0.0
    for step in range(settings.steps):
        if step == FIRST_STEPS:
            began = time.perf_counter()
        set_rate(optimizer, rate_at(step, settings.steps, settings.warmup_steps, train_config.schedule))
        part = rows[step * batch : (step + 1) * batch]
        loss_of(model, part[:, :-1].contiguous(), part[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train_config.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / (settings.steps - FIRST_STEPS)


def score_from_outside(export_dir: Path, text: Path) -> tuple[int, float]:
    """Parameters, and the loss over the last tenth of the text in windows of 64, with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export_dir)
    model = AutoModelForCausalLM.from_pretrained(export_dir).eval()
    content = text.read_text(encoding="utf-8")
    held_out = content[int(0.9 * len(content)) :]
    ids = torch.tensor(tokenizer.encode(held_out, add_special_tokens=False))
    assert len(ids) == len(held_out), "the tokenizer does not give one id a character"
    total, predicted = 0.0, len(ids) - 1
    with torch.inference_mode():
        for start in range(0, predicted, WINDOW):
            window = ids[start : start + WINDOW + 1]
            logits = model(input_ids=window[None, :-1]).logits[0].float()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return sum(parameter.numel() for parameter in model.parameters()), total / predicted


if __name__ == "__main__":
    sys.exit(main())

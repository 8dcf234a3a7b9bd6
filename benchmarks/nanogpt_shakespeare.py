"""Character-level Shakespeare: the loss that nanoGPT's budget buys. `step_overhead.py` says what a step costs.

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
from pathlib import Path
from typing import Any

from claims import Claim, finish, note

PRESET = "nanogpt-shakespeare"
WINDOW = 64


def main() -> int:
    """Measure loss and time; the exit code is 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path, help="tinyshakespeare's input.txt")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as home:
        os.environ["FORGELINE_HOME"] = home
        losses, parameters, tokens = [], 0, 0.0
        for seed in range(1, options.seeds + 1):
            result = train(options.text, {"train.seed": seed})
            parameters, loss = score_from_outside(Path(result["export_dir"]), options.text)
            tokens = result["metrics"]["train/tokens"]
            losses.append(loss)
            note(f"seed {seed}: {loss:.4f} from outside, {result['metrics']['eval/loss']:.4f} in the pipeline")

    claims = [
        Claim("validation_loss_mean", statistics.mean(losses), 1.62, "nanoGPT's README: 1.88", "nats a character"),
        Claim("parameters", parameters, 810_000, "nanoGPT: 0.80 M", "parameters"),
        Claim("training_tokens", tokens, 2000 * 12 * 64, "nanoGPT's 2,000 steps of 12 x 64", "tokens"),
    ]
    return finish(claims, ("torch", "transformers", "deepspeed"), options.json, losses=losses)


def train(text: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Run the preset; returns what `forgeline run --json` prints."""
    command = [sys.executable, "-m", "flows", "run", PRESET, "--json", "--set", f'data.sources=["{text.absolute()}"]']
    for key, value in overrides.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


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

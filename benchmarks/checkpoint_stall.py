"""How long a save stops training, beside DeepSpeed's plain `save_checkpoint` of the same engine, in turns.

Ours is all that the loop waits for: the fixed batch's loss, the copies, and the start of the thread that writes.
The save before has ended by then, as it has where checkpoints are further apart than writing one takes.

    python benchmarks/checkpoint_stall.py [--json]
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from claims import Claim, finish, note
from step_overhead import prepare

ROUNDS = 5


def main() -> int:
    """Measure; the exit code is 1 where the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    # libraries print to stdout, which is for the result
    result = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="forgeline-stall-") as name:
        figures = measure(Path(name))
    sys.stdout.flush()
    os.dup2(result, 1)
    ratio = statistics.median(a / b for a, b in zip(figures["ours"], figures["plain"], strict=True))
    claim = Claim("stall_vs_deepspeed_save", ratio, 0.25, "engine.save_checkpoint, a fp32 model with AdamW", "ratio")
    return finish([claim], ("torch", "deepspeed"), options.json, seconds=figures)


def measure(directory: Path) -> dict[str, list[float]]:
    """Seconds, in every round: of a stall by ours and by plain, of ours until it is on the disk, of steps."""
    import torch
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    from trainer.checkpoint import finish_saving
    from trainer.config import TrainerInput
    from trainer.data.loader import Loader, Sequences
    from trainer.data.shards import ShardSet
    from trainer.engine import start_engine, start_process_group
    from trainer.loop import Run
    from trainer.model import build_model, load_tokenizer
    from trainer.parts.checkpoints import Checkpoints
    from trainer.step import TrainingStep

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 12}
    model = {"type": "llama", "config": {**sizes, "num_key_value_heads": 12, "tie_word_embeddings": True}}
    config = prepare(directory, "stall", "byte", 128, model, {"global_batch": 1, "precision": "fp32"})
    settings, device = TrainerInput.read(config), torch.device("cpu")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    start_process_group(device)
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    module = build_model(settings.model, tokenizer, 128, torch.float32, settings.train.seed)
    note(f"{sum(weight.numel() for weight in module.parameters()) / 1e6:.0f} M parameters")
    engine = start_engine(module, settings, load_universal=False)
    sequences = Sequences.open(ShardSet.open(settings.shards_dir), 128, None, settings.train.seed)
    loader = Loader(sequences, 1, 1, 0, 1, device)
    step = TrainingStep(engine, device, 1, settings.train)
    run, part = Run(settings, engine, step, loader, device, []), Checkpoints(1)
    batches = loader.iterate(0, 10**6)
    beside, plain = engine.checkpoint_engine, TorchCheckpointEngine(engine._config)

    def seconds(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def train() -> None:
        step.run(next(batches), 1.0)
        run.progress.step += 1

    def save_plainly() -> None:
        engine.save_checkpoint(str(directory / "plain"), tag="engine", save_latest=False)

    train()
    figures: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):
        measured = {"step": seconds(train)}
        began = time.perf_counter()
        measured["ours"] = seconds(lambda: part.save(run))
        measured["step_meanwhile"] = seconds(train)
        finish_saving(engine)
        measured["ours_on_disk"] = time.perf_counter() - began
        os.sync()
        engine.checkpoint_engine = plain
        measured["plain"] = seconds(save_plainly)
        engine.checkpoint_engine = beside
        shutil.rmtree(directory / "plain")
        os.sync()
        note(", ".join(f"{name} {value:.3f} s" for name, value in measured.items()))
        for name, value in measured.items():  # the first of all takes its memory from the system
            figures.setdefault(name if number else f"first_{name}", []).append(value)
    return figures


if __name__ == "__main__":
    sys.exit(main())

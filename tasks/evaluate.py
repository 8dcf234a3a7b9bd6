"""The evaluate stage: scores the export on the held-out text and lets it write a sample."""

import logging
import os
import time
from typing import Annotated, Any

from annotated_types import Ge
from prefect import task

from tasks.home import Home
from tasks.progress import Progress, report
from tasks.stage import Reference, shown, timed
from tasks.train import Trained
from trainer.config import TrainerInput
from trainer.durable import exclusive, read_record, write_record
from trainer.settings import OPERATIONAL, Settings, fingerprint
from trainer.tracking import log_once, reachable

logger = logging.getLogger("forgeline")

FORMAT_VERSION = 2


class EvaluateConfig(Settings):
    """The evaluation of the finished model on the whole validation split."""

    batch: Annotated[int, Ge(1), OPERATIONAL] = 32
    """Windows in one forward pass."""
    prompt: str = "The "
    """Beginning of the sample text; the user's message where conversations are trained."""
    sample_tokens: Annotated[int, Ge(0)] = 64
    """Tokens of the sample; 0 writes none."""
    temperature: Annotated[float, Ge(0)] = 0.8
    """Temperature of the sample; 0 takes the most likely token each time."""


class Evaluated(Reference):
    """The scores of a model; `path` is the file that holds them."""

    metrics: dict[str, float]
    """eval/loss, eval/perplexity, eval/bits_per_byte, eval/unigram_entropy, eval/tokens."""
    sample: str
    """Text that the model wrote."""
    validation: str
    """Fingerprint of the validation text: scores on the same one can be compared."""


@timed
def evaluate(
    home: Home, config: EvaluateConfig, sequence_length: int, trained: Trained, shards: Reference
) -> Evaluated:
    """Score the export, write the result beside the run, and log it to the MLflow run.

    Raises:
        DataError: the export or the shard set cannot be used.
    """
    name = fingerprint(
        "evaluate",
        FORMAT_VERSION,
        config=config.identity(),
        sequence_length=sequence_length,
        run=trained.fingerprint,
        shards=shards.fingerprint,
    )
    file = trained.path / f"evaluation-{name}.json"
    with exclusive(home.lock("evaluations", name)):
        result = read_record(file)
        cached = result is not None and result["tracked_by"] == trained.mlflow_run_id
        if result is None:
            result = _evaluate(config, sequence_length, trained, shards)
            write_record(file, result)
        if not cached:
            with reachable(home.tracking_uri):
                log_once(home.tracking_uri, trained.mlflow_run_id, result["metrics"], trained.steps, result["time"])
            result["tracked_by"] = trained.mlflow_run_id
            write_record(file, result)
    return Evaluated(
        path=file,
        fingerprint=name,
        cached=cached,
        metrics=result["metrics"],
        sample=result["sample"],
        validation=result["validation"],
    )


def _evaluate(config: EvaluateConfig, sequence_length: int, trained: Trained, shards: Reference) -> dict[str, Any]:
    import torch

    from trainer.data.shards import ShardSet
    from trainer.evaluation import generate, score
    from trainer.model import load_tokenizer

    model = load_export(trained.export_dir)
    tokenizer = load_tokenizer(trained.export_dir)
    shard_set = ShardSet.open(shards.path)
    shard_set.check_canary(lambda text: tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
    torch.set_num_threads(os.cpu_count() or 1)
    metrics = score(
        model,
        shard_set,
        sequence_length,
        config.batch,
        model.device,
        lambda done, total: report(Progress("evaluate", done, total, "windows")),
        TrainerInput.read(trained.path / "config.yaml").document_mask,
    )
    sample = ""
    if config.sample_tokens:
        prompt = config.prompt
        if shard_set.conversations:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        sample = generate(model, tokenizer, prompt, config.sample_tokens, config.temperature, seed=0)
    held_out = [s for s in shard_set.manifest["files"] if s["path"].startswith("validation/")]
    return {
        "metrics": metrics,
        "sample": sample,
        "validation": fingerprint("validation", FORMAT_VERSION, files=[s["sha256"] for s in held_out]),
        "time": time.time(),
        "tracked_by": None,
    }


def load_export(directory: Any) -> Any:
    """The model of an export directory, on the accelerator where there is one, ready to score or generate."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the stage reports its own progress
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model.to(device).eval()


@task(name="evaluate", task_run_name="evaluate-{trained.path.name}")
def evaluate_task(
    home: Home, config: EvaluateConfig, sequence_length: int, trained: Trained, shards: Reference
) -> Evaluated:
    """Score the model on the held-out text."""
    return shown(evaluate(home, config, sequence_length, trained, shards))

"""Evaluation while training: the right loss, at every step where it is due, and the best checkpoint stays."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.conftest import journal, run
from tests.trainer.test_launcher import launch_and_disturb
from trainer.checkpoint import checkpoint_directories
from trainer.config import TrainConfig, TrainerInput
from trainer.data.shards import ShardSet
from trainer.durable import read_manifest
from trainer.errors import PreemptedError


def validation_losses(settings: TrainerInput) -> list[tuple[int, float]]:
    """The steps and their validation loss, in the order of the journal."""
    records = journal(settings)
    return [(record["step"], record["validation/loss"]) for record in records if "validation/loss" in record]


def loss_of_export(export: Path, shards: Path, windows: int, length: int) -> float:
    """What transformers says of the first windows of the validation text."""
    tokens = np.empty(windows * length + 1, dtype=np.int64)
    ShardSet.open(shards).stream("validation").read(0, tokens)
    inputs = torch.from_numpy(tokens[:-1]).view(windows, length)
    labels = torch.from_numpy(tokens[1:]).view(windows, length)
    model = AutoModelForCausalLM.from_pretrained(export)
    with torch.no_grad():
        logits: Any = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def test_every_due_step_is_evaluated_once_across_a_preemption_and_the_best_checkpoint_is_kept(
    new_run: Callable[..., TrainerInput],
) -> None:
    settings = new_run(
        "evaluated",
        steps=60,
        learning_rate=3.0,
        schedule={"type": "constant"},
        evaluation={"every": 1, "batches": 3},
        checkpoint={"every": 3, "keep": 2, "keep_best": True},
    )
    with pytest.raises(PreemptedError):
        warming_up = settings.model_copy(update={"warmup_steps": 3000})
        launch_and_disturb(warming_up, lambda pids: os.kill(pids[1], signal.SIGTERM), after_step=3)
    stopped_at = int(checkpoint_directories(settings.run_dir)[0].name.removeprefix("step-"))
    assert validation_losses(settings)[-1][0] == stopped_at - 1, "the grace time is for the checkpoint"

    # without warm-up, the loss rises at once, so that the best checkpoint is an early one
    run(settings)

    found = validation_losses(settings)
    assert [step for step, _ in found] == list(range(1, 61))
    exported = loss_of_export(settings.export_dir, settings.shards_dir, 3 * 8, settings.sequence_length)
    assert found[-1][1] == pytest.approx(exported, rel=1e-5)

    in_checkpoints = {step: loss for step, loss in found if step % 3 == 0 and step != stopped_at}
    best = min(in_checkpoints, key=lambda step: in_checkpoints[step])
    kept = checkpoint_directories(settings.run_dir)
    assert best <= stopped_at, "the newest two are kept in any case"
    assert [directory.name for directory in kept] == ["step-00000060", "step-00000057", f"step-{best:08d}"]
    assert (read_manifest(kept[-1]) or {})["validation_loss"] == in_checkpoints[best]


def test_a_short_validation_split_is_read_to_its_end_on_any_number_of_ranks(
    new_run: Callable[..., TrainerInput], small_shards: tuple[Path, Path]
) -> None:
    settings = new_run("whole", steps=1, micro_batch=4, evaluation={"every": 5, "batches": 10**6})
    run(settings)
    predicted = len(ShardSet.open(small_shards[1]).stream("validation")) - 1
    whole = loss_of_export(settings.export_dir, settings.shards_dir, predicted // 32, 32)
    ((step, loss),) = validation_losses(settings)
    assert step == 1, "the last step is always evaluated"
    # less than a window of a hundred is beyond the whole ones
    assert loss == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize("evaluation", [{}, {"every": 4}])
def test_the_best_checkpoint_cannot_be_kept_where_checkpoints_are_not_evaluated(evaluation: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"keep_best needs evaluation\.every .* to divide checkpoint\.every=6"):
        TrainConfig(steps=6, evaluation=evaluation, checkpoint={"every": 6, "keep_best": True})

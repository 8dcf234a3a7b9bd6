"""The objective of whole steps, in real runs: accumulation, ranks and padding do not change it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.conftest import run
from tests.trainer.test_resume import packed
from trainer.config import TrainerInput
from trainer.data.loader import MicroBatch, Sequences
from trainer.data.shards import ShardSet
from trainer.model import build_model, load_tokenizer, training_loss_of

NO_DROPOUT = {"attention_dropout": 0.0}


def first_batch(settings: TrainerInput) -> MicroBatch:
    """The first global batch, as one."""
    sequences = Sequences.open(
        ShardSet.open(settings.shards_dir),
        settings.sequence_length,
        None,
        settings.train.seed,
        settings.packing_dir,
        True,
    )
    rows = sequences.gather(np.arange(settings.train.global_batch))
    positions = sequences.positions(rows)
    return MicroBatch(torch.from_numpy(rows), None if positions is None else torch.from_numpy(positions))


def initial_model(settings: TrainerInput) -> torch.nn.Module:
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    return build_model(settings.model, tokenizer, settings.sequence_length, torch.float32, settings.train.seed)


def test_accumulated_unequal_sequences_give_the_weights_of_one_batch(
    new_run: Callable[..., TrainerInput], tmp_path: Path
) -> None:
    plan = tmp_path / "plan"
    terms = {"model": NO_DROPOUT, "steps": 2, "z_loss": 0.01, "label_smoothing": 0.1, "schedule": {"warmup_steps": 0}}
    settings = packed(new_run("cut", ranks=2, micro_batch=1, **terms), plan)
    cut = next(record for record in run(settings) if "train/loss" in record)
    whole = packed(new_run("whole", ranks=1, micro_batch=8, **terms), plan)
    run(whole)

    batch, model = first_batch(settings), initial_model(settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    labels = int((batch.labels >= 0).sum())
    assert labels < 8 * 32, "there is padding"
    loss = training_loss_of(model, batch.inputs, batch.labels, batch.positions, 0.01, 0.1)
    assert cut["train/loss"] == pytest.approx(loss.cross_entropy.item() / labels, abs=1e-5)
    assert cut["train/z_loss"] == pytest.approx(loss.z_loss.item() / labels, rel=1e-4)
    assert cut["train/z_loss"] > 0.1

    left, right = (load_file(one.export_dir / "model.safetensors") for one in (settings, whole))
    apart = torch.cat([(left[name] - right[name]).flatten() for name in before])
    moved = torch.cat([(right[name] - before[name]).flatten() for name in before])
    assert apart.norm() < 1e-5 * moved.norm()

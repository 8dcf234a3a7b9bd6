"""Mixtures of experts: divided over ranks they train as whole ones do, and the journal says how they are used."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import journal, losses, run
from tests.trainer.test_resume import forget_what_came_after, resume_in_the_same_bits
from trainer.config import ModelConfig, TrainerInput
from trainer.errors import DataError

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
MODELS = {
    "mixtral": {**SIZES, "intermediate_size": 48, "num_local_experts": 4, "output_router_logits": True},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 48, "num_experts": 4},
    "qwen2_moe": {**SIZES, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "num_experts": 4},
}


def mixture(make: Callable[..., TrainerInput], name: str, model: str, **train: Any) -> TrainerInput:
    settings = make(name, gradient_clipping=0.1, learning_rate=0.01, **train)
    return settings.model_copy(update={"model": ModelConfig(type=model, config=MODELS[model])})


def recorded(settings: TrainerInput, key: str) -> list[float]:
    return [record[key] for record in journal(settings) if key in record]


def logits(export: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.arange(64).reshape(2, 32)).logits


@pytest.mark.parametrize(
    ("model", "zero_stage", "ranks"), [("mixtral", 0, 2), ("qwen3_moe", 1, 4), ("qwen2_moe", 3, 2)]
)
def test_divided_experts_train_as_whole_ones_do(
    new_run: Callable[..., TrainerInput], model: str, zero_stage: int, ranks: int
) -> None:
    whole = mixture(new_run, "whole", model, ranks=1, micro_batch=2)
    run(whole)
    recompute = {"activation_checkpointing": "full"} if model == "mixtral" else {}
    divided = mixture(
        new_run, "divided", model, ranks=ranks, zero_stage=zero_stage, parallel={"expert": 2}, **recompute
    )
    run(divided)
    for key in ("train/loss", "train/gradient_norm", "train/expert_imbalance", "train/auxiliary_loss"):
        assert recorded(divided, key) == pytest.approx(recorded(whole, key), rel=1e-4), key
    assert len(recorded(divided, "train/auxiliary_loss")) == (6 if model == "mixtral" else 0)
    assert all(1 < imbalance <= 2 for imbalance in recorded(divided, "train/expert_imbalance"))
    assert (logits(divided.export_dir) - logits(whole.export_dir)).abs().max() < 1e-3

    undisturbed = losses(resume_in_the_same_bits(divided))

    if ranks > 2:
        forget_what_came_after(divided, step=3)
        fewer = divided.train.model_copy(update={"ranks": 2})
        assert losses(run(divided.model_copy(update={"train": fewer}))) == pytest.approx(undisturbed, abs=1e-5)

    shutil.rmtree(divided.export_dir)
    other = divided.train.model_copy(update={"parallel": whole.train.parallel})
    with pytest.raises(DataError, match=r"train.parallel.expert=2 and can only go on with that, not with 1"):
        run(divided.model_copy(update={"train": other}))

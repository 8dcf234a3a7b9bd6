"""An adapter trains beside frozen weights, resumes, and is merged into them on export."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer.conftest import losses, run
from tests.trainer.test_resume import forget_what_came_after, resume_in_the_same_bits
from trainer.adapters import AdapterConfig, add_adapter, check_adapter, load_in_4_bits
from trainer.config import ModelConfig, TrainerInput
from trainer.errors import ConfigError
from trainer.model import build_model, count_parameters, load_tokenizer, model_configuration
from trainer.parallel import ParallelConfig
from trainer.precision import WEIGHTS

WIDE = {"hidden_size": 64, "intermediate_size": 128, "attention_dropout": 0.0}
"""4-bit weights are in blocks of 64."""
TRAINED = 2 * 4 * (4 * (64 + 64) + 3 * (64 + 128))
"""Parameters of adapters of rank 4 beside every linear layer of the two transformer layers."""
TOKENS = torch.arange(60).view(2, 30) * 4


@pytest.fixture(scope="module")
def base(new_shared_run: Callable[..., TrainerInput]) -> Path:
    """The export of a small earlier run."""
    settings = new_shared_run("base", steps=2, ranks=1, model=WIDE)
    run(settings)
    return settings.export_dir


def adapting(settings: TrainerInput, base: Path, **adapter: Any) -> TrainerInput:
    """The same run, with an adapter beside the weights of ``base``."""
    config = AdapterConfig(rank=4, alpha=8, **adapter)
    return settings.model_copy(update={"model": ModelConfig(pretrained=str(base), adapter=config)})


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits.float()


@pytest.mark.parametrize(
    ("kind", "zero_stage", "precision", "tolerance"),
    [("lora", 0, "fp32", 1e-5), ("lora", 2, "bf16", 0.02), ("lora", 3, "fp32", 1e-5), ("qlora", 1, "fp32", 1e-5)],
)
def test_an_adapter_alone_trains_resumes_in_the_same_bits_and_merges_into_what_it_adapted(
    new_run: Callable[..., TrainerInput], base: Path, kind: Any, zero_stage: int, precision: str, tolerance: float
) -> None:
    train = {"precision": precision, "zero_stage": zero_stage, "learning_rate": 0.01}
    settings = adapting(new_run("adapted", **train), base, type=kind, dropout=0.1 if zero_stage == 0 else 0.0)
    undisturbed = losses(run(settings))
    finished = settings.run_dir / "checkpoints" / "step-00000006"
    assert sum(path.stat().st_size for path in finished.rglob("*states.pt")) < 25 * TRAINED + 200_000

    resume_in_the_same_bits(settings)
    if zero_stage == 3:
        forget_what_came_after(settings, step=3)
        alone = settings.train.model_copy(update={"ranks": 1})
        other = losses(run(settings.model_copy(update={"train": alone})))
        assert list(other.values()) == pytest.approx(list(undisturbed.values()), abs=1e-5)

    adapter = load_file(settings.export_dir / "adapter" / "adapter_model.safetensors")
    assert sum(tensor.numel() for tensor in adapter.values()) == TRAINED
    # PEFT's own reading of the adapter, beside the base as it was trained: in 4 bits for qlora
    without = settings.model.model_copy(update={"adapter": None})
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    whole: Any = build_model(without, tokenizer, 32, WEIGHTS[precision], seed=1)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    if kind == "qlora":
        whole = load_in_4_bits(str(base), torch.float32)
    untouched = logits(whole)
    beside = logits(PeftModel.from_pretrained(whole, settings.export_dir / "adapter"))
    merged: Any = AutoModelForCausalLM.from_pretrained(settings.export_dir)
    assert (logits(merged) - beside).abs().max() < tolerance
    assert (logits(merged) - untouched).abs().max() > 0.1
    assert not hasattr(merged.config, "quantization_config")
    for name, tensor in merged.state_dict().items():
        frozen = not name.endswith("proj.weight")
        assert torch.equal(tensor, before[name]) == frozen, name


def test_only_the_chosen_layers_are_adapted_and_counted_without_memory() -> None:
    settings = model_configuration(ModelConfig(config={**WIDE, "num_hidden_layers": 2}), 257, 32)
    adapter = AdapterConfig(rank=4, target_modules=["q_proj", "v_proj"])
    whole, trained = count_parameters(settings, adapter)
    assert (whole, trained) == (count_parameters(settings)[0], 2 * 2 * 4 * (64 + 64))


def test_a_layer_that_the_model_lacks_is_refused_with_the_nearest() -> None:
    settings = model_configuration(ModelConfig(config={**WIDE, "num_hidden_layers": 2}), 257, 32)
    model = AutoModelForCausalLM.from_config(settings)
    with pytest.raises(ConfigError, match=r"model\.adapter\.target_modules: .*'q_prj'\. Did you mean q_proj\?"):
        add_adapter(model, AdapterConfig(target_modules=["v_proj", "q_prj"]))
    with pytest.raises(ConfigError, match=r"model\.adapter\.target_modules: lm_head is the output head"):
        add_adapter(model, AdapterConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"model\.adapter\.target_modules: refused by PEFT"):
        add_adapter(model, AdapterConfig(target_modules=["input_layernorm"]))


def test_an_adapter_has_no_arithmetic_in_fp8() -> None:
    with pytest.raises(ConfigError, match=r"train\.precision: fp8 cannot be combined with model\.adapter"):
        check_adapter(AdapterConfig(), 0, "fp8", ParallelConfig())

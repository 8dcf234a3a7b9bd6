"""Precisions in real runs: fp16 with its loss scale, fp8, and what a device is asked for."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import losses, run
from tests.trainer.test_resume import resume_in_the_same_bits
from trainer.config import ModelConfig, TrainConfig, TrainerInput
from trainer.errors import ConfigError
from trainer.precision import check_precision, pick_precision, use_fp8

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
FP8_DEVICE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture
def fp16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch computes in fp16 on every CPU; DeepSpeed asks for those that have it in hardware."""
    if not torch.cuda.is_available():
        patch = (
            "import torch\n"
            "op = torch.ops.mkldnn._is_mkldnn_fp16_supported\n"
            "answer = {'__call__': lambda self: True, '__getattr__': lambda self, name: getattr(op, name)}\n"
            "torch.ops.mkldnn._is_mkldnn_fp16_supported = type('Supported', (), answer)()\n"
        )
        (tmp_path / "sitecustomize.py").write_text(patch)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")


def records_of(journal: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in journal if "train/loss" in record]


def test_an_overflow_of_fp16_costs_a_step_its_update_and_the_scale_survives_a_resume(
    new_run: Callable[..., TrainerInput], fp16: None
) -> None:
    # 2**40 overflows; it halves with every overflow after the first, and doubles again after two steps without one
    scaling = {"fp16": {"initial_scale_power": 40, "loss_scale_window": 2, "hysteresis": 1}}
    dropout = {"attention_dropout": 0.0}
    settings = new_run("fp16", precision="fp16", model=dropout, deepspeed=scaling, steps=6)
    undisturbed = records_of(run(settings))
    assert undisturbed[0]["train/skipped_steps"] == 1
    assert [record["train/loss_scale"] for record in undisturbed][:2] == [2**39, 2**38]
    assert "train/gradient_norm" not in undisturbed[0], "there is none in an overflow"
    assert all(5 < record["train/loss"] < 6 for record in undisturbed)

    resumed = records_of(resume_in_the_same_bits(settings))
    for key in ("train/loss", "train/loss_scale", "train/skipped_steps"):
        assert [record[key] for record in resumed] == [record[key] for record in undisturbed]


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed: pip install 'forgeline[fp8]'")
def test_fp8_follows_bf16_and_differs_in_rounding_alone(new_run: Callable[..., TrainerInput]) -> None:
    terms: dict[str, Any] = {"ranks": 1, "micro_batch": 8, "model": {"attention_dropout": 0.0}, "steps": 3}
    coarse = losses(run(new_run("fp8", precision="fp8", **terms)))
    fine = losses(run(new_run("bf16", precision="bf16", **terms)))
    assert list(coarse.values()) == pytest.approx(list(fine.values()), abs=0.02)
    assert coarse != fine


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed: pip install 'forgeline[fp8]'")
def test_fp8_products_have_the_rounding_of_fp8_and_the_weights_keep_their_names() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.odd, self.head = (torch.nn.Linear(32, n, bias=False).bfloat16() for n in (48, 50, 64))

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    torch.manual_seed(0)
    model = Model()
    names = list(model.state_dict())
    inputs = torch.randn(8, 32).bfloat16()
    exact = [layer(inputs) for layer in (model.layer, model.odd, model.head)]
    use_fp8(model, torch.device("cpu"))
    assert list(model.state_dict()) == names
    products = [layer(inputs) for layer in (model.layer, model.odd, model.head)]
    assert torch.equal(products[1], exact[1]) and torch.equal(products[2], exact[2])

    # e4m3 has three bits after the leading one: a factor is off by at most 1/16, by a few hundredths on average
    assert 0.005 < (products[0] - exact[0]).norm() / exact[0].norm() < 0.06


@pytest.mark.skipif(not (FP8_DEVICE and HAS_TORCHAO), reason="needs compute capability 8.9 and torchao")
def test_fp8_trains_on_a_device_that_has_it(new_run: Callable[..., TrainerInput]) -> None:
    found = losses(run(new_run("fp8-device", precision="fp8", ranks=1, micro_batch=8, steps=20, learning_rate=3e-3)))
    assert found[20] < found[1] - 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator has fp16")
@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_what_a_cpu_does_not_have_is_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"train.precision: {precision} needs an accelerator; use fp32, bf16 or auto"):
        check_precision(TrainConfig(steps=1, precision=precision))


@pytest.mark.parametrize(
    ("capability", "torchao", "message"),
    [((8, 0), True, r"fp8 needs compute capability 8\.9, this device has 8\.0"), ((9, 0), False, r"needs torchao")],
)
def test_fp8_is_refused_where_the_device_or_the_library_lacks_it(monkeypatch, capability, torchao, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if torchao else None)
    with pytest.raises(ConfigError, match=message):
        check_precision(TrainConfig(steps=1, precision="fp8"))


@pytest.mark.parametrize(
    ("bf16", "optimizer", "precision"),
    [(True, "adamw", "bf16"), (True, "muon", "autocast"), (False, "lion", "fp16"), (False, "adafactor", "fp32")],
)
def test_auto_takes_what_the_gpu_does_well_and_the_optimizer_can_be_used_with(monkeypatch, bf16, optimizer, precision):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    train = TrainConfig(steps=1, optimizer=optimizer)
    assert pick_precision(ModelConfig(), train, None, 32, torch.device("cuda")) == precision

"""The arithmetic of the model: which the device has, which it does best, and fp8 from torchao."""

import importlib.util
import time
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import nn

from trainer.config import ModelConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.model import build_model, loss_of
from trainer.parallel import WHOLE_MATRIX_OPTIMIZERS

Precision = Literal["fp32", "bf16", "fp16", "autocast", "fp8"]

WEIGHTS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "autocast": torch.float32,
    "fp8": torch.bfloat16,
}
"""Type of the weights that the forward pass reads."""

PRODUCTS = {**WEIGHTS, "autocast": torch.bfloat16}
"""Type by whose rate a device's use is judged; fp8 is set against 16 bits, so that it can be compared."""


def check_precision(config: TrainConfig) -> None:
    """Refuse arithmetic that this machine does not have.

    Raises:
        ConfigError: what `train.precision` may be instead.
    """
    if config.precision not in ("fp16", "fp8"):
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"train.precision: {config.precision} needs an accelerator; use fp32, bf16 or auto on CPUs")
    if config.precision == "fp8":
        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            raise ConfigError(
                f"train.precision: fp8 needs compute capability 8.9, this device has {'.'.join(map(str, capability))}; "
                "use bf16 or auto"
            )
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("train.precision: fp8 needs torchao; run `pip install forgeline[fp8]`")


def pick_precision(
    model: ModelConfig, train: TrainConfig, tokenizer: Any, sequence_length: int, device: torch.device
) -> Precision:
    """What the device does well, of what the optimizer can be used with.

    On GPUs bf16 where the device has it, else fp16. On CPUs this depends on instruction set and
    kernels, so one forward and backward pass of the model decides whether bf16 is worth it; it has
    to win by a tenth, since it also pays for keeping fp32 weights. An optimizer of whole matrices
    has autocast in place of bf16.
    """
    whole = train.optimizer in WHOLE_MATRIX_OPTIMIZERS
    short: Precision = "autocast" if whole else "bf16"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return short
        return "fp32" if whole else "fp16"
    tokens = torch.zeros(max(1, 1024 // sequence_length), sequence_length, dtype=torch.long)

    def seconds(precision: Precision) -> float:
        built = build_model(model, tokenizer, sequence_length, WEIGHTS[precision], seed=0)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else nullcontext():
                loss = loss_of(built, tokens, tokens)
            loss.backward()
            times.append(time.perf_counter() - began)
        return min(times)

    return short if seconds(short) * 1.1 < seconds("fp32") else "fp32"


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Let the hidden linear layers of ``model`` multiply in fp8, with a scale a tensor that follows its values.

    Micikevicius et al. 2022: e4m3 forward, e5m2 for gradients. Weights and their names stay as they are. Layers
    whose sizes do not divide by 16 stay in bf16, which the hardware asks for, and so does the output head, for
    the sake of the loss. CPUs emulate it: the same rounding, more slowly.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    head = model.get_output_embeddings()  # type: ignore[operator]

    def wanted(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not head and all(n % 16 == 0 for n in module.weight.shape)

    emulated = Float8LinearConfig(emulate=device.type == "cpu")
    convert_to_float8_training(model, module_filter_fn=wanted, config=emulated)

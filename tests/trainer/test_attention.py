"""The kernel of the attention is a choice that changes nothing but the time."""

import pytest
import torch

from tests.trainer.conftest import LLAMA
from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.model import attention_kernel, loss_of, model_configuration


@pytest.mark.parametrize(("choice", "kernel"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")])
def test_the_chosen_kernel_attends_and_gives_the_same_loss(choice: str, kernel: str) -> None:
    from transformers import AutoModelForCausalLM

    losses = []
    for attention in ("auto", choice):
        config = model_configuration(ModelConfig(config=LLAMA, attention=attention), 64, 32)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).eval()
        tokens = torch.arange(64).view(2, 32)
        positions = torch.arange(16).repeat(2, 2)  # two documents a sequence
        losses.append(loss_of(model, tokens, tokens, positions).item())
    assert model.config._attn_implementation == kernel
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator may have FlashAttention")
def test_flash_attention_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.attention: flash needs an NVIDIA GPU"):
        attention_kernel("flash")

"""The chunked cross-entropy is the plain one, in less memory."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import chunked_head
from trainer.chunked_head import check_chunked_head, use_chunked_head
from trainer.errors import ConfigError
from trainer.model import loss_of, training_loss_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
SEQUENCES, LENGTH = 2, 40


def built(kind: str, **settings: Any) -> Any:
    """A model with the same random weights every time."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **settings))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows, which the 80 places do not fill evenly after padding."""
    monkeypatch.setattr(chunked_head, "_CHUNK_LOGITS", 17 * 512)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and labels of which a part is padding."""
    tokens = torch.randint(0, 512, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(2))
    labels = tokens.roll(-1, 1)
    labels[1, 25:] = -100
    return tokens, labels


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tied", [True, False])
def test_value_and_gradients_are_the_plain_ones(tied: bool, reduction: str) -> None:
    plain, chunked = (built("llama", tie_word_embeddings=tied) for _ in range(2))
    use_chunked_head(chunked)
    names = [name for name, _ in chunked.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    assert chunked.state_dict().keys() == plain.state_dict().keys()
    losses = [loss_of(model, *batch(), reduction=reduction) for model in (plain, chunked)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    for name, expected, found in zip(names, plain.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_z_loss_and_label_smoothing_are_the_plain_ones() -> None:
    plain, chunked = (built("llama") for _ in range(2))
    use_chunked_head(chunked)
    expected, found = (training_loss_of(model, *batch(), None, 1e-3, 0.1) for model in (plain, chunked))
    for one, other in zip(expected, found, strict=True):
        assert other.item() == pytest.approx(one.item(), rel=1e-6)
    expected.objective.backward()
    found.objective.backward()
    torch.testing.assert_close(chunked.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def test_a_bf16_loss_is_summed_in_fp32() -> None:
    plain, chunked = (built("llama").bfloat16() for _ in range(2))
    use_chunked_head(chunked)
    expected, found = (loss_of(model, *batch(), reduction="sum") for model in (plain, chunked))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def largest_kept(model: Any) -> int:
    """Elements of the largest tensor that the backward pass waits for."""
    sizes = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(noted, lambda tensor: tensor):
        loss_of(model, *batch())
    return max(sizes)


def test_no_tensor_of_all_logits_waits_for_the_backward_pass() -> None:
    model = built("llama")
    logits = SEQUENCES * LENGTH * 512
    assert largest_kept(model) == logits
    use_chunked_head(model)
    assert largest_kept(model) <= 512 * 32, "the head's weights"


def test_a_model_that_changes_its_logits_afterwards_is_refused() -> None:
    model = built("llama")
    use_chunked_head(model)
    check_chunked_head(model)
    model = built("gemma2", final_logit_softcapping=0.1, head_dim=16)
    use_chunked_head(model)
    with pytest.raises(ConfigError, match=r"train.cross_entropy: a model of type 'gemma2' changes its logits"):
        check_chunked_head(model)

"""The training objective, against torch's own loss and the formulas written out; evaluation stays plain."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainer.model import loss_of, training_loss_of

VOCABULARY = 13


class Logits(nn.Module):
    """A model whose logits are its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(4 * torch.randn(3, 5, VOCABULARY, generator=torch.Generator().manual_seed(1)))

    def forward(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits)


@pytest.fixture
def labels() -> torch.Tensor:
    labels = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(2))
    labels[0, 1:] = -100
    labels[2, 4] = -100
    return labels


def objective(model: nn.Module, labels: torch.Tensor, z_loss: float, label_smoothing: float):
    return training_loss_of(model, torch.zeros_like(labels), labels, None, z_loss, label_smoothing)


def gradient(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return model.logits.grad


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
def test_label_smoothing_is_torchs_in_value_and_gradient(labels, label_smoothing):
    model = Logits()
    expected = functional.cross_entropy(
        model.logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    expected_gradient = gradient(model, expected)
    found = objective(model, labels, 0.0, label_smoothing)
    torch.testing.assert_close(found.objective, expected)
    torch.testing.assert_close(gradient(model, found.objective), expected_gradient)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_z_loss_is_the_coefficient_times_the_squared_log_of_the_softmax_denominator(labels, label_smoothing):
    model = Logits()
    squares = [
        torch.log(sum(torch.exp(model.logits[row, place, entry]) for entry in range(VOCABULARY))) ** 2
        for row in range(3)
        for place in range(5)
        if labels[row, place] >= 0
    ]
    z = 0.01 * sum(squares)
    plain = functional.cross_entropy(
        model.logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=label_smoothing
    )
    expected_gradient = gradient(model, plain + z)
    found = objective(model, labels, 0.01, label_smoothing)
    torch.testing.assert_close(found.z_loss, z.detach())
    torch.testing.assert_close(found.objective, plain + z)
    torch.testing.assert_close(gradient(model, found.objective), expected_gradient)


@pytest.mark.parametrize(("z_loss", "label_smoothing"), [(0.0, 0.0), (0.01, 0.0), (0.0, 0.1), (0.01, 0.1)])
def test_what_is_recorded_and_evaluated_is_the_plain_cross_entropy(labels, z_loss, label_smoothing):
    model = Logits()
    plain = functional.cross_entropy(model.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    found = objective(model, labels, z_loss, label_smoothing)
    torch.testing.assert_close(found.cross_entropy, plain.detach())
    torch.testing.assert_close(loss_of(model, torch.zeros_like(labels), labels, reduction="sum"), plain)
    assert not found.cross_entropy.requires_grad and not found.z_loss.requires_grad
    assert (found.z_loss > 0) == (z_loss > 0)


def test_a_sequence_without_labels_adds_nothing_and_has_no_gradient():
    model = Logits()
    found = objective(model, torch.full((3, 5), -100), 0.01, 0.1)
    assert found.objective.item() == found.cross_entropy.item() == found.z_loss.item() == 0
    assert gradient(model, found.objective).abs().max() == 0

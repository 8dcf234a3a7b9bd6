"""Learning-rate schedules, against torch's own and against values worked out by hand."""

import pytest
import torch
from torch.optim import lr_scheduler

from trainer.config import ScheduleConfig
from trainer.schedule import rate_at

STEPS = 100


def rates(**settings: object) -> list[float]:
    config = ScheduleConfig(**settings)
    return [rate_at(step, STEPS, config) for step in range(STEPS)]


def torch_rates(make: object, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("minimum", [0.0, 0.1, 1.0])
def test_cosine_is_torchs_cosine_annealing(minimum):
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=minimum))
    assert rates(type="cosine", warmup=0, minimum=minimum) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("minimum", [0.0, 0.25])
def test_linear_is_torchs_linear_decay(minimum):
    expected = torch_rates(lambda o: lr_scheduler.LinearLR(o, 1.0, minimum, STEPS))
    assert rates(type="linear", warmup=0, minimum=minimum) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
def test_the_warm_up_is_torchs_linear_rise_from_the_first_share_to_the_peak(shape):
    expected = torch_rates(lambda o: lr_scheduler.LinearLR(o, 1 / 20, 1.0, 19), 20)
    assert rates(type=shape, warmup=0.2)[:20] == pytest.approx(expected)


def test_cosine_after_a_warm_up_is_torchs_over_the_remaining_steps():
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 80, eta_min=0.1), 80)
    assert rates(type="cosine", warmup=0.2, minimum=0.1)[20:] == pytest.approx(expected, abs=1e-9)


def test_wsd_is_flat_until_its_decay_and_then_linear():
    found = rates(type="wsd", warmup=0.1, decay=0.2, minimum=0.0)
    assert found[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert found[10:81] == [1.0] * 71
    assert found[80:] == pytest.approx([1 - k / 20 for k in range(20)])


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({"type": "cosine", "warmup": 0, "minimum": 0.1}, 0, 1.0),
        ({"type": "cosine", "warmup": 0, "minimum": 0.1}, 50, 0.55),
        ({"type": "cosine", "warmup": 0, "minimum": 0.1}, 75, 0.1 + 0.9 * (1 - 2**-0.5) / 2),
        ({"type": "linear", "warmup": 0, "minimum": 0.2}, 25, 0.8),
        ({"type": "constant", "warmup": 0.05}, 4, 1.0),
        ({"type": "constant", "warmup": 0.05}, 99, 1.0),
        ({"type": "wsd", "warmup": 0.5, "decay": 0.9, "minimum": 0.0}, 75, 0.5),
    ],
)
def test_worked_out_points(settings, step, expected):
    assert rates(**settings)[step] == pytest.approx(expected)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.5, 0.99])
def test_every_rate_lies_between_nothing_and_the_peak_and_falls_after_the_warm_up(shape, steps, warmup):
    config = ScheduleConfig(type=shape, warmup=warmup, minimum=0.1)
    found = [rate_at(step, steps, config) for step in range(steps)]
    peak = found.index(max(found))
    assert all(0 < rate <= 1 for rate in found)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_a_step_past_the_end_has_the_minimum():
    for shape in ("linear", "cosine", "wsd"):
        assert rate_at(10**9, STEPS, ScheduleConfig(type=shape, minimum=0.1)) == pytest.approx(0.1)

"""Learning-rate schedules, against torch's own and against values worked out by hand."""

import pytest
import torch
from torch.optim import lr_scheduler

from trainer.config import ScheduleConfig
from trainer.errors import ConfigError
from trainer.schedule import rate_at, steps_of_warmup

STEPS = 100
SHAPES = ["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


def rates(steps: int = STEPS, **settings: object) -> list[float]:
    config = ScheduleConfig(**settings)
    warmup = steps_of_warmup(config, steps, tokens_a_step=64)
    return [rate_at(step, steps, warmup, config) for step in range(steps)]


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


@pytest.mark.parametrize("shape", SHAPES)
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.5, 0.99])
def test_every_rate_lies_between_nothing_and_the_peak_and_falls_after_the_warm_up(shape, steps, warmup):
    found = rates(steps, type=shape, warmup=warmup, minimum=0.1)
    peak = found.index(max(found))
    assert all(0 < rate <= 1 for rate in found)
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("cycles", [1, 3])
def test_a_step_past_the_end_has_the_minimum(shape, cycles):
    config = ScheduleConfig(type=shape, minimum=0.1, cycles=cycles)
    assert rate_at(10**9, STEPS, 2, config) == pytest.approx(0.1)


def test_inverse_square_root_is_the_formula_of_attention_is_all_you_need():
    # lrate = d^-0.5 min(step^-0.5, step warmup^-1.5), counted from 1; here divided by its peak
    expected = [min(step**-0.5, step * 20**-1.5) / 20**-0.5 for step in range(1, STEPS + 1)]
    assert rates(type="inverse_sqrt", warmup_steps=20, minimum=0.0) == pytest.approx(expected)
    floored = rates(type="inverse_sqrt", warmup_steps=20, minimum=0.6)
    assert floored == pytest.approx([max(rate, 0.6) if step >= 20 else rate for step, rate in enumerate(expected)])
    assert rates(type="inverse_sqrt", warmup_steps=0, minimum=0.0)[:4] == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 2), ({"warmup": 0.3}, 30), ({"warmup_steps": 7}, 7), ({"warmup_tokens": 640}, 10), ({"warmup_tokens": 1}, 1)],
)
def test_a_warm_up_is_given_as_a_share_in_steps_or_in_tokens(settings, steps):
    assert steps_of_warmup(ScheduleConfig(**settings), STEPS, tokens_a_step=64) == steps


def test_only_one_length_of_warm_up_can_be_given():
    with pytest.raises(ValueError, match=r"warmup_steps: set at most one of warmup, warmup_steps and warmup_tokens"):
        ScheduleConfig(warmup=0.1, warmup_steps=5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": 100}, r"warmup_steps: a warm-up of 100 steps is no shorter than the 100 that the run has"),
        ({"warmup_tokens": 10_000}, r"warmup_tokens: a warm-up of 157 steps is no shorter than the 100"),
        ({"warmup_steps": 25, "cycles": 4}, r"warmup_steps: .* 25 that each cycle of the run has"),
        ({"cycles": 101}, r"cycles: 101 cycles are more than the run has steps \(100\)"),
    ],
)
def test_a_warm_up_longer_than_the_run_is_refused_with_its_key(settings, message):
    with pytest.raises(ConfigError, match=rf"train\.schedule\.{message}"):
        steps_of_warmup(ScheduleConfig(**settings), STEPS, tokens_a_step=64)


def test_cosine_cycles_are_torchs_warm_restarts():
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, STEPS // 4, eta_min=0.1))
    assert rates(type="cosine", warmup_steps=0, cycles=4, minimum=0.1) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_a_further_cycle_rewarms_from_the_minimum_and_then_repeats_the_first(shape):
    found = rates(type=shape, warmup_steps=5, cycles=4, minimum=0.2)
    assert found[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    for first in (25, 50, 75):
        assert found[first : first + 5] == pytest.approx([0.36, 0.52, 0.68, 0.84, 1.0])
        assert found[first + 5 : first + 25] == found[5:25]


def test_cycles_that_do_not_divide_the_run_share_it_to_within_a_step():
    found = rates(type="linear", warmup_steps=0, cycles=3, minimum=0.0)
    assert [step for step in range(STEPS) if found[step] == 1.0] == [0, 34, 67]

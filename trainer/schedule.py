"""Learning-rate schedules as pure functions of the step, so that there is no scheduler state to save."""

import math

from trainer.config import ScheduleConfig
from trainer.errors import ConfigError

_DEFAULT_WARMUP = 0.02


def steps_of_warmup(config: ScheduleConfig, steps: int, tokens_a_step: float) -> int:
    """Steps of each warm-up in a run of ``steps``.

    Raises:
        ConfigError: the warm-up leaves nothing of the run, or there are fewer steps than cycles.
    """
    cycle = steps // config.cycles
    if cycle == 0:
        raise ConfigError(f"train.schedule.cycles: {config.cycles} cycles are more than the run has steps ({steps}).")
    if config.warmup_steps is not None:
        key, warmup = "warmup_steps", config.warmup_steps
    elif config.warmup_tokens is not None:
        key, warmup = "warmup_tokens", math.ceil(config.warmup_tokens / tokens_a_step)
    else:
        return round((_DEFAULT_WARMUP if config.warmup is None else config.warmup) * cycle)
    if warmup >= cycle:
        whole = "the run has" if config.cycles == 1 else "each cycle of the run has"
        raise ConfigError(
            f"train.schedule.{key}: a warm-up of {warmup} steps is no shorter than the {cycle} that {whole}."
        )
    return warmup


def rate_at(step: int, steps: int, warmup: int, config: ScheduleConfig) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``, as a share of the peak.

    During a warm-up of w steps it is (step + 1) / w. Afterwards, with m the minimum and p the share
    of the remaining way: linear 1 - (1 - m) p; cosine m + (1 - m)(1 + cos(pi p)) / 2 (Loshchilov and
    Hutter 2017); wsd is 1 until its decay begins, then linear (Hu et al. 2024); inverse_sqrt
    sqrt(w / (step + 1)), at least m (Vaswani et al. 2017).

    Each further cycle does the same over its own steps, its warm-up rising from m (Gupta et al. 2023).
    """
    cycle = min(step * config.cycles // steps, config.cycles - 1)
    first, end = (-(-steps * number // config.cycles) for number in (cycle, cycle + 1))
    step, steps = step - first, end - first
    if step < warmup:
        start = config.minimum if cycle else 0.0
        return start + (1 - start) * (step + 1) / warmup
    if config.type == "constant":
        return 1.0
    if config.type == "inverse_sqrt":
        return max(config.minimum, math.sqrt(max(1, warmup) / (step + 1)))
    begin = max(warmup, steps - round(config.decay * steps)) if config.type == "wsd" else warmup
    passed = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    if config.type == "cosine":
        return config.minimum + (1 - config.minimum) * (1 + math.cos(math.pi * passed)) / 2
    return 1 - (1 - config.minimum) * passed

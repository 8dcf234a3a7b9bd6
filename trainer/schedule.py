"""Learning-rate schedules as pure functions of the step, so that there is no scheduler state to save."""

import math

from trainer.config import ScheduleConfig


def rate_at(step: int, steps: int, config: ScheduleConfig) -> float:
    """The learning rate of step ``step`` (from 0) of ``steps``, as a share of the peak.

    During the warm-up of w steps it is (step + 1) / w. Afterwards, with m the minimum and p the
    share of the remaining way: linear 1 - (1 - m) p; cosine m + (1 - m)(1 + cos(pi p)) / 2
    (Loshchilov and Hutter 2017); wsd is 1 until its decay begins, then linear (Hu et al. 2024).
    """
    warmup = round(config.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.type == "constant":
        return 1.0
    begin = max(warmup, steps - round(config.decay * steps)) if config.type == "wsd" else warmup
    passed = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    if config.type == "cosine":
        return config.minimum + (1 - config.minimum) * (1 + math.cos(math.pi * passed)) / 2
    return 1 - (1 - config.minimum) * passed

"""A few steps of a real run are laid open: Chrome's trace, the dearest operators, DeepSpeed's count of operations."""

import gzip
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.trainer.conftest import run
from trainer.config import TrainerInput


@pytest.fixture(scope="module")
def profiled(new_shared_run: Callable[..., TrainerInput]) -> tuple[TrainerInput, list[dict[str, Any]]]:
    """A run of six steps on two ranks, of which the fourth and fifth are looked at."""
    settings = new_shared_run("profiled", profile={"start_step": 4, "steps": 2}, flops_profile_step=3)
    return settings, run(settings)


def test_the_trace_holds_the_models_operations_with_their_durations(profiled):
    settings, _ = profiled
    with gzip.open(settings.run_dir / "profile" / "step-00000004" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 for event in complete)
    names = [event["name"] for event in complete]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    layers, micro_batches, steps = 2, 2, 2
    assert names.count("aten::scaled_dot_product_attention") == layers * micro_batches * steps
    assert {"aten::embedding", "aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= set(names)


def test_the_table_names_the_dearest_operators_and_the_journal_both_files(profiled):
    settings, records = profiled
    table = (settings.run_dir / "profile" / "step-00000004" / "operators.txt").read_text()
    assert "aten::mm" in table and "Self CPU %" in table
    event = next(record for record in records if record.get("event") == "profiled")
    assert event["artifacts"] == [f"profile/step-00000004/{name}" for name in ("trace.json.gz", "operators.txt")]
    assert sum("train/loss" in record for record in records) == 6


def test_deepspeeds_flops_profiler_counts_each_module(profiled):
    settings, _ = profiled
    report = (settings.run_dir / "profile" / "flops.txt").read_text()
    assert "Profile Summary at step 3" in report
    assert re.search(r"\(lm_head\): Linear\(.*526\.34 KMACs", report), "2 x 32 x 32 x 257"


def test_the_utilisation_is_in_the_journal_with_the_peak_that_was_taken(profiled):
    _, records = profiled
    peak = next(record for record in records if record.get("event") == "device_peak")
    assert peak["source"].startswith("measured on cpu with 1 threads in float32")
    for record in (record for record in records if "train/mfu" in record):
        weights = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 257  # two layers and the tied output
        flops = 6 * weights + 12 * 2 * 32 * 32  # heads x width = 32, over 32 tokens
        expected = flops * record["train/tokens_per_second"] / (2 * peak["flops"])
        assert record["train/mfu"] == pytest.approx(expected, rel=1e-6)

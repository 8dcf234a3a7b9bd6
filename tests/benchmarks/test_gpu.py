"""The GPU benchmark takes all its paths on a CPU, at toy size, and says in one line where there is no GPU."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.conftest import REPOSITORY

CHECKS = {
    "copies_to_device",
    "all_reduce_of_one_rank",
    "learns",
    "bf16",
    "eager_attention",
    "chunked_cross_entropy",
    "compile_chunked",
}


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    """The benchmark, with its output."""
    command = [sys.executable, REPOSITORY / "benchmarks" / "gpu.py", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("options", "checks", "engine"),
    [([], CHECKS | {"resume"}, "deepspeed"), (["--without-deepspeed"], CHECKS, "plain torch")],
    ids=["deepspeed", "torch alone"],
)
def test_a_rehearsal_takes_every_path_and_every_claim_holds(options: list[str], checks: set[str], engine: str) -> None:
    done = run("--cpu-rehearsal", "--json", *options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    compiler = set() if "compile" not in result["left_out"] else {"compile_chunked"}
    assert {claim["name"] for claim in result["claims"]} == checks - compiler
    assert result["engine"] == engine
    for speed in result["speed"].values():
        assert set(speed["tried"]) == {"full", "chunked"} and speed["tokens_per_second"] > 0 and speed["mfu"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_one_line_says_so() -> None:
    done = run()
    assert done.returncode == 3
    assert done.stdout.startswith("No accelerator:") and done.stdout.count("\n") == 1

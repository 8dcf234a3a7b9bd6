"""A compiled model trains as the eager one does, with all that changes its graph."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.trainer.conftest import losses, run
from tests.trainer.test_resume import forget_what_came_after, packed
from trainer.config import TrainerInput


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_a_compiled_run_follows_the_eager_one_and_resumes_and_exports(
    new_run: Callable[..., TrainerInput], tmp_path: Path
) -> None:
    options = {"zero_stage": 2, "micro_batch": 4, "model": {"attention_dropout": 0.0}}
    eager = run(packed(new_run("eager", **options), tmp_path / "plan"))
    settings = packed(
        new_run("compiled", compile=True, cross_entropy="chunked", activation_checkpointing="full", **options),
        tmp_path / "plan",
    )
    compiled = run(settings)
    assert "compile=off" not in (settings.run_dir / "logs" / "rank-0.log").read_text()
    assert list(losses(compiled).values()) == pytest.approx(list(losses(eager).values()), abs=1e-4)

    forget_what_came_after(settings, step=3)
    assert losses(run(settings)) == losses(compiled)
    exported = AutoModelForCausalLM.from_pretrained(settings.export_dir)
    assert all("_orig_mod" not in name for name in exported.state_dict())
    _, info = AutoModelForCausalLM.from_pretrained(settings.export_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]

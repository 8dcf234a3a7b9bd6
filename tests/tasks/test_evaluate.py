"""The evaluate stage scores a model under the mask that it was trained with."""

import shutil
from pathlib import Path

import pytest
import torch

from tasks.evaluate import EvaluateConfig, evaluate, load_export
from tasks.home import Home
from tasks.stage import Reference
from tasks.train import Trained
from tests.conftest import TrainedHome
from trainer.config import TrainerInput
from trainer.data.shards import ShardSet
from trainer.evaluation import score


@pytest.mark.parametrize("mask", [False, True])
def test_a_run_is_scored_under_the_document_mask_that_it_had(
    trained_home: TrainedHome, work: Home, tmp_path: Path, mask: bool
):
    result = trained_home.result
    shutil.copy(trained_home.home.path / "mlflow.db", work.path)  # the scores are logged to a copy
    run_dir = tmp_path / "run"
    shutil.copytree(result["run_dir"], run_dir)
    settings = TrainerInput.read(run_dir / "config.yaml").model_copy(update={"document_mask": mask})
    (run_dir / "config.yaml").write_text(settings.text())
    trained = Trained(
        path=run_dir, fingerprint=f"mask-{mask}", export_dir=result["export_dir"], steps=20, tokens=0,
        mlflow_run_id=result["mlflow_run_id"], tokens_per_second=0, loss=0,
    )  # fmt: skip
    shards = Reference(path=result["shards_dir"], fingerprint="shards")
    found = evaluate(work, EvaluateConfig(sample_tokens=0), settings.sequence_length, trained, shards)
    expected = score(
        load_export(trained.export_dir), ShardSet.open(shards.path), settings.sequence_length, 8, torch.device("cpu"),
        document_mask=mask,
    )  # fmt: skip
    assert found.metrics["eval/loss"] == pytest.approx(expected["eval/loss"], abs=1e-6)
    assert (found.metrics["eval/loss"] == pytest.approx(result["metrics"]["eval/loss"], abs=1e-6)) == (not mask)

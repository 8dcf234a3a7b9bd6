"""A checkpoint that cannot be trusted is passed over and named, and training goes on from the next older one."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import DAMAGE
from tests.trainer.conftest import journal, losses, run
from tests.trainer.test_resume import assert_same_state
from trainer.checkpoint import checkpoint_directories, find_newest_valid
from trainer.config import TrainerInput
from trainer.durable import MANIFEST, read_manifest, seal
from trainer.errors import DataError


@pytest.fixture(scope="module")
def finished(new_shared_run: Callable[..., TrainerInput]) -> TrainerInput:
    """A run of two ranks with checkpoints of steps 3 and 6."""
    settings = new_shared_run("finished", zero_stage=1, model={"attention_dropout": 0.0})
    run(settings)
    return settings


@pytest.fixture
def copied(finished: TrainerInput, tmp_path: Path) -> TrainerInput:
    """The same run in a directory of its own, where the result is still to be made."""
    run_dir = tmp_path / "copied"
    shutil.copytree(finished.run_dir, run_dir)
    (run_dir / "result.json").unlink()
    return finished.model_copy(update={"run_dir": run_dir, "export_dir": tmp_path / "export"})


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["model_states", "optim_states", "random-rank-00001", MANIFEST])
def test_any_damage_to_any_file_is_found_and_named(copied: TrainerInput, damage: str, kind: str) -> None:
    newest = checkpoint_directories(copied.run_dir)[0]
    file = next(path for path in sorted(newest.rglob("*")) if kind in path.name)
    DAMAGE[damage](file)
    chosen, (reason,) = find_newest_valid(copied.run_dir)
    assert chosen is not None and chosen.name == "step-00000003"
    assert reason.startswith("step-00000006: ")
    assert file.name in reason


def test_a_save_that_was_cut_off_is_no_checkpoint_and_is_cleared_away(copied: TrainerInput) -> None:
    newest = checkpoint_directories(copied.run_dir)[0]
    (newest / MANIFEST).unlink()
    os.rename(newest, partial := newest.with_name(f".{newest.name}.partial"))
    records = run(copied)
    assert [record["step"] for record in records if record.get("event") == "resumed"] == [3]
    assert not partial.exists()
    assert find_newest_valid(copied.run_dir) == (newest, [])


def make_wrong(directory: Path) -> None:
    """Change the weights in a checkpoint and seal it again, so that every checksum holds."""
    for file in directory.glob("engine/*_states.pt"):
        state = torch.load(file, weights_only=False)
        whole = state.get("module", {}).values()
        for weights in [*whole, *state.get("optimizer_state_dict", {}).get("single_partition_of_fp32_groups", [])]:
            weights.mul_(1.5)
        torch.save(state, file)
    content = {
        key: value for key, value in (read_manifest(directory) or {}).items() if key not in ("files", "checksum")
    }
    (directory / MANIFEST).unlink()
    os.rename(directory, aside := directory.with_name("aside"))
    seal(aside, directory, content)


@pytest.mark.parametrize("ranks", [2, 1])
def test_weights_that_load_but_are_wrong_are_passed_over_also_after_a_conversion(
    finished: TrainerInput, copied: TrainerInput, ranks: int
) -> None:
    newest = checkpoint_directories(copied.run_dir)[0]
    make_wrong(newest)
    assert find_newest_valid(copied.run_dir) == (newest, [])
    undisturbed = losses(journal(finished))
    records = run(copied.model_copy(update={"train": copied.train.model_copy(update={"ranks": ranks})}))

    events: list[Any] = [record for record in records if "event" in record][-2:]
    assert [event["event"] for event in events] == ["checkpoint_passed_over", "resumed"]
    assert "step-00000006: a fixed batch had loss" in events[0]["reason"]
    assert (events[1]["step"], events[1]["world_size"]) == (3, ranks)
    assert list(losses(records).values()) == pytest.approx(list(undisturbed.values()), abs=1e-5)
    if ranks == 2:
        assert_same_state(newest, finished.run_dir / "checkpoints" / newest.name)


def test_where_every_checkpoint_is_wrong_training_stops_and_names_them_all(copied: TrainerInput) -> None:
    for directory in checkpoint_directories(copied.run_dir):
        make_wrong(directory)
    with pytest.raises(DataError, match=r"no checkpoint is left .*step-00000006: a fixed .*step-00000003: a fixed"):
        run(copied)
    assert len(checkpoint_directories(copied.run_dir)) == 2


def test_a_checkpoint_of_another_model_or_configuration_is_refused_with_what_differs(copied: TrainerInput) -> None:
    model = copied.model.model_copy(update={"config": {**copied.model.config, "hidden_size": 64}})
    train = copied.train.model_copy(update={"seed": 8})
    other = copied.model_copy(update={"fingerprint": "f" * 16, "model": model, "train": train})
    with pytest.raises(
        DataError,
        match=r"step-00000006: belongs to another run: model\.config\.hidden_size is 32 there and 64 here; "
        r"train\.seed is 1 there and 8 here\.",
    ):
        run(other)

"""What is saved beside training is what was there at the save, and what goes wrong beside it comes out."""

import errno
import hashlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.background_saving import BackgroundSaving
from trainer.durable import read_record
from trainer.errors import MachineError, TrainerDiedError


class Scale:
    """An object in a state, as DeepSpeed's loss scaler is."""

    def __init__(self) -> None:
        self.value = 3.0
        self.history = torch.ones(2)


def a_state() -> dict[str, Any]:
    """What the state of an engine may hold: tensors of all kinds, views, shared ones, and what is no tensor."""
    flat = torch.arange(100, dtype=torch.float32)
    weight = torch.nn.Parameter(torch.randn(5, 7))
    return {
        "module": OrderedDict(weight=weight, tied=weight, transposed=torch.randn(3, 4).t(), half=flat[50:]),
        "types": [torch.tensor(7), torch.zeros(0, 3), torch.randn(4).bfloat16(), torch.tensor([True, False])],
        "optimizer": {"param_groups": [{"lr": 0.1, "params": (0, 1)}], "flat": flat, "step": torch.tensor(3.0)},
        "scale": Scale(),
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in values for tensor in tensors_of(item)]


def change(state: dict[str, Any]) -> None:
    """What the next training step does to a state: everything in it changes, in place."""
    with torch.no_grad():
        for tensor in [*tensors_of(state), state["scale"].history]:
            tensor.zero_() if tensor.dtype == torch.bool else tensor.add_(1)
    state["optimizer"]["param_groups"][0]["lr"] = 0.05
    state["scale"].value = 1.0


def save(saving: BackgroundSaving, directory: Path, state: dict[str, Any], complete: Any = lambda: None) -> None:
    """Save ``state`` and change it before anything can have been written."""
    saving.save(state, directory / "state.pt")
    change(state)
    assert not list(directory.iterdir()), "nothing is written before the state has changed"
    saving.start(directory / "record.json", complete)


def test_the_file_holds_the_values_at_the_save_though_everything_changes_before_it_is_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saving, state = BackgroundSaving(), a_state()
    for number in range(3):  # the host memory is used again
        expected = [tensor.clone() for tensor in tensors_of(state)]
        rate, history = state["optimizer"]["param_groups"][0]["lr"], state["scale"].history.clone()
        directory = tmp_path / str(number)
        directory.mkdir()
        save(saving, directory, state)
        saving.ended.wait()

        loaded = torch.load(directory / "state.pt", weights_only=False)
        found = tensors_of(loaded)
        assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
        assert all(map(torch.equal, found, expected))
        assert not torch.equal(found[0], tensors_of(state)[0])
        assert loaded["optimizer"]["param_groups"] == [{"lr": rate, "params": (0, 1)}]
        assert torch.equal(loaded["scale"].history, history)
        assert loaded["module"]["weight"].data_ptr() == loaded["module"]["tied"].data_ptr(), "written once"


def test_the_record_tells_the_size_and_checksum_of_each_file_and_is_the_last_to_be_written(tmp_path: Path) -> None:
    saving, seen = BackgroundSaving(), []
    save(
        saving,
        tmp_path,
        a_state(),
        lambda: seen.append((saving.written.is_set(), read_record(tmp_path / "record.json"))),
    )
    saving.ended.wait()
    content = (tmp_path / "state.pt").read_bytes()
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert seen == [(True, {"files": {"state.pt": entry}})]
    assert saving.error is None


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (errno.ENOSPC, MachineError, r"state\.pt: the disk is full\. Free space"),
        (errno.EDQUOT, MachineError, r"state\.pt: the disk is full\. Free space"),
        (errno.EIO, TrainerDiedError, r"could not be written: .*Input/output error"),
    ],
)
def test_what_the_disk_says_is_the_error_and_no_record_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, message: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    saving = BackgroundSaving()
    save(saving, tmp_path, a_state(), lambda: pytest.fail("it is not complete"))
    saving.ended.wait()
    assert isinstance(saving.error, kind)
    with pytest.raises(kind, match=message):
        raise saving.error
    assert not (tmp_path / "record.json").exists()


def test_torch_does_not_hide_that_the_disk_filled_up_in_the_middle(tmp_path: Path) -> None:
    saving = BackgroundSaving()
    saving.save({"weight": torch.zeros(10**6)}, "/dev/full")
    saving.start(Path("/dev/record.json"), lambda: None)
    saving.ended.wait()
    assert isinstance(saving.error, MachineError)
    assert "/dev/full: the disk is full" in str(saving.error)


def test_when_training_fails_a_save_is_ended_and_one_that_waits_for_another_rank_is_given_up(tmp_path: Path) -> None:
    saving = BackgroundSaving()
    save(saving, tmp_path, a_state(), saving.abandoned.wait)  # as if another rank never wrote its part
    saving.wait_briefly()
    assert saving.ended.is_set()
    assert (tmp_path / "record.json").exists()

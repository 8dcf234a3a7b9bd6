"""Layouts: every rank has one place, and what cannot be divided is refused with the key and what it may be."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.config import TrainConfig
from trainer.errors import ConfigError
from trainer.parallel import Layout, ParallelConfig, Place, check_model, check_pairings


def test_every_place_is_taken_by_one_rank_and_neighbours_divide_layers_first():
    layout = Layout.of(24, ParallelConfig(pipeline=2, sequence=2, tensor=2))
    places = [layout.place(rank) for rank in range(24)]
    assert layout == Layout(pipeline=2, data=3, sequence=2, tensor=2)
    assert len(set(places)) == 24
    assert places[:3] == [Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 0, 1, 0)]
    assert places[4] == Place(0, 1, 0, 0) and places[12] == Place(1, 0, 0, 0)


def test_without_division_every_rank_has_a_part_of_the_batch():
    layout = Layout.of(3, ParallelConfig())
    assert [layout.place(rank).data for rank in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"ranks": 6, "parallel": {"tensor": 4}},
            "ranks: 6 ranks do not divide by parallel.tensor x pipeline x sequence = 4 x 1 x 1 = 4",
        ),
        (
            {"ranks": 4, "parallel": {"expert": 3}},
            "parallel: expert=3 does not divide the 4 data-parallel ranks that ranks=4 leave .it may be 1 or 2 or 4.",
        ),
        ({"parallel": {"tensor": 0}}, "greater than or equal to 1"),
        ({"global_batch": 6, "ranks": 4}, "global_batch: 6 sequences do not divide over 4 data-parallel ranks"),
        ({"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, "autotp_size .* it is train.parallel.tensor"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(train: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        TrainConfig(steps=1, **train)


@pytest.mark.parametrize(
    ("parallel", "settings", "message"),
    [
        ({"tensor": 2, "pipeline": 2}, {}, "parallel: tensor and pipeline cannot be combined"),
        ({"tensor": 2}, {"zero_stage": 3}, "zero_stage: 3 cannot be combined with parallel.tensor; use 0, 1 or 2"),
        ({"tensor": 2}, {"optimizer": "muon"}, "optimizer: muon needs whole matrices"),
        ({"pipeline": 2}, {"zero_stage": 2}, "zero_stage: 2 cannot be combined with parallel.pipeline; use 0 or 1"),
        ({"pipeline": 2}, {"compiled": True}, "compile: cannot be combined with parallel.pipeline"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    parallel: dict[str, int], settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.parallel.UNFINISHED", ())
    with pytest.raises(ValueError, match=message):
        check_pairings(
            ParallelConfig(**parallel), **{"zero_stage": 0, "optimizer": "adamw", "compiled": False} | settings
        )


class Model(SimpleNamespace):
    """Sizes of a model as a transformers configuration has them."""

    num_attention_heads = 6
    num_key_value_heads = 2
    num_hidden_layers = 3

    def get_text_config(self) -> "Model":
        return self


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 4}, "parallel.tensor: 4 does not divide model.config.num_attention_heads=6. Use 1 or 2 or 3 or 6"),
        ({"tensor": 3}, "parallel.tensor: 3 does not divide model.config.num_key_value_heads=2. Use 1 or 2"),
        ({"sequence": 2}, "parallel.sequence: 2 does not divide data.sequence_length=31. Use 1 or 31"),
        ({"expert": 2}, "parallel.expert: 2 does not divide the model's experts=1. Use 1"),
        ({"pipeline": 4}, "parallel.pipeline: 4 stages are more than model.config.num_hidden_layers=3. Use 1 to 3"),
    ],
)
def test_a_model_that_the_sizes_do_not_divide_is_refused(parallel: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        check_model(ParallelConfig(**parallel), Model(), 31)
    check_model(ParallelConfig(pipeline=3, tensor=2), Model(), 31)
    check_model(ParallelConfig(expert=4, sequence=2), Model(num_local_experts=8), 32)

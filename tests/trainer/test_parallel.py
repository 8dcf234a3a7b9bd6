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
        (
            {"ranks": 2, "parallel": {"expert": 2}, "zero_stage": 3, "communication": {"secondary_partition_size": 2}},
            "parallel: expert cannot be combined with offload to nvme, or with communication's quantized_weights",
        ),
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
        (
            {"tensor": 2},
            {"optimizer": "muon"},
            "optimizer: muon needs whole matrices, not those of parallel.tensor; use adamw",
        ),
        (
            {"expert": 2},
            {"optimizer": "muon"},
            "optimizer: muon needs whole matrices, not those of parallel.expert; use adamw",
        ),
        ({"expert": 2, "sequence": 2}, {}, "parallel: expert and sequence cannot be combined"),
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
        ({"pipeline": 4}, "parallel.pipeline: 4 stages are more than model.config.num_hidden_layers=3. Use 1 to 3"),
    ],
)
def test_a_model_that_the_sizes_do_not_divide_is_refused(parallel: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        check_model(ParallelConfig(**parallel), Model(), 31)
    check_model(ParallelConfig(pipeline=3, tensor=2), Model(), 31)


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        ({"expert": 2}, {"type": "llama"}, "parallel.expert: a 'llama' model has no experts that can be divided"),
        ({"expert": 2}, {"type": "olmoe"}, "model.type to one of mixtral, qwen2_moe, qwen3_moe"),
        (
            {"expert": 4},
            {"type": "mixtral", "num_local_experts": 6},
            "does not divide the model's experts=6. Use 1 or 2",
        ),
        ({"sequence": 5}, {"type": "llama"}, "5 does not divide model.config.num_attention_heads=32. Use 1 or 2 or 4"),
        ({"sequence": 32}, {"type": "llama"}, "32 does not divide data.sequence_length=48. Use 1 or 2 or 3 or 4 or 6"),
        ({"sequence": 2}, {"type": "bloom"}, "a 'bloom' model cannot share sequences: transformers has only eager"),
        ({"sequence": 2}, {"type": "llama", "attn_implementation": "eager"}, "has only eager attention for it"),
        ({"sequence": 2}, {"type": "mistral", "sliding_window": 47}, "sees 47 tokens back, fewer than .*length=48"),
        ({"sequence": 2}, {"type": "qwen3_next"}, "it has layers of type linear_attention"),
    ],
)
def test_what_deepspeed_cannot_divide_is_refused(parallel: dict[str, int], model: dict[str, Any], message: str):
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=message):
        check_model(ParallelConfig(**parallel), AutoConfig.for_model(model.pop("type"), **model), 48)


def test_experts_and_sequences_that_divide_are_accepted():
    from transformers import AutoConfig

    check_model(ParallelConfig(expert=4), AutoConfig.for_model("mixtral", num_local_experts=8), 48)
    for model in ("llama", "gpt2", "qwen3", "mistral"):
        check_model(ParallelConfig(sequence=4), AutoConfig.for_model(model), 48)

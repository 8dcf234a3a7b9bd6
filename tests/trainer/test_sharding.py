"""ZeRO, offload and communication: the same training in less memory, counted in two real ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.trainer.sharding_worker import FILE_BYTES, LENGTH, SEQUENCES, STEPS, tokens_of
from trainer.config import ModelConfig, TrainConfig, TrainerInput
from trainer.engine import missing_operations
from trainer.model import loss_of
from trainer.sharding import CommunicationConfig, OffloadConfig

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
NO_SMALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO 3 otherwise keeps small parameters whole, and all are small here."""
SAME: dict[str, dict[str, Any]] = {
    "1": {"zero_stage": 1},
    "2": {"zero_stage": 2},
    "3": {"zero_stage": 3, "deepspeed": NO_SMALL},
    "2, small buckets, overlap": {
        "zero_stage": 2,
        "communication": {"overlap": True, "reduce_bucket_size": 10_000, "gather_bucket_size": 10_000},
    },
    "3, recomputed": {"zero_stage": 3, "activation_checkpointing": "full"},
    "3, selectively recomputed": {"zero_stage": 3, "activation_checkpointing": "selective"},
    "3, small buckets, a second partition": {
        "zero_stage": 3,
        "communication": {
            "overlap": False,
            "reduce_bucket_size": 10_000,
            "gather_bucket_size": 10_000,
            "secondary_partition_size": 2,
        },
    },
    "1, optimizer on the host": {"zero_stage": 1, "offload": {"optimizer": "cpu"}},
    "3, all on the host": {"zero_stage": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "0, bf16 gradients": {"communication": {"gradient_dtype": "bf16"}},
    "2, bf16 gradients": {"zero_stage": 2, "communication": {"gradient_dtype": "bf16"}},
    "3, bf16 gradients": {"zero_stage": 3, "communication": {"gradient_dtype": "bf16"}},
}


def measure(
    directory: Path, tokenizer: Path, cases: dict[str, dict[str, Any]], ranks: int = 2, precision: Any = "fp32"
) -> dict[str, list[dict[str, Any]]]:
    """Train every case on ``ranks`` processes; returns what each rank found."""
    share = SEQUENCES // ranks
    inputs = {}
    for number, (name, train) in enumerate(cases.items()):
        config = TrainConfig(steps=STEPS, global_batch=SEQUENCES, ranks=ranks, precision=precision, **train)
        inputs[name] = TrainerInput(
            name="sharding",
            fingerprint="0123456789abcdef",
            run_dir=directory,
            export_dir=directory / f"export-{number}",
            shards_dir=directory,
            tokenizer_dir=tokenizer,
            sequence_length=LENGTH,
            weights=None,
            steps=STEPS,
            precision=precision,
            micro_batch=share // 2,
            model=ModelConfig(config=MODEL),
            train=config,
            lineage={},
        ).model_dump(mode="json")
    (directory / "cases.json").write_text(json.dumps(inputs))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(ranks), "-m", "tests.trainer.sharding_worker",
        str(directory / "cases.json"), str(directory / "found"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((directory / f"found-{rank}").read_text()) for rank in range(ranks)]
    return {name: [of_rank[name] for of_rank in found] for name in cases}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def found(directory: Path, small_shards: tuple[Path, Path]) -> dict[str, list[dict[str, Any]]]:
    """What two ranks counted in every case."""
    return measure(directory, small_shards[0], {"0": {}, **SAME, **ROUNDED})


@pytest.mark.parametrize("case", SAME)
def test_the_losses_are_those_of_stage_0(found, case):
    for of_rank, expected in zip(found[case], found["0"], strict=True):
        assert of_rank["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-7), "the same initial weights"
        assert of_rank["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert expected["losses"][-1] < expected["losses"][0] - 0.1


@pytest.mark.parametrize("case", ROUNDED)
def test_gradients_reduced_in_bf16_change_the_losses_by_rounding_alone(found, case):
    expected, rounded = found["0"][0]["losses"], found[case][0]["losses"]
    assert rounded == pytest.approx(expected, abs=1e-3)
    assert rounded[0] == pytest.approx(expected[0], rel=1e-7)
    assert rounded[2:] != pytest.approx(expected[2:], abs=1e-7), "bf16 was used"


@pytest.mark.parametrize(
    ("case", "weights", "optimizer", "gradients"),
    [
        ("0", 4, 8, (4, 4)),
        ("1", 4, 12 / 2, (4, 4 / 2)),
        ("2", 4, 12 / 2, (4 / 2, 4 / 2)),
        ("3", 4 / 2, 12 / 2, (4 / 2, 4 / 2)),
    ],
)
def test_a_rank_keeps_what_the_zero_paper_says(found, case, weights, optimizer, gradients):
    """Rajbhandari et al. 2020, with fp32 in place of fp16: 4 + 4 + 8 bytes a parameter, and DeepSpeed's second copy.

    Gradients are counted after the first of two micro-batches and after the last. A parameter that lies on the
    boundary between two ranks may be kept whole by both.
    """
    for of_rank in found[case]:
        parameters, slack = of_rank["parameters"], 4 * of_rank["largest"]
        assert weights * parameters <= of_rank["weights"] <= weights * parameters + slack
        assert optimizer * parameters <= of_rank["optimizer"] <= optimizer * parameters + slack
        for expected, counted in zip(gradients, of_rank["gradients"], strict=True):
            assert expected * parameters <= counted <= expected * parameters + slack


def test_with_stage_3_the_whole_weights_are_never_in_one_process(found):
    whole = 4 * found["3"][0]["parameters"]
    assert found["0"][0]["built"] >= whole
    for of_rank in found["3"]:
        assert whole / 2 <= of_rank["built"] < 0.75 * whole, "half, and the part that is being built"
        assert of_rank["exported"] < 0.5 * whole, "one file, and the layer that is being gathered"


def test_the_export_of_sharded_weights_loads_and_says_the_same(found, directory):
    from transformers import AutoModelForCausalLM

    cases = list(found)
    plain, sharded = (directory / f"export-{cases.index(case)}" for case in ("0", "3"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert {path.name for path in sharded.glob("*.safetensors")} == files
    assert max((sharded / name).stat().st_size for name in files) < 3 * FILE_BYTES
    tokens = tokens_of(STEPS)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (plain, sharded)]
    with torch.no_grad():
        losses = [loss_of(model, tokens[:, :-1], tokens[:, 1:]).item() for model in models]
        logits = [model(tokens[:, :-1]).logits for model in models]
    assert losses == pytest.approx([found[case][0]["losses"][-1] for case in ("0", "3")], abs=1e-6)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_the_optimizer_and_the_weights_can_wait_on_a_disk(found, small_shards, tmp_path):
    offload = {"optimizer": "nvme", "parameters": "nvme", "directory": str(tmp_path / "nvme")}
    buffers = {"zero_optimization": {"offload_param": {"buffer_size": 100_000}}}
    case = {"zero_stage": 3, "offload": offload, "deepspeed": buffers}
    if missing := missing_operations(TrainConfig(steps=1, **case)):
        pytest.skip(missing)
    (tmp_path / "nvme").mkdir()
    on_disk = measure(tmp_path, small_shards[0], {"nvme": case})["nvme"]
    assert on_disk[0]["losses"] == pytest.approx(found["0"][0]["losses"], abs=1e-5)
    assert any(path.stat().st_size for path in (tmp_path / "nvme").rglob("*") if path.is_file())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="ZeRO++ quantises with CUDA kernels")
@pytest.mark.parametrize("key", ["quantized_weights", "quantized_gradients"])
def test_quantised_communication_learns_alike(small_shards, tmp_path, key):
    ranks = min(2, torch.cuda.device_count())
    cases = {"plain": {"zero_stage": 3}, "quantised": {"zero_stage": 3, "communication": {key: True}}}
    both = measure(tmp_path, small_shards[0], cases, ranks=ranks, precision="bf16")
    plain, quantised = both["plain"][0]["losses"], both["quantised"][0]["losses"]
    assert quantised == pytest.approx(plain, abs=0.05)
    assert quantised[-1] < quantised[0]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"offload": {"optimizer": "cpu"}}, r"offload: optimizer: cpu needs zero_stage 1 or more \(it is 0\)"),
        (
            {"zero_stage": 2, "offload": {"optimizer": "nvme", "directory": "/x"}},
            r"offload: optimizer: nvme needs zero_stage 3 or more \(it is 2\)",
        ),
        ({"zero_stage": 2, "offload": {"parameters": "cpu"}}, "offload: parameters: cpu needs zero_stage 3"),
        ({"communication": {"overlap": True}}, "communication: overlap needs zero_stage 1"),
        ({"communication": {"reduce_bucket_size": 5}}, "communication: reduce_bucket_size needs zero_stage 1"),
        ({"zero_stage": 2, "communication": {"quantized_weights": True}}, "quantized_weights needs zero_stage 3"),
        (
            {"zero_stage": 3, "ranks": 4, "communication": {"secondary_partition_size": 3}},
            "secondary_partition_size=3 does not divide the 4 ranks",
        ),
        (
            {"deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}}},
            "zero_optimization.offload_param.device cannot be set here; it is train.offload.parameters",
        ),
    ],
)
def test_what_deepspeed_refuses_or_ignores_is_refused_with_its_key(train, message):
    with pytest.raises(ValidationError, match=message):
        TrainConfig(steps=1, **train)


def test_a_disk_for_offload_is_asked_for_where_it_is_needed_and_only_there():
    with pytest.raises(ValidationError, match="directory: set it for"):
        OffloadConfig(optimizer="nvme")
    with pytest.raises(ValidationError, match="directory: set it for"):
        OffloadConfig(optimizer="cpu", directory=Path("/x"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator has the kernels")
def test_quantised_communication_without_an_accelerator_is_missing_its_operation():
    train = TrainConfig(steps=1, zero_stage=3, communication=CommunicationConfig(quantized_weights=True))
    assert "CUDA" in (missing_operations(train) or "")


def test_missing_libraries_for_nvme_are_named(monkeypatch: pytest.MonkeyPatch):
    train = TrainConfig(steps=1, zero_stage=3, offload=OffloadConfig(optimizer="nvme", directory=Path("/x")))
    monkeypatch.setenv("PATH", "")
    assert "C++ compiler" in (missing_operations(train) or "")

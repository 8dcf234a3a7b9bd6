"""The plan: what a user got wrong is said before compute is spent, with its key and a remedy."""

import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tasks.home import Home
from tasks.plan import Plan, activations_a_rank, memory_a_rank, plan
from tasks.tokenize import DataConfig
from trainer.activations import ActivationCheckpointingConfig
from trainer.config import ModelConfig, TrainConfig
from trainer.errors import ConfigError, DataError, MachineError

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
HUGE = {**LLAMA, "hidden_size": 65_536, "intermediate_size": 262_144, "num_hidden_layers": 100}


@pytest.fixture
def work(tmp_path) -> Home:
    (tmp_path / "home").mkdir()
    (tmp_path / "text.txt").write_text("x" * 6400)
    return Home(tmp_path / "home")


def make(
    home: Home,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
) -> Plan:
    return plan(
        home,
        DataConfig.model_validate(
            {
                "sources": [str(home.path.parent / "text.txt")],
                "tokenizer": "byte",
                "sequence_length": 16,
                **(data or {}),
            }
        ),
        ModelConfig.model_validate(model or {"config": LLAMA}),
        TrainConfig.model_validate({"global_batch": 8, **(train or {"steps": 5})}),
    )


def test_a_plan_tells_files_steps_tokens_parameters_memory_and_disk(work):
    facts = make(work).facts
    embedding, attention, mlp = 257 * 32, 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 48
    parameters = embedding + 2 * (attention + mlp + 2 * 32) + 32
    assert facts["source_files"] == 1
    assert facts["text_bytes"] == 6400
    assert (facts["steps"], facts["tokens"]) == (5, 5 * 8 * 16)
    assert facts["parameters"] == parameters
    assert facts["memory_bytes_a_rank"] == 16 * parameters
    assert facts["activation_bytes_a_rank"] == 8 * 16 * (2 * 34 * 2 * 32 + 14 * 257)
    assert 0 < facts["disk_bytes_needed"] < facts["disk_bytes_free"]
    assert facts["seconds_expected"] > 0


@pytest.mark.parametrize(
    ("train", "steps"), [({"tokens": 1000}, 8), ({"tokens": 1024}, 8), ({"tokens": 1025}, 9), ({"epochs": 2}, None)]
)
def test_steps_follow_from_tokens_and_wait_for_the_shards_where_epochs_are_asked_for(work, train, steps):
    assert make(work, train=train).facts["steps"] == steps


def test_a_warm_up_longer_than_the_run_is_refused(work):
    too_long = {"tokens": 640, "schedule": {"warmup_tokens": 641}}
    with pytest.raises(ConfigError, match=r"train\.schedule\.warmup_tokens: a warm-up of 6 steps is no shorter than"):
        make(work, train=too_long)


def test_a_plan_is_the_same_plan_when_asked_again(work):
    first, second = make(work), make(work)
    assert first.sources == second.sources
    assert first.facts["parameters"] == second.facts["parameters"]
    assert json.loads(json.dumps(first.facts)) == first.facts


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"type": "lama"}, r"model.type: .*'lama'. Did you mean llama\?"),
        ({"type": "gpt-2"}, r"model.type: .*'gpt-2'. Did you mean gpt2\?"),
        (
            {"config": {"hiden_size": 8}},
            r"model.config.hiden_size: llama has no such setting. Did you mean hidden_size\?",
        ),
        ({"config": {**LLAMA, "num_attention_heads": 3}}, r"model.config: .*hidden size \(32\).*attention heads \(3\)"),
        (
            {"config": {**LLAMA, "num_key_value_heads": 3}},
            r"num_key_value_heads: 3 does not divide num_attention_heads=4",
        ),
        (
            {"config": {**LLAMA, "num_key_value_heads": 8}},
            r"num_key_value_heads: 8 does not divide num_attention_heads=4",
        ),
        ({"config": {**LLAMA, "num_hidden_layers": 0}}, r"num_hidden_layers: 0 is less than 1"),
        ({"config": {**LLAMA, "hidden_size": "32"}}, r"model.config: .*hidden_size.*expected int, got str"),
        ({"config": {**LLAMA, "vocab_size": 100}}, r"100 vocabulary entries, the tokenizer has 257. Leave"),
        (
            {"type": "gpt2", "config": {"n_embd": 30, "n_head": 4}},
            r"model.config: transformers cannot build it: .*30.*4",
        ),
        ({"type": "t5"}, r"model.config: transformers cannot build it"),
        ({"pretrained": "/nothing/here"}, r"model.pretrained: '/nothing/here' cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_by_key(work, monkeypatch, model, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make(work, model)


def test_a_pretrained_model_with_a_smaller_vocabulary_than_the_tokenizers_is_refused(work, tmp_path):
    (tmp_path / "model").mkdir()
    config = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 8, "n_head": 2, "n_layer": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="100 vocabulary entries, the tokenizer has 257"):
        make(work, {"pretrained": str(tmp_path / "model")})
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    assert make(work, {"pretrained": str(tmp_path / "model")}).facts["parameters"] > 0


def test_a_refused_model_is_refused_again(work):
    for _ in range(2):
        with pytest.raises(ConfigError, match="num_key_value_heads"):
            make(work, {"config": {**LLAMA, "num_key_value_heads": 3}})


@pytest.mark.parametrize("key", ["sources", "validation_sources"])
def test_a_missing_source_is_refused_by_key(work, tmp_path, key):
    with pytest.raises(DataError, match=rf"data.{key}\[0\]: nothing is at"):
        make(work, data={key: [str(tmp_path / "missing.txt")]})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"data.{key}\[0\]: it holds no document. First: .*a.txt: empty"),
        ("a.jsonl", "", r"data.{key}\[0\]: it holds no document. First: .*a.jsonl: empty"),
        ("a.jsonl", '{"text": ""}\n', r"data.{key}\[0\]: it holds no document. First: .*:1: field 'text' is empty"),
        ("a.jsonl", '{"body": "x"}\n' * 3, r"no record has the field 'text' \(they have: body\). Set data.text_field"),
        ("a.jsonl", '{"body": "x"}\n' * 10**6, r"no record has the field 'text'"),
        ("a.csv", "id,body\n1,x\n", r"no record has the field 'text' \(they have: body, id\)"),
        ("a.parquet", "none", r"data.{key}\[0\]: it holds no document. First: .*a.parquet: cannot be read"),
    ],
    ids=["empty", "no-records", "empty-text", "no-field", "large", "table", "damaged"],
)
@pytest.mark.parametrize("key", ["sources", "validation_sources"])
def test_a_source_without_any_text_is_refused_at_once(work, tmp_path, key, name, content, message):
    (tmp_path / name).write_text(content)
    began = time.monotonic()
    with pytest.raises(DataError, match=message.format(key=key)):
        make(work, data={key: [str(tmp_path / name)]})
    assert time.monotonic() - began < 2


def test_some_bad_records_and_empty_files_do_not_stop_a_plan(work, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number:02d}.txt").write_text("some text" if number == 11 else "")
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n' * 500 + '{"text": "some text"}\n')
    sources = [str(tmp_path / "text"), str(tmp_path / "a.jsonl")]
    assert make(work, data={"sources": sources}).facts["source_files"] == 13


def test_a_tokenizer_that_is_not_there_is_refused_by_key(work, tmp_path):
    with pytest.raises(ConfigError, match=r"data.tokenizer.path: .*cannot be loaded"):
        make(work, data={"tokenizer": str(tmp_path / "none")})


def test_a_model_larger_than_the_memory_is_refused_with_both_sizes(work):
    with pytest.raises(
        ConfigError, match=r"need [\d.]+ GiB on 1 ranks, and [\d.]+ GiB are there. Raise train.zero_stage"
    ):
        make(work, {"config": HUGE})


def test_a_disk_too_small_is_refused_with_both_sizes_and_a_remedy(work):
    with pytest.raises(
        MachineError, match=r"home: .* need about .* GiB and .* GiB are free.*lower train.checkpoint.keep"
    ):
        make(work, train={"steps": 1, "checkpoint": {"keep": 10**9}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator has fp16")
def test_fp16_without_an_accelerator_is_refused(work):
    with pytest.raises(ConfigError, match=r"train.precision: fp16 needs an accelerator; use fp32, bf16 or auto"):
        make(work, train={"steps": 1, "precision": "fp16"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="an accelerator may have FlashAttention")
def test_flash_attention_that_is_not_there_is_refused_with_another_choice(work):
    with pytest.raises(ConfigError, match=r"model.attention: flash needs .*flash-attn.* sdpa needs nothing"):
        make(work, model={"config": LLAMA, "attention": "flash"})


def test_tensorboard_that_is_not_installed_is_refused_with_its_remedy(work, monkeypatch):
    monkeypatch.setattr("tasks.plan.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.tensorboard: .* pip install 'forgeline\[tensorboard\]'"):
        make(work, train={"steps": 1, "tensorboard": True})


@pytest.mark.parametrize(
    ("stage", "ranks", "mixed", "away", "bytes_a_parameter"),
    [
        (0, 1, True, [], 16),
        (0, 8, True, [], 16),
        (1, 8, True, [], 5.5),
        (2, 8, True, [], 3.75),
        (3, 8, True, [], 2),
        (3, 1, True, [], 16),
        (0, 2, False, [], 16),
        (2, 2, False, [], 12),
        (3, 2, False, [], 10),
        (1, 8, True, ["optimizer"], 2),
        (3, 8, True, ["optimizer"], 0.25),
        (3, 8, True, ["optimizer", "parameters"], 0),
    ],
)
def test_memory_a_rank_follows_table_1_of_the_zero_paper(stage, ranks, mixed, away, bytes_a_parameter):
    assert memory_a_rank(1000, stage, ranks, mixed, away) == bytes_a_parameter * 1000


def test_activations_follow_the_formula_and_fall_with_recomputation():
    sizes = SimpleNamespace(num_hidden_layers=4, hidden_size=100, vocab_size=1000)
    bytes_of = {
        str(form): activations_a_rank(sizes, 10, True, ActivationCheckpointingConfig.model_validate(form))
        for form in ["none", "selective", "full", {"mode": "full", "every": 2}, {"mode": "full", "offload": True}]
    }
    logits = 14 * 10 * 1000
    in_layers = [value - logits for value in bytes_of.values()]
    assert in_layers == [34 * 4 * 1000, (22 * 4 + 34) * 1000, (2 * 4 + 34) * 1000, (2 * 2 + 34 * 3) * 1000, 34 * 1000]


def test_an_operation_that_this_machine_cannot_build_is_refused(work, monkeypatch):
    monkeypatch.setenv("PATH", "")
    offload = {"optimizer": "nvme", "directory": "/x"}
    with pytest.raises(ConfigError, match=r"train.offload: nvme needs a C\+\+ compiler"):
        make(work, train={"steps": 1, "zero_stage": 3, "offload": offload})


# --- the work directory --------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["file/home", "file"])
def test_a_work_directory_that_cannot_be_made_is_refused_with_its_remedy(tmp_path, monkeypatch, home):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORGELINE_HOME", str(tmp_path / home))
    with pytest.raises(MachineError, match=f"{tmp_path / home}: cannot be written .*Set FORGELINE_HOME"):
        Home.locate()


def test_a_work_directory_on_a_read_only_disk_is_refused_with_its_remedy(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        for home in (disk, disk / "home"):
            monkeypatch.setenv("FORGELINE_HOME", str(home))
            with pytest.raises(MachineError, match=f"{home}: cannot be written .*Set FORGELINE_HOME"):
                Home.locate()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_work_directory_is_made_and_means_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORGELINE_HOME", "some/where")
    home = Home.locate()
    assert home.path == tmp_path / "some" / "where"
    assert list(home.path.iterdir()) == []
    monkeypatch.delenv("FORGELINE_HOME")
    assert Home.locate().path == tmp_path / ".forgeline"
    os.chdir("/")
    assert home.directory("shards", "x") == Path(tmp_path / "some/where/shards/x")


def test_the_tracking_store_is_the_homes_unless_the_environment_names_one(work, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert work.tracking_uri == f"sqlite:///{work.path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert work.tracking_uri == "http://127.0.0.1:1"


def test_divided_experts_take_their_part_of_memory_and_a_token_meets_few_of_them(work):
    sizes = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1}
    train = {"steps": 5, "ranks": 2, "parallel": {"expert": 2}}
    facts = make(work, {"type": "mixtral", "config": sizes}, train=train).facts
    experts = 2 * 4 * 3 * 32 * 48
    assert facts["active_parameters"] == facts["parameters"] - experts * 3 // 4
    assert facts["memory_bytes_a_rank"] == 16 * (facts["parameters"] - experts // 2)


def test_sequences_that_ranks_share_have_no_document_mask(work):
    with pytest.raises(
        ConfigError, match=r"data.document_mask: true cannot be combined with train.parallel.sequence=2"
    ):
        make(work, data={"document_mask": True}, train={"steps": 5, "ranks": 2, "parallel": {"sequence": 2}})


@pytest.mark.parametrize(
    ("adapter", "train", "message"),
    [
        ({"type": "qlora"}, {"zero_stage": 3}, r"train\.zero_stage: 3 cannot divide the 4-bit weights"),
        ({}, {"ranks": 2, "parallel": {"sequence": 2}}, r"train\.parallel\.sequence: cannot be combined with model"),
        ({"target_modules": ["c_attn"]}, {}, r"model\.adapter\.target_modules: the model has no layer 'c_attn'"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(work, adapter, train, message):
    base = work.path.parent / "base"
    LlamaConfig(**LLAMA, vocab_size=257, max_position_embeddings=16).save_pretrained(base)
    with pytest.raises(ConfigError, match=message):
        make(work, model={"pretrained": str(base), "adapter": adapter}, train={"steps": 5, **train})


def test_an_adapter_needs_memory_and_disk_for_itself_alone_beside_the_frozen_weights(work):
    base = work.path.parent / "base"
    LlamaConfig(**LLAMA, vocab_size=257, max_position_embeddings=16).save_pretrained(base)
    whole = make(work, model={"pretrained": str(base)}, train={"steps": 5, "precision": "fp32"}).facts
    facts = make(
        work, model={"pretrained": str(base), "adapter": {"rank": 1}}, train={"steps": 5, "precision": "fp32"}
    ).facts
    trained = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert (facts["parameters"], facts["trained_parameters"]) == (whole["parameters"], trained)
    assert facts["memory_bytes_a_rank"] == 4 * facts["parameters"] + 16 * trained
    assert facts["disk_bytes_needed"] < whole["disk_bytes_needed"]

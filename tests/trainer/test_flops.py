"""The model's arithmetic agrees with torch's own counter, and the device's peak with what is known of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.flops import flops_per_token, peak_flops

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
GROUPED = {**SIZES, "intermediate_size": 112, "num_key_value_heads": 2}


def built(kind: str, **settings: Any) -> Any:
    """A model with random weights whose attention torch's counter sees as matrix products."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager")


def counted(model: Any, sequence_length: int) -> float:
    """Operations a token, as `torch.utils.flop_counter` counts a forward and backward pass."""
    tokens = torch.zeros(2, sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {**GROUPED, "tie_word_embeddings": True}),
        ("llama", {**GROUPED, "tie_word_embeddings": False}),
        ("qwen3", {**GROUPED, "head_dim": 24}),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32}),
    ],
    ids=["tied", "untied", "wide heads", "gpt2"],
)
def test_the_formula_counts_what_torch_counts(kind, settings):
    model = built(kind, **settings)
    # what torch counts besides is a rotary embedding's outer product
    assert flops_per_token(model, 32) == pytest.approx(counted(model, 32), rel=1e-3)


def test_only_the_chosen_experts_count():
    sizes = {**GROUPED, "num_local_experts": 8, "num_experts_per_tok": 2}
    routed = flops_per_token(built("mixtral", **sizes), 32)
    dense = flops_per_token(built("mixtral", **{**sizes, "num_local_experts": 2}), 32)
    router = 6 * 3 * 64 * (8 - 2)
    assert routed == dense + router


def test_a_window_bounds_what_is_attended_to():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**GROUPED, "head_dim": 16, "layer_types": kinds, "sliding_window": 8, "use_sliding_window": True}
    model = built("qwen3", **sizes)
    assert flops_per_token(model, 32) - flops_per_token(model, 16) == 12 * 4 * 16 * 16


def test_a_frozen_matrix_has_no_gradient_to_compute():
    model = built("llama", **{**GROUPED, "tie_word_embeddings": False})
    trained = flops_per_token(model, 32)
    model.lm_head.weight.requires_grad_(False)
    assert trained - flops_per_token(model, 32) == 2 * 64 * 96


def test_a_measured_peak_is_kept_for_the_run(tmp_path: Path):
    device = torch.device("cpu")
    first = peak_flops(device, torch.float32, tmp_path)
    assert 1e8 < first["flops"] < 1e14
    assert "measured on cpu" in first["source"]
    assert peak_flops(device, torch.float32, tmp_path) == first
    assert peak_flops(device, torch.bfloat16, tmp_path)["source"] != first["source"]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.float16, 989e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989e12),
        ("AMD Instinct MI300X", torch.bfloat16, 1307e12),
    ],
)
def test_a_known_accelerator_has_its_data_sheets_rate(monkeypatch, tmp_path, name, dtype, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda", 0), dtype, tmp_path)["flops"] == peak

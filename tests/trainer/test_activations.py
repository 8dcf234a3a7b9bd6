"""Activation checkpointing keeps gradients and saves memory; both are counted on a real model."""

import gc
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.trainer.live_bytes import LiveBytes
from trainer.activations import ActivationCheckpointingConfig, checkpoint_activations
from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.model import loss_of, model_configuration

LAYERS = 6
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(architecture: str = "llama", **sizes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings = model_configuration(ModelConfig(type=architecture, config=sizes or SIZES), 300, 128)
    return AutoModelForCausalLM.from_config(settings).train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(300, (4, 128))
    loss_of(model, tokens, tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def kept_bytes(form: Any) -> int:
    """What the forward pass through the layers leaves for the backward pass."""
    model = build()
    checkpoint_activations(model, ActivationCheckpointingConfig.model_validate(form))
    tokens = torch.zeros(4, 128, dtype=torch.long)
    with LiveBytes(model.parameters()) as live:
        output = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    gc.collect()
    return live.now - output.nbytes


FORMS: list[Any] = ["full", "selective", {"mode": "full", "every": 3}, {"mode": "selective", "offload": True}]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_gradients_are_the_same_bits_in_every_form(architecture):
    sizes = {"n_embd": 64, "n_layer": 3, "n_head": 4} if architecture == "gpt2" else {**SIZES, "attention_dropout": 0.1}
    expected = gradients(build(architecture, **sizes))
    for form in FORMS:
        model = build(architecture, **sizes)
        checkpoint_activations(model, ActivationCheckpointingConfig.model_validate(form))
        found = gradients(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), form


def test_memory_falls_from_none_to_selective_to_full():
    none, selective, full, every_second = map(kept_bytes, ["none", "selective", "full", {"mode": "full", "every": 2}])
    inputs = LAYERS * 4 * 128 * SIZES["hidden_size"] * 4
    assert inputs <= full < 1.5 * inputs, "a layer keeps its input and little else"
    assert full < 0.1 * none
    assert full < selective < 0.6 * none
    assert every_second == pytest.approx((none + full) / 2, rel=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on CPUs the activations are in the host's memory already")
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_offloaded_activations_leave_the_accelerator(mode):
    used = []
    for offload in (False, True):
        model = build().cuda()
        checkpoint_activations(model, ActivationCheckpointingConfig(mode=mode, offload=offload))
        before = torch.cuda.memory_allocated()
        output = model.model(input_ids=torch.zeros(16, 128, dtype=torch.long, device="cuda"), use_cache=False)
        used.append(torch.cuda.memory_allocated() - before)
        output.last_hidden_state.sum().backward()
    assert used[1] < 0.5 * used[0]


def test_a_model_whose_layers_cannot_be_recomputed_is_refused():
    model = build()
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(ConfigError, match=r"train.activation_checkpointing: .* cannot recompute layers of Llama"):
            checkpoint_activations(model, ActivationCheckpointingConfig(mode="full"))
    finally:
        type(model).supports_gradient_checkpointing = before


def test_keys_that_need_a_mode_are_refused_without_one():
    with pytest.raises(ValidationError, match="every and offload need mode"):
        ActivationCheckpointingConfig(every=2)

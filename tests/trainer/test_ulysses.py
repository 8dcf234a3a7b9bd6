"""Ranks that share every sequence train as one rank with whole sequences does."""

from collections.abc import Callable

import pytest

from tests.trainer.conftest import run
from tests.trainer.test_experts import logits, recorded
from tests.trainer.test_resume import resume_in_the_same_bits
from trainer.config import ModelConfig, TrainerInput
from trainer.errors import ConfigError

LLAMA = {"attention_dropout": 0.0, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize(("model", "zero_stage", "ranks"), [("llama", 1, 4), ("gpt2", 3, 2)])
def test_shared_sequences_train_as_whole_ones_do(
    new_run: Callable[..., TrainerInput], model: str, zero_stage: int, ranks: int
) -> None:
    def make(name: str, **train: object) -> TrainerInput:
        clipped = {"gradient_clipping": 0.1, "evaluation": {"every": 3, "batches": 1}}
        settings = new_run(name, model=LLAMA, **clipped, **train)
        return (
            settings
            if model == "llama"
            else settings.model_copy(update={"model": ModelConfig(type=model, config=GPT2)})
        )

    whole = make("whole", ranks=1, micro_batch=8)
    run(whole)
    shared = make("shared", ranks=ranks, zero_stage=zero_stage, parallel={"sequence": 2})
    run(shared)
    for key in ("train/loss", "train/gradient_norm", "validation/loss"):
        assert recorded(shared, key) == pytest.approx(recorded(whole, key), rel=1e-4), key
    assert recorded(shared, "train/tokens") == recorded(whole, "train/tokens")
    assert (logits(shared.export_dir) - logits(whole.export_dir)).abs().max() < 1e-3

    resume_in_the_same_bits(shared)


def test_a_model_that_mixes_places_otherwise_is_refused(new_run: Callable[..., TrainerInput]) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = ModelConfig(type="lfm2", config={**layers, **sizes})
    settings = new_run("convolutions", parallel={"sequence": 2}).model_copy(update={"model": model})
    with pytest.raises(ConfigError, match=r"parallel.sequence: a 'lfm2' model .* cannot share sequences: 1 of its 2"):
        run(settings)

"""Low-rank adapters for continuing from a large model: PEFT puts them in and merges them, bitsandbytes holds 4 bits.

The base weights are frozen, so that gradients, optimizer and checkpoints are those of the adapter alone.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import Field

from trainer.errors import ConfigError
from trainer.parallel import ParallelConfig
from trainer.settings import Settings, nearest


class AdapterConfig(Settings):
    """An adapter: two thin matrices beside each chosen layer, which alone are trained (Hu et al. 2021)."""

    type: Literal["lora", "qlora"] = "lora"
    """lora; or qlora, which holds the base weights in 4 bits: where they do not fit otherwise (zero_stage 0 to 2)."""
    rank: Annotated[int, Ge(1)] = 16
    """Inner size of the matrices: more can learn more, and costs memory in proportion."""
    alpha: Annotated[int, Ge(1)] = 32
    """Scale of what the adapter adds: alpha / rank."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of the adapter's inputs that are dropped in training: against overfitting on little data."""
    target_modules: Annotated[list[str], Field(min_length=1)] | None = None
    """Names of the layers that get one (q_proj, v_proj, …). Unset: every linear layer but the output head."""


def check_adapter(adapter: AdapterConfig, zero_stage: int, precision: str, parallel: ParallelConfig) -> None:
    """Refuse what an adapter cannot be combined with.

    Raises:
        ConfigError: the key, and what it may be.
    """
    for key in ("tensor", "pipeline", "expert", "sequence"):
        if getattr(parallel, key) > 1:
            raise ConfigError(f"train.parallel.{key}: cannot be combined with model.adapter; set it to 1.")
    if precision == "fp8":
        raise ConfigError("train.precision: fp8 cannot be combined with model.adapter; use bf16.")
    if adapter.type == "qlora" and zero_stage == 3:
        raise ConfigError(
            "train.zero_stage: 3 cannot divide the 4-bit weights of model.adapter.type: qlora; use 0, 1 or 2, or lora."
        )


def frozen_bytes(adapter: AdapterConfig, parameters: int, whole: int) -> int:
    """About how many bytes the frozen weights take.

    Args:
        parameters: how many there are.
        whole: bytes of one of them where it is not in 4 bits.
    """
    # 4 bits and the scales of blocks of 64; embeddings and output head stay whole, which is little in a large model
    return int(parameters * (0.6 if adapter.type == "qlora" else whole))


def load_in_4_bits(pretrained: str, dtype: Any, settings: Any = None) -> Any:
    """Pretrained weights with their linear layers but the output head in 4 bits (QLoRA, Dettmers et al. 2023).

    Args:
        dtype: the torch type of everything else, in which the layers compute.
        settings: the model's transformers configuration, where another than the weights' own.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    try:
        kind = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model = AutoModelForCausalLM.from_pretrained(pretrained, config=settings, dtype=dtype, quantization_config=kind)
    except ImportError as error:
        raise ConfigError(
            f"model.adapter.type: qlora needs bitsandbytes: pip install 'forgeline[adapters]' ({error})"
        ) from None
    layers: Any = model.modules()
    for module in layers:
        # on some CPUs bitsandbytes repacks weights to evaluate and packs them back to train, rounding them each time
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def add_adapter(model: Any, adapter: AdapterConfig) -> None:
    """Put a new adapter into a transformers model, in place, and freeze everything else.

    A new adapter adds nothing yet: one of its matrices is random, the other zero.

    Raises:
        ConfigError: the model has no such layers, or PEFT is not installed.
    """
    layers = dict(model.named_modules())
    for target in adapter.target_modules or []:
        chosen = [layer for name, layer in layers.items() if name == target or name.endswith(f".{target}")]
        if not chosen:
            hint = nearest(target, {name.rpartition(".")[2] for name in layers} - {""})
            raise ConfigError(f"model.adapter.target_modules: the model has no layer {target!r}.{hint}")
        if model.get_output_embeddings() in chosen:  # it may be tied to the embeddings, which stay
            raise ConfigError(f"model.adapter.target_modules: {target} is the output head, which cannot be adapted.")
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("model.adapter: it needs PEFT: pip install 'forgeline[adapters]'") from None
    try:
        inject_adapter_in_model(_peft_configuration(LoraConfig, adapter), model)
    except ValueError as error:
        raise ConfigError(f"model.adapter.target_modules: refused by PEFT: {error}") from None


def _peft_configuration(kind: Any, adapter: AdapterConfig) -> Any:
    return kind(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )


def merge_adapter(base: Any, adapter: AdapterConfig, weights: Iterable[dict[str, Any]], directory: Path) -> Any:
    """The base model with a trained adapter merged into it: without one, and with the same logits.

    Args:
        base: the model that was adapted, as it was loaded, without an adapter; it is used up.
        weights: groups of the adapted model's weights by name.
        directory: where the adapter is written for itself, as PEFT loads it.
    """
    from peft import LoraConfig, get_peft_model

    if getattr(base, "is_quantized", False):
        base = base.dequantize()  # what was trained beside: merging into 4 bits would round a second time
    adapted = get_peft_model(base, _peft_configuration(LoraConfig, adapter))
    trained = {
        f"base_model.model.{name}": value for group in weights for name, value in group.items() if ".lora_" in name
    }
    refused = adapted.load_state_dict(trained, strict=False).unexpected_keys
    assert trained and not refused, refused
    adapted.save_pretrained(directory)
    return adapted.merge_and_unload()

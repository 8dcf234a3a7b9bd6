"""The plan stage: checks everything that can be checked before compute is spent, and says what it will cost."""

import math
import os
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefect import task
from pydantic import BaseModel, ConfigDict

from tasks.chat import chat_template
from tasks.home import Home
from tasks.reading import check_first_records
from tasks.sources import SourceFile, resolve
from tasks.tokenize import DataConfig, sources_fingerprint
from tasks.tokenizer import TokenizerConfig, load_pretrained
from tasks.train import planned_steps
from trainer.activations import ActivationCheckpointingConfig
from trainer.adapters import check_adapter, frozen_bytes
from trainer.config import ModelConfig, TrainConfig
from trainer.durable import read_record, write_record
from trainer.errors import ConfigError, MachineError
from trainer.parallel import check_model
from trainer.schedule import steps_of_warmup
from trainer.settings import fingerprint

FORMAT_VERSION = 2
_BYTES_A_TOKEN = 3.5
"""Rough bytes of text a token, to estimate tokens before there are any."""
_UTILISATION = 0.3
"""Share of the matrix-product rate that training is assumed to reach."""


_SIZING = {"zero_stage", "ranks", "parallel", "precision", "offload", "activation_checkpointing"}
_SIZING |= {"micro_batch", "global_batch"}
"""Keys of the training section that the model's memory depends on."""


class Plan(BaseModel):
    """What a run will do and need."""

    model_config = ConfigDict(frozen=True)

    files: list[SourceFile]
    validation_files: list[SourceFile]
    sources: str
    """Fingerprint of the raw text."""
    facts: dict[str, Any]
    """text_bytes, steps and tokens (None while they depend on the shards), parameters,
    trained_parameters, memory_bytes_a_rank, activation_bytes_a_rank (which shrink by themselves where memory runs
    out), memory_bytes_available, disk_bytes_needed, disk_bytes_free, seconds_expected."""


def plan(home: Home, data: DataConfig, model: ModelConfig, train: TrainConfig) -> Plan:
    """Check sources, batch, model, memory and disk.

    Raises:
        UserError: what is wrong, with its key.
    """
    files = resolve(home, data.sources, "data.sources")
    validation_files = resolve(home, data.validation_sources, "data.validation_sources")
    check_first_records(files, data.reading, "data.sources")
    check_first_records(validation_files, data.reading, "data.validation_sources")
    if train.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("train.tensorboard: TensorBoard is not installed: pip install 'forgeline[tensorboard]'")
    if model.attention == "flash":
        from trainer.model import attention_kernel

        attention_kernel(model.attention)
        if train.precision == "fp32":
            raise ConfigError("model.attention: flash has no fp32; set train.precision: bf16, or model.attention: sdpa")
    if train.precision in ("fp16", "fp8"):
        from trainer.precision import check_precision

        check_precision(train)
    if data.document_mask and train.parallel.sequence > 1:
        raise ConfigError(
            f"data.document_mask: true cannot be combined with train.parallel.sequence={train.parallel.sequence}, "
            "where attention has no mask. Set document_mask to false or sequence to 1."
        )
    if train.needs_operations:
        from trainer.engine import missing_operations

        if missing := missing_operations(train):
            raise ConfigError(missing)
    if data.messages_field:
        chat_template(load_pretrained(data.tokenizer))
    if model.adapter:
        check_adapter(model.adapter, train.zero_stage, train.precision, train.parallel)
    text_bytes = sum(file.size for file in files + validation_files)
    tokens_in_text = text_bytes / (1 if data.tokenizer.type in ("byte", "char") else _BYTES_A_TOKEN)
    exact = train.epochs is None
    steps = planned_steps(train, data.sequence_length, int(tokens_in_text / data.sequence_length))
    tokens = steps * train.global_batch * data.sequence_length
    if exact:
        steps_of_warmup(train.schedule, steps, train.global_batch * data.sequence_length)
    facts = {
        "source_files": len(files),
        "text_bytes": text_bytes,
        "steps": steps if exact else None,
        "tokens": tokens if exact else None,
        **_model_facts(home, data, model, train),
    }
    memory = facts["memory_bytes_a_rank"] * train.ranks
    facts["memory_bytes_available"] = _memory_available(train.ranks)
    if memory > facts["memory_bytes_available"]:
        raise ConfigError(
            f"train: weights, gradients and optimizer need {memory / 2**30:.1f} GiB on {train.ranks} ranks, and "
            f"{facts['memory_bytes_available'] / 2**30:.1f} GiB are there. Raise train.zero_stage or train.ranks, "
            "set train.offload, or shrink the model."
        )
    parameters, trained = facts["parameters"], facts["trained_parameters"]
    facts["disk_bytes_needed"] = int(tokens_in_text * 4 + trained * 16 * (train.checkpoint.keep + 1) + parameters * 4)
    facts["disk_bytes_free"] = shutil.disk_usage(home.path).free
    if facts["disk_bytes_needed"] > facts["disk_bytes_free"]:
        raise MachineError(
            f"{home.path}: shards and checkpoints need about {facts['disk_bytes_needed'] / 2**30:.1f} GiB and "
            f"{facts['disk_bytes_free'] / 2**30:.1f} GiB are free. Free space, set FORGELINE_HOME, "
            "or lower train.checkpoint.keep."
        )
    # 2 a parameter and token forward, 2 backward to the layer below, and 2 to the parameter where it is trained
    trained_share = trained / parameters
    facts["seconds_expected"] = (4 + 2 * trained_share) * facts["active_parameters"] * tokens / facts["flops_a_second"]
    return Plan(files=files, validation_files=validation_files, sources=sources_fingerprint(files), facts=facts)


def _model_facts(home: Home, data: DataConfig, model: ModelConfig, train: TrainConfig) -> dict[str, Any]:
    """Size and speed of the model, remembered, because finding out means importing torch."""
    if model.pretrained and Path(model.pretrained).is_dir():
        origin = (
            (Path(model.pretrained) / "config.json").read_text()
            if (Path(model.pretrained) / "config.json").is_file()
            else ""
        )
    else:
        origin = model.pretrained or ""
    name = fingerprint(
        "plan",
        FORMAT_VERSION,
        model=model.identity(),
        origin=origin,
        tokenizer=data.tokenizer.identity(),
        sequence_length=data.sequence_length,
        train=train.model_dump(mode="json", include=_SIZING),
    )
    file = home.directory("plans", f"{name}.json")
    if remembered := read_record(file):
        return remembered
    import torch

    from trainer.flops import matrix_product_rate
    from trainer.model import count_expert_parameters, count_parameters, model_configuration

    settings = model_configuration(model, _vocabulary_size(data.tokenizer), data.sequence_length)
    _check_sizes(settings)
    check_model(train.parallel, settings, data.sequence_length)
    parameters, trained = count_parameters(settings, model.adapter)
    on_gpu = torch.cuda.is_available()
    rate = matrix_product_rate(torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32)
    layout = train.layout
    elsewhere = ("cpu", "nvme") if on_gpu else ("nvme",)
    away = [key for key in ("optimizer", "parameters") if getattr(train.offload, key) in elsewhere]
    mixed = train.precision in ("bf16", "fp16") or (train.precision == "auto" and on_gpu)
    tokens = (train.micro_batch or train.global_batch // layout.data) * data.sequence_length
    experts, met = count_expert_parameters(settings)
    held = (parameters - experts) // (layout.tensor * layout.pipeline)  # taken to be divided evenly
    divided = train.parallel.expert
    memory = memory_a_rank(held, train.zero_stage, layout.averaged, mixed, away)
    memory += memory_a_rank(experts // divided, train.zero_stage, layout.averaged // divided, mixed, away)
    if model.adapter:
        memory = memory_a_rank(trained, train.zero_stage, layout.averaged, mixed, away)
        frozen = frozen_bytes(model.adapter, parameters, whole=2 if mixed else 4)
        memory += 0 if "parameters" in away else frozen // (layout.averaged if train.zero_stage == 3 else 1)
    facts = {
        "parameters": parameters,
        "trained_parameters": trained,
        "active_parameters": parameters - int(experts * (1 - met)),
        "memory_bytes_a_rank": memory,
        "activation_bytes_a_rank": activations_a_rank(
            settings.get_text_config(), tokens // layout.sequence, mixed, train.activation_checkpointing
        ),
        "flops_a_second": rate * _UTILISATION,
    }
    write_record(file, facts)
    return facts


def _check_sizes(settings: Any) -> None:
    """Refuse sizes that transformers builds a model with and then fails on in the first step."""
    sizes = settings.get_text_config()
    layers, heads, groups = (
        getattr(sizes, key, None) for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    if isinstance(layers, int) and layers < 1:
        raise ConfigError(f"model.config.num_hidden_layers: {layers} is less than 1.")
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ConfigError(
            f"model.config.num_key_value_heads: {groups} does not divide num_attention_heads={heads} "
            "(unset, it has the architecture's default)."
        )


def memory_a_rank(parameters: int, zero_stage: int, replicas: int, mixed: bool, away: Collection[str] = ()) -> int:
    """Bytes of weights, gradients and Adam's states on one rank's device, without activations.

    2 + 2 + 12 bytes a parameter in mixed precision, 4 + 4 + 8 in fp32 (12 with ZeRO, where DeepSpeed keeps a copy of
    the weights with the optimizer). ZeRO divides the optimizer's by the number of ranks (stage 1), also the gradients
    (2), also the weights (3): Rajbhandari et al. 2020, table 1. An offloaded optimizer takes the gradients along.

    Args:
        replicas: ranks that hold the same weights.
        mixed: bf16 or fp16 rather than fp32.
        away: `optimizer`, `parameters`: what waits in another memory.
    """
    weights, gradients = (2, 2) if mixed else (4, 4)
    states = 12 if mixed or zero_stage else 8
    kept = [
        0 if "parameters" in away else weights / (replicas if zero_stage >= 3 else 1),
        0 if "optimizer" in away else gradients / (replicas if zero_stage >= 2 else 1),
        0 if "optimizer" in away else states / (replicas if zero_stage >= 1 else 1),
    ]
    return math.ceil(parameters * sum(kept))


def activations_a_rank(sizes: Any, tokens: int, mixed: bool, config: ActivationCheckpointingConfig) -> int:
    """Rough bytes that the forward pass over ``tokens`` tokens leaves for the backward pass on one rank.

    34 bytes a token, layer and hidden unit in 16 bits with fused attention (Korthikanti et al. 2022, equation 1
    without its quadratic term), 2 where the layer keeps its input alone, 22 where it also keeps what matrix products
    and attention gave; twice that in fp32. The logits and their loss take 14 bytes an entry.

    Args:
        sizes: the text model's transformers configuration.
    """
    a_layer = 34
    kept = 0 if config.offload else {"none": a_layer, "full": 2, "selective": 22}[config.mode]
    layers = sizes.num_hidden_layers
    recomputed = 0 if config.mode == "none" else math.ceil(layers / config.every)
    held = recomputed * kept + (layers - recomputed) * a_layer + (a_layer if recomputed else 0)
    return tokens * (held * sizes.hidden_size * (1 if mixed else 2) + 14 * sizes.vocab_size)


def _vocabulary_size(tokenizer: TokenizerConfig) -> int:
    """The tokenizer's size where the configuration tells it; for char a guess that only affects estimates."""
    if tokenizer.type == "pretrained":
        return len(load_pretrained(tokenizer))
    return {"bpe": tokenizer.vocabulary_size, "byte": 257, "char": 128}[tokenizer.type]


def _memory_available(ranks: int) -> int:
    """Memory that ``ranks`` processes on this host may use together: the accelerators', or the machine's."""
    if shutil.which("nvidia-smi"):
        import torch

        if torch.cuda.is_available():
            return sum(
                torch.cuda.get_device_properties(n).total_memory for n in range(min(ranks, torch.cuda.device_count()))
            )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@task(name="plan", task_run_name="plan")
def plan_task(home: Home, data: DataConfig, model: ModelConfig, train: TrainConfig) -> Plan:
    """Check everything before compute is spent."""
    return plan(home, data, model, train)

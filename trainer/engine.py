"""DeepSpeed: its configuration, its start, and its weights at the end; `experts` and `ulysses` divide more."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from pydantic import ValidationError
from torch import distributed, nn

from trainer import experts
from trainer.config import TrainConfig, TrainerInput
from trainer.errors import ConfigError
from trainer.optimizers import build_optimizer
from trainer.parallel import WHOLE_MATRIX_OPTIMIZERS


def start_process_group(device: torch.device) -> None:
    """Join the ranks that the launcher started (gloo on CPUs, NCCL on GPUs)."""
    import deepspeed

    # DeepSpeed would compile a shared-memory all-reduce for CPUs at first use: it needs a C++
    # compiler, and its named shared memory outlives a killed run. gloo needs neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)


def deepspeed_configuration(settings: TrainerInput, load_universal: bool) -> dict[str, Any]:
    """DeepSpeed's JSON for a run, with the user's ``train.deepspeed`` merged over it."""
    train = settings.train
    generated: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": settings.accumulation_steps,
        "gradient_clipping": train.gradient_clipping,
        "steps_per_print": 2**31,
        "bf16": {"enabled": settings.precision in ("bf16", "fp8")},
        "fp16": {"enabled": settings.precision == "fp16"},
        "torch_autocast": {
            "enabled": settings.precision == "autocast",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # those whose gradients would be reduced in bf16
        },
        "zero_optimization": _zero_optimization(settings),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": load_universal},
    }
    if train.flops_profile_step:
        generated["flops_profiler"] = {
            "enabled": True,
            "profile_step": train.flops_profile_step - 1,  # steps completed before it
            "output_file": str(settings.run_dir / "profile" / "flops.txt"),
        }
    if train.communication.gradient_dtype:
        generated["communication_data_type"] = train.communication.gradient_dtype
    if train.parallel.expert > 1:
        generated["expert_parallel"] = {"enabled": True, "autoep_size": train.parallel.expert}
    return _merged(generated, train.deepspeed)


def _zero_optimization(settings: TrainerInput) -> dict[str, Any]:
    """What of DeepSpeed's `zero_optimization` the configuration decides."""
    communication, offload = settings.train.communication, settings.train.offload
    chosen: dict[str, Any] = {
        "overlap_comm": communication.overlap,
        "reduce_bucket_size": communication.reduce_bucket_size,
        "allgather_bucket_size": communication.gather_bucket_size,
        "stage3_prefetch_bucket_size": communication.gather_bucket_size,
    }
    for key, device in (("offload_optimizer", offload.optimizer), ("offload_param", offload.parameters)):
        if device != "none":
            nvme = {"nvme_path": str(offload.directory)} if device == "nvme" else {}
            chosen[key] = {"device": device, "pin_memory": offload.pinned, **nvme}
    return {
        "stage": zero_stage(settings),
        "stage3_gather_16bit_weights_on_model_save": True,
        "zero_quantized_weights": communication.quantized_weights,
        "zero_quantized_gradients": communication.quantized_gradients,
        "zero_hpz_partition_size": communication.secondary_partition_size,
        **{key: value for key, value in chosen.items() if value is not None},
    }


def zero_stage(settings: TrainerInput) -> int:
    """DeepSpeed's ZeRO stage in force: 0 where the optimizer shards by whole parameters itself.

    bf16 and fp16 take at least 1: DeepSpeed's wrapper for stage 0 steps the optimizer once on gradients of
    zero when it starts, so that Adam's bias correction would be a step ahead from then on.
    """
    if settings.train.optimizer in WHOLE_MATRIX_OPTIMIZERS:
        return 0
    return max(settings.train.zero_stage, int(settings.precision in ("bf16", "fp16", "fp8")))


def _merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


def shard_parts(settings: TrainerInput) -> Callable[[nn.Module], None]:
    """What to do with a part of the model that has got its weights: ZeRO 3 divides them over the ranks at once."""
    if zero_stage(settings) < 3:
        return lambda part: None
    import deepspeed

    sharding = deepspeed.zero.Init(config_dict_or_path=deepspeed_configuration(settings, load_universal=False))
    # its public way, Init(module=part), cannot be used twice with a secondary partition
    return lambda part: sharding._convert_to_zero_parameters(part.parameters())


def missing_operations(train: TrainConfig) -> str | None:
    """What a run needs of DeepSpeed's compiled operations and this machine cannot build: which keys, and the remedy."""
    if train.communication.quantized and not torch.cuda.is_available():
        return (
            "train.communication: quantized_weights and quantized_gradients need CUDA GPUs, for DeepSpeed quantises "
            "with kernels for these alone. Set them to false; gradient_dtype: bf16 works everywhere."
        )
    if "nvme" not in (train.offload.optimizer, train.offload.parameters):
        return None
    if not (shutil.which("g++") and shutil.which("ninja")):
        return "train.offload: nvme needs a C++ compiler and ninja, to build DeepSpeed's I/O. Install g++ and ninja."
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible():
        return None
    return "train.offload: nvme needs the library libaio with its headers. Install libaio-dev (Debian) or libaio-devel."


def start_engine(model: nn.Module, settings: TrainerInput, load_universal: bool) -> Any:
    """A DeepSpeed engine over ``model`` with the configured optimizer."""
    import deepspeed

    from trainer.background_saving import BackgroundSaving

    try:
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=_optimizer_of(model, settings.train),
            config=deepspeed_configuration(settings, load_universal),
            dist_init_required=False,
        )
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"train.deepspeed: refused by DeepSpeed: {problems}") from None
    engine.checkpoint_engine = BackgroundSaving()
    engine.clip_fp32_gradients = partial(_clip_and_keep_norm, engine)
    if distributed.get_world_size() == 1 and engine.zero_optimization_stage() == 0:
        # one rank has nobody to average with, and DeepSpeed would copy all gradients into a buffer and back
        engine.enable_backward_allreduce = False
    return engine


def _optimizer_of(model: nn.Module, train: TrainConfig) -> Any:
    """The optimizer, or what makes it once the experts are divided, which replaces parameters."""
    if train.parallel.expert == 1:
        return build_optimizer(model, train)
    experts.mend_registry()
    return lambda _: experts.group_experts(build_optimizer(model, train))


def _clip_and_keep_norm(engine: Any) -> None:
    """In fp32 without ZeRO, DeepSpeed clips by a norm that it then forgets; this keeps it to be recorded."""
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    norm = experts.gradient_norm(parameters)
    torch.nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping(), norm)
    engine._global_grad_norm = norm


def shards_optimizer(settings: TrainerInput) -> bool:
    """Whether the optimizer's state is divided over the ranks, so that another world size needs a conversion."""
    return zero_stage(settings) > 0


def convert_to_universal(source: str, target: str) -> None:
    """Rewrite a DeepSpeed checkpoint so that any number of ranks can load it."""
    from types import SimpleNamespace

    from deepspeed.checkpoint.ds_to_universal import main

    workers = min(4, os.cpu_count() or 1)
    main(
        SimpleNamespace(
            input_folder=source,
            output_folder=target,
            num_extract_workers=workers,
            num_merge_workers=workers,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def whole_weights(engine: Any) -> Iterator[dict[str, torch.Tensor]]:
    """The model's weights, each once, as whole tensors: a layer's at a time, on rank 0; others see nothing.

    Every rank has to walk through them, for ZeRO 3 gathers a layer while it is looked at.
    """
    import deepspeed

    lead, module = engine.global_rank == 0, engine.module
    parameters = dict(module.named_parameters())
    for _, names in groupby(parameters, key=lambda name: re.match(r"(?:.*?\.\d+\.)?", name)[0] or name):  # type: ignore[index]
        group = {name: parameters[name] for name in names}
        with deepspeed.zero.GatheredParameters(list(group.values()), enabled=engine.zero_optimization_stage() == 3):
            whole = experts.whole_layer(group) if engine.has_moe_layers else group
            yield {name: weight.detach().cpu() for name, weight in whole.items()} if lead else {}
    buffers = dict(module.named_buffers()).keys() & module.state_dict().keys()
    yield {name: module.get_buffer(name).cpu() for name in sorted(buffers)} if lead else {}

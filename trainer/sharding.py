"""Where a model's state is kept and how ranks exchange it: the keys of offload and communication."""

from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import PositiveInt, model_validator

from trainer.settings import Settings


class OffloadConfig(Settings):
    """What waits outside the accelerator's memory (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity, Rajbhandari 2021)."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Optimizer state, which the host updates: cpu (zero_stage 1 or more) or nvme (3), when it does not fit."""
    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Weights between their uses (zero_stage 3): when sharding them over the ranks is not enough."""
    directory: Path | None = None
    """Directory on a fast local disk, for nvme."""
    pinned: bool = True
    """Page-locked host memory, for faster copies; turn it off where the host's memory is short."""

    @model_validator(mode="after")
    def _directory_for_nvme(self) -> "OffloadConfig":
        if ("nvme" in (self.optimizer, self.parameters)) != (self.directory is not None):
            raise ValueError("directory: set it for optimizer: nvme or parameters: nvme, and only then")
        return self


class CommunicationConfig(Settings):
    """How ranks exchange gradients and sharded weights. What is unset is DeepSpeed's choice."""

    gradient_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Numbers that gradients are summed over the ranks in: bf16 halves an fp32 run's traffic. Unset: the model's."""
    reduce_bucket_size: PositiveInt | None = None
    """Elements of gradient that are reduced at a time (zero_stage 1 or more): smaller needs less memory."""
    gather_bucket_size: Annotated[int, Gt(0)] | None = None
    """Elements of weights gathered at a time: after an update (zero_stage 1, 2), ahead of their use (3)."""
    overlap: bool | None = None
    """Reduce gradients while the backward pass goes on (zero_stage 1 or more); takes memory for a second bucket."""
    quantized_weights: bool = False
    """ZeRO++: gather weights as int8 (zero_stage 3, GPUs): where links between hosts are slow."""
    quantized_gradients: bool = False
    """ZeRO++: reduce gradients as int4 (zero_stage 3, GPUs): where links between hosts are slow."""
    secondary_partition_size: PositiveInt = 1
    """ZeRO++: ranks that share a second copy of the weights, gathered in the backward pass (zero_stage 3): a host's."""

    @property
    def quantized(self) -> bool:
        """Whether DeepSpeed's CUDA quantisation is needed."""
        return self.quantized_weights or self.quantized_gradients


def check_sharding(zero_stage: int, replicas: int, offload: OffloadConfig, communication: CommunicationConfig) -> None:
    """Refuse what DeepSpeed refuses, or ignores without a word.

    Raises:
        ValueError: the key and what it needs; the text begins with the key's section.
    """
    needed = [
        ("offload", "optimizer: cpu", 1, offload.optimizer == "cpu"),
        ("offload", "optimizer: nvme", 3, offload.optimizer == "nvme"),
        ("offload", f"parameters: {offload.parameters}", 3, offload.parameters != "none"),
        ("communication", "reduce_bucket_size", 1, communication.reduce_bucket_size is not None),
        ("communication", "gather_bucket_size", 1, communication.gather_bucket_size is not None),
        ("communication", "overlap", 1, communication.overlap is not None),
        ("communication", "quantized_weights", 3, communication.quantized_weights),
        ("communication", "quantized_gradients", 3, communication.quantized_gradients),
        ("communication", "secondary_partition_size", 3, communication.secondary_partition_size > 1),
    ]
    for section, key, stage, used in needed:
        if used and zero_stage < stage:
            raise ValueError(f"{section}: {key} needs zero_stage {stage} or more (it is {zero_stage})")
    if replicas % communication.secondary_partition_size:
        raise ValueError(
            f"communication: secondary_partition_size={communication.secondary_partition_size} does not divide "
            f"the {replicas} ranks that share the weights"
        )

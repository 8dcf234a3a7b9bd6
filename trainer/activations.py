"""Activation checkpointing: which layers recompute their activations in the backward pass, and what they keep."""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import PositiveInt, model_validator

from trainer.errors import ConfigError
from trainer.settings import OPERATIONAL, ShortSettings


class ActivationCheckpointingConfig(ShortSettings):
    """Recomputation of activations in the backward pass. A plain string is short for `mode`."""

    mode: Annotated[Literal["none", "full", "selective"], OPERATIONAL] = "none"
    """full: a layer keeps its input alone (about a third more time); selective: also matrix products and attention."""
    every: Annotated[PositiveInt, OPERATIONAL] = 1
    """Only every n-th layer recomputes: raise it until the memory is just enough."""
    offload: Annotated[bool, OPERATIONAL] = False
    """What is kept waits in the host's memory: for very long sequences. Changes nothing on CPUs."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _used(self) -> "ActivationCheckpointingConfig":
        if self.mode == "none" and (self.every > 1 or self.offload):
            raise ValueError("mode: every and offload need mode: full or selective")
        return self


_KEPT = ("mm", "addmm", "_scaled_mm", "_grouped_mm")
"""Matrix products whose results `selective` keeps. Not bmm: unfused attention makes its scores with it, which are
quadratic in the sequence's length."""


def checkpoint_activations(model: Any, config: ActivationCheckpointingConfig) -> None:
    """Let a transformers model's layers recompute their activations (Chen et al. 2016), as configured.

    Gradients stay the same: random states are restored, so that dropout repeats.

    Raises:
        ConfigError: the architecture has no layers that can be recomputed.
    """
    if config.mode == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.activation_checkpointing: transformers cannot recompute layers of {type(model).__name__}; "
            "set it to none."
        )
    import torch

    offload = config.offload and torch.cuda.is_available()
    how: dict[str, Any] = {"use_reentrant": False}
    if config.mode == "selective":
        how["context_fn"] = partial(_selective_contexts, offload)
    model.activation_checkpointing_enable(how, every_n_layers=config.every, offload=offload)


def _selective_contexts(offload: bool) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    keep = CheckpointPolicy.MUST_CPU_OFFLOAD if offload else CheckpointPolicy.MUST_SAVE

    def policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        name = operation.__name__.split(".")[0]
        return keep if name in _KEPT or "attention" in name else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)

"""Optimizers by name, from torch, with their parameter groups."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainer.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names, over all trainable parameters of ``model``.

    Every group carries ``peak_lr``, its learning rate at the schedule's peak.
    """
    adamw: dict[str, Any] = {"betas": (config.beta1, config.beta2), "eps": 1e-8, "fused": True}
    hidden, decayed, plain = _split(model)
    if config.optimizer == "muon":
        rest = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = MuonWithAdamW(hidden, rest, config, adamw)
    else:
        groups = [
            {"params": hidden + decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, **adamw)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def set_rate(optimizer: Any, share: float) -> None:
    """Set every group's learning rate to ``share`` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices; the output head where it is not tied; and the rest: embeddings, norms, biases, convolutions."""
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {id(p) for p in head.parameters()} if head is not None else set()
    hidden: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in embeddings or parameter.ndim != 2:
            plain.append(parameter)
        elif id(parameter) in heads:
            decayed.append(parameter)
        else:
            hidden.append(parameter)
    return hidden, decayed, plain


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for hidden matrices and torch's AdamW for the rest, as one optimizer.

    Muon: Jordan et al. 2024. The two keep their own state; this class only makes them look like
    one, because the engine steps, saves and loads a single optimizer.
    """

    def __init__(
        self,
        hidden: list[nn.Parameter],
        rest: list[dict[str, Any]],
        config: TrainConfig,
        adamw: dict[str, Any],
    ) -> None:
        muon = config.muon
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                hidden,
                lr=muon.learning_rate,
                momentum=muon.momentum,
                weight_decay=muon.weight_decay,
                ns_steps=muon.newton_schulz_steps,
            ),
            torch.optim.AdamW([g for g in rest if g["params"]], lr=config.learning_rate, **adamw),
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share_state()

    def _share_state(self) -> None:
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state saved by ``state_dict`` of an optimizer over the same parameters."""
        super().load_state_dict(state_dict)
        self._share_state()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter once."""
        for part in self._parts:
            part.step()

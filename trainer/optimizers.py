"""Optimizers by name, each from a library, with their parameter groups."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.parallel import WHOLE_MATRIX_OPTIMIZERS


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that ``train.optimizer`` names, over all trainable parameters of ``model``.

    Every group carries all of its settings, and ``peak_lr``, its learning rate at the schedule's peak.
    """
    groups = _parameter_groups(model, config)
    kind = _class_of(config.optimizer)
    if config.zero_stage == 1 and config.optimizer in WHOLE_MATRIX_OPTIMIZERS:
        from trainer.optimizer_sharding import ShardedByParameter  # slow to import

        optimizer: torch.optim.Optimizer = ShardedByParameter(groups, kind)
    else:
        optimizer = kind(groups)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def set_rate(optimizer: Any, share: float) -> None:
    """Set every group's learning rate to ``share`` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share


def _class_of(name: str) -> type[Any]:
    if name == "adafactor":
        # torch's own caps the rate at 1 / sqrt(step), whatever the schedule says
        from transformers.optimization import Adafactor

        return Adafactor
    if name == "lion":
        from lion_pytorch import Lion  # its foreach variant fails where ZeRO 3 steps a group without gradients

        return Lion
    return MuonWithAdamW if name == "muon" else torch.optim.AdamW


def _parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameters that share their settings: hidden matrices of Muon, then those that decay, then the rest."""
    betas = {"betas": (config.beta1, config.beta2)}
    adamw = {**betas, "eps": 1e-8, "fused": True}
    kinds: dict[str, dict[str, Any]] = {
        "adamw": adamw,
        "muon": {**adamw, "hidden": False},
        "lion": betas,
        "adafactor": {"scale_parameter": True, "relative_step": False},
    }
    settings = kinds[config.optimizer]
    hidden, decayed, plain = _split(model, config.no_weight_decay)
    groups = []
    if config.optimizer == "muon":
        muon = config.muon
        groups.append(
            {
                "params": hidden,
                "hidden": True,
                "lr": muon.learning_rate,
                "momentum": muon.momentum,
                "weight_decay": muon.weight_decay,
                "ns_steps": muon.newton_schulz_steps,
            }
        )
    else:
        decayed = hidden + decayed
    for parameters, decay in ((decayed, config.weight_decay), (plain, 0.0)):
        groups.append({"params": parameters, "lr": config.learning_rate, "weight_decay": decay, **settings})
    return [group for group in groups if group["params"]]


def _split(
    model: nn.Module, without_decay: Sequence[str]
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices; what else decays, as experts and an output head that is not tied; and what does not."""
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = {id(p) for p in head.parameters()} if head is not None else set()
    hidden: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves a part of it here
        kind = "matrices"
        if id(parameter) in embeddings:
            kind = "embeddings"
        elif len(shape) < 2:
            kind = "biases" if name.endswith("bias") else "norms"
        if kind in without_decay:
            plain.append(parameter)
        elif kind == "matrices" and len(shape) == 2 and id(parameter) not in heads:
            hidden.append(parameter)
        else:
            decayed.append(parameter)
    return hidden, decayed, plain


class StackedMuon(torch.optim.Muon):
    """torch's Muon, bit for bit, with matrices of one shape orthogonalised together.

    On a model of many small matrices that takes well under half the time of torch's loop over them
    (5.6 against 14.0 ms a step for 39 matrices of about 128 x 128 on two CPU cores).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            parameters: list[torch.Tensor] = []
            gradients: list[torch.Tensor] = []
            momenta: list[torch.Tensor] = []
            self._init_group(group, parameters, gradients, momenta)
            alike: dict[tuple[int, ...], list[int]] = {}
            for number, parameter in enumerate(parameters):
                alike.setdefault(tuple(sorted(parameter.shape)), []).append(number)
            if parameters:
                torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for members in alike.values():
                updates = [gradients[n].lerp(momenta[n], group["momentum"]) for n in members]
                tall = [update.size(0) > update.size(1) for update in updates]
                stack = torch.stack([u.T if t else u for u, t in zip(updates, tall, strict=True)])
                stack = orthogonalise(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                for number, update, is_tall in zip(members, stack, tall, strict=True):
                    rows, columns = parameters[number].shape
                    rate = group["lr"] * math.sqrt(max(1, rows / columns))
                    parameters[number].add_(update.T if is_tall else update, alpha=-rate)


def orthogonalise(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, epsilon: float
) -> torch.Tensor:
    """The nearly orthogonal factor of each matrix by a quintic Newton-Schulz iteration (Jordan et al. 2024).

    Args:
        matrices: shape [n, rows, columns] with rows <= columns; iterated in bfloat16.

    Returns:
        bfloat16, the same shape; singular values of about 0.7 to 1.2.
    """
    a, b, c = coefficients
    x = matrices.bfloat16()
    x = x / torch.stack([matrix.norm() for matrix in x]).clamp(min=epsilon)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon for groups that say ``hidden`` and torch's AdamW for the others, as one optimizer.

    Muon: Jordan et al. 2024. The two keep their own state; this class only makes them look like
    one, because the engine steps, saves and loads a single optimizer.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        kinds = {True: StackedMuon, False: torch.optim.AdamW}
        self._parts: list[torch.optim.Optimizer] = [
            kinds[hidden](chosen) for hidden in kinds if (chosen := [g for g in groups if g["hidden"] is hidden])
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

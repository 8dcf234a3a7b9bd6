"""Mixtures of experts over several ranks: DeepSpeed's AutoEP, and the one place where its defects are worked around.

AutoEP replaces transformers' mixture blocks: each rank of a group keeps some of the experts, and tokens travel to
the experts that the router chose. Seen with DeepSpeed 0.19.8 and transformers 5.24, and mended here:

- it looks in transformers' registry of recordable outputs by class name, which that registry no longer takes
  (`mend_registry`);
- it replaces parameters, and ZeRO 1 and 2 refuse an optimizer whose groups do not tell experts apart
  (`group_experts`);
- in fp32 without ZeRO it clips by the mean over ranks of the norms of what each holds (`gradient_norm`);
- it has names and a division of its own, which nothing in DeepSpeed takes back (`whole_layer`).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn


def mend_registry() -> None:
    """Let transformers' registry of recordable outputs be asked by class name too, as AutoEP does."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY as registry

    class ByModelOrName(type(registry)):  # type: ignore[misc]
        def __setitem__(self, key: Any, value: Any) -> None:
            dict.__setitem__(self, key if isinstance(key, str) else str(key.__class__), value)

        def get(self, key: Any, default: Any = None) -> Any:
            return dict.get(self, key, default) if isinstance(key, str) else super().get(key)

    if type(registry).__name__ != ByModelOrName.__name__:
        registry.__class__ = ByModelOrName


def group_experts(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give experts parameter groups of their own, with the settings of the groups that they were in."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    for number, group in enumerate(optimizer.param_groups):
        group["name"] = f"group-{number}"
    optimizer.param_groups[:] = split_params_into_different_moe_groups_for_optimizer(optimizer.param_groups)
    return optimizer


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether AutoEP divides this parameter over the ranks."""
    return not getattr(parameter, "allreduce", True)


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The norm of the whole model's gradient, given the parameters of this rank: a scalar."""
    mine = [parameter for parameter in parameters if is_expert(parameter)]
    square = _squared_norm(parameter for parameter in parameters if not is_expert(parameter))
    if mine:
        of_experts = _squared_norm(mine)
        distributed.all_reduce(of_experts, group=_group_of(mine[0]))
        square += of_experts
    return square.sqrt()


def _squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()


def _group_of(expert: Any) -> Any:
    """The ranks that together have every expert."""
    from deepspeed.utils import groups

    return groups._get_expert_parallel_group(expert.group_name)


def whole_layer(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """A layer's weights with all its experts and transformers' names, given this rank's; every rank has to call it."""
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        weight = parameter.detach()
        if is_expert(parameter):
            group = _group_of(parameter)
            parts = [torch.empty_like(weight) for _ in range(distributed.get_world_size(group))]
            distributed.all_gather(parts, weight.contiguous(), group=group)
            weight = torch.cat(parts)
        weights[name.replace(".router.gate.", ".gate.").replace(".shared_experts", ".shared_expert")] = weight
    for block in [name.removesuffix("w1") for name in weights if name.endswith(".experts.w1")]:
        gate, down, up = (weights.pop(block + part) for part in ("w1", "w2", "w3"))
        weights[block + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        weights[block + "down_proj"] = down
    return weights

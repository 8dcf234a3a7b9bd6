"""Watches a mixture of experts: how evenly its routers use the experts, and what the model charges for it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn

from trainer.parts import Part

if TYPE_CHECKING:
    from trainer.loop import Run


class Routing(Part):
    """Adds what happened in the recorded step to its record.

    - `train/expert_imbalance`: tokens of the busiest expert over the mean of its layer's experts, in the worst
      layer: 1 where all are used alike, the number of experts over those chosen for a token where routing collapsed;
    - `train/auxiliary_loss`: the model's load-balancing loss (Fedus et al. 2021, section 2.2), without its
      coefficient, as a mean over micro-batches and ranks; where the model's configuration asks for it.
    """

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient
        self.auxiliary_losses: list[torch.Tensor] = []
        self.chosen: dict[str, torch.Tensor] = {}

    @classmethod
    def of(cls, model: Any) -> "Routing | None":
        """The watch over a model that is a mixture of experts; None where it is none."""
        if not _routers(model):
            return None
        config = model.config.get_text_config()
        return cls(config.router_aux_loss_coef if getattr(config, "output_router_logits", False) else 0.0)

    def at_start(self, run: "Run") -> None:
        """Begin to watch, with the experts divided."""
        for name, router in _routers(run.engine.module).items():
            router.register_forward_hook(self._count(name))
        if self.coefficient:
            run.engine.module.register_forward_hook(self._keep_auxiliary_loss)

    def _count(self, layer: str) -> Any:
        def hook(router: Any, _: Any, output: Any) -> None:
            # scores, and the experts chosen for each token as the first of the integers
            if router.training and isinstance(output, tuple):
                experts = next(part for part in output if not part.is_floating_point()).flatten()
                counts = torch.zeros(router.num_experts, device=experts.device)
                counts.index_add_(0, experts, torch.ones_like(experts, dtype=counts.dtype))
                self.chosen[layer] = self.chosen[layer] + counts if layer in self.chosen else counts

        return hook

    def _keep_auxiliary_loss(self, model: nn.Module, _: Any, output: Any) -> None:
        if model.training:
            self.auxiliary_losses.append(output.aux_loss)

    def penalty(self) -> torch.Tensor | float:
        """What the last forward pass adds to the mean loss: a float32 scalar with gradient."""
        if not self.coefficient:
            return 0.0
        loss, self.auxiliary_losses[-1] = self.auxiliary_losses[-1], self.auxiliary_losses[-1].detach()
        return self.coefficient * loss

    def before_step(self, run: "Run") -> None:
        """Forget the step before."""
        self.chosen.clear()
        self.auxiliary_losses.clear()

    def metrics(self, run: "Run") -> dict[str, float]:
        """Over all ranks and micro-batches of the step."""
        metrics = {}
        if self.chosen:
            chosen = torch.stack(list(self.chosen.values()))
            distributed.all_reduce(chosen)
            metrics["train/expert_imbalance"] = (chosen.amax(1) / chosen.mean(1)).max().item()
        if self.auxiliary_losses:
            total = torch.stack(self.auxiliary_losses).mean()
            distributed.all_reduce(total)
            metrics["train/auxiliary_loss"] = total.item() / distributed.get_world_size()
        return metrics


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    """transformers' routers, or those that AutoEP put in their place."""
    return {n: m for n, m in model.named_modules() if type(m).__name__.lower().endswith("topkrouter")}

"""An output projection that gives the loss and never holds all logits at once: less memory for large vocabularies."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.errors import ConfigError

Criterion = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From float32 logits [places, vocabulary] and labels [places] to a sum over the places."""

_CHUNK_LOGITS = 2**26
"""Logits that are held at once: 256 MiB in float32, which is still enough rows for a GPU to be busy with."""


class ChunkedHead(nn.Linear):
    """A language model's output projection; given labels, its output is the criterion's sum in place of logits.

    The logits of a few hundred rows are computed, counted and forgotten, and computed again in the backward pass
    (the memory of activation checkpointing for a quarter of the projection's time more).
    """

    labels: torch.Tensor | None = None
    criterion: Criterion | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of ``hidden`` [sequences, length, width], or the sum of the criterion over them, a scalar."""
        if self.labels is None:
            return super().forward(hidden)
        rows = max(1, _CHUNK_LOGITS // self.out_features)
        parts = zip(hidden.flatten(0, -2).split(rows), self.labels.flatten().split(rows), strict=True)
        kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        sums = [checkpoint(_sum, *part, self.weight, self.bias, self.criterion, **kept) for part in parts]
        return torch.stack(sums).sum(0)


def _sum(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    criterion: Criterion,
) -> torch.Tensor:
    return criterion(functional.linear(hidden, weight, bias).float(), labels)


def use_chunked_head(model: Any) -> None:
    """Give a transformers model a :class:`ChunkedHead` with the weights, and the names, of its own head."""
    old = model.get_output_embeddings()
    head = ChunkedHead(old.in_features, old.out_features, old.bias is not None, device="meta")
    head.weight, head.bias = old.weight, old.bias
    model.set_output_embeddings(head)


@torch.no_grad()
def check_chunked_head(model: Any) -> None:
    """Make sure that a model with a :class:`ChunkedHead` makes nothing else of its logits before the loss.

    Raises:
        ConfigError: it does, which a sum does not survive.
    """
    places = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    logits = model(input_ids=places, use_cache=False).logits
    expected = summed_cross_entropy(logits.float().flatten(0, -2), places.flatten())
    found = summed_over_logits(model, places, places, summed_cross_entropy)
    model.train(training)
    if not torch.allclose(found, expected, rtol=1e-3):
        raise ConfigError(
            f"train.cross_entropy: a model of type {model.config.model_type!r} changes its logits after the output "
            "projection, so that chunked does not work with it. Set it to full."
        )


def summed_over_logits(
    model: Any, input_ids: torch.Tensor, labels: torch.Tensor, criterion: Criterion, **inputs: Any
) -> torch.Tensor:
    """The criterion's sum over all places of a batch, with or without a chunked head.

    Args:
        model: a transformers model, or DeepSpeed's engine over one.
        input_ids, labels: int64, shape [sequences, length].
        criterion: the same object in every call, for a compiled model is compiled anew for another one.
    """
    head = getattr(getattr(model, "module", model), "get_output_embeddings", lambda: None)()
    if not isinstance(head, ChunkedHead):
        logits = model(input_ids=input_ids, use_cache=False, **inputs).logits
        return criterion(logits.float().flatten(0, -2), labels.flatten())
    head.labels, head.criterion = labels, criterion
    try:
        return model(input_ids=input_ids, use_cache=False, **inputs).logits
    finally:
        head.labels = head.criterion = None


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, summed over all places with a label."""
    return functional.cross_entropy(logits, labels, reduction="sum")

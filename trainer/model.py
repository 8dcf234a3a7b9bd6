"""The model: built by transformers from the configuration, its loss, and the precision it runs best in."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.settings import nearest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_configuration(
    config: ModelConfig, vocabulary_size: int, sequence_length: int, special_ids: dict[str, int | None] | None = None
) -> Any:
    """The transformers configuration of the model.

    Args:
        vocabulary_size: entries of the tokenizer.
        special_ids: ``bos_token_id`` and so on, as the tokenizer has them.

    Raises:
        ConfigError: an unknown architecture or setting, or a vocabulary smaller than the tokenizer's.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.pretrained:
        try:
            result = AutoConfig.from_pretrained(config.pretrained)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"model.pretrained: {config.pretrained!r} cannot be loaded ({reason})") from None
    else:
        try:
            known = CONFIG_MAPPING[config.type]()
        except KeyError:
            raise ConfigError(
                f"model.type: transformers knows no architecture {config.type!r}.{nearest(config.type, CONFIG_MAPPING)}"
            ) from None
        for key in config.config:
            if not hasattr(known, key):
                raise ConfigError(
                    f"model.config.{key}: {config.type} has no such setting.{nearest(key, known.to_dict())}"
                )
        context = known.attribute_map.get("max_position_embeddings", "max_position_embeddings")
        settings = {
            "vocab_size": vocabulary_size,
            context: sequence_length,
            **(special_ids or {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}),
            **config.config,
        }
        try:
            result = AutoConfig.for_model(config.type, **settings)
        except Exception as error:  # transformers' strict dataclasses raise many types
            raise ConfigError(f"model.config: refused by transformers: {error}") from None
    context_length = getattr(result.get_text_config(), "max_position_embeddings", None) or sequence_length
    if context_length < sequence_length:
        raise ConfigError(
            f"data.sequence_length: {sequence_length} tokens are more than the model's context of {context_length}. "
            "Lower it, or raise the model's max_position_embeddings."
        )
    if result.get_text_config().vocab_size < vocabulary_size:
        raise ConfigError(
            f"model: it has {result.get_text_config().vocab_size} vocabulary entries, the tokenizer has "
            f"{vocabulary_size}. Leave model.config.vocab_size unset, or use the model's own tokenizer."
        )
    return result


def build_model(config: ModelConfig, tokenizer: Any, sequence_length: int, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model on the CPU with its initial or pretrained weights.

    The same seed gives the same initial weights on every rank.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    entries = max(tokenizer.get_vocab().values()) + 1  # more than its tokens, where the ids have gaps
    settings = model_configuration(config, entries, sequence_length, special_ids)
    if config.pretrained:
        return AutoModelForCausalLM.from_pretrained(config.pretrained, config=settings, dtype=dtype)
    # initialised in fp32 and rounded once, so that every precision starts from the same weights
    return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).to(dtype)


def count_parameters(settings: Any) -> int:
    """Parameters of a model with this transformers configuration, tied ones once, without allocating them.

    Raises:
        ConfigError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # every architecture checks its sizes in its own way
        raise ConfigError(f"model.config: transformers cannot build it: {error}") from None
    return sum(parameter.numel() for parameter in model.parameters())


def loss_of(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross-entropy of the next token in nats.

    Args:
        input_ids, labels: int64, shape [sequences, length]; ``labels`` already shifted by one, -100 where
            there is none.
        positions: int64, the same shape: places within documents; transformers sees by their restarts
            where documents begin, and lets none attend to another. None takes a sequence as one document.
        reduction: ``mean`` or ``sum`` over all labels.

    Returns:
        A float32 scalar.
    """
    logits = _logits_of(model, input_ids, positions)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class TrainingLoss(NamedTuple):
    """What training minimises and what it is made of: float32 scalars, each summed over all labels."""

    objective: torch.Tensor
    """The cross-entropy, with label smoothing where asked for, plus the z-loss."""
    cross_entropy: torch.Tensor
    """The plain one, in nats, as `loss_of` gives it."""
    z_loss: torch.Tensor
    """The coefficient times the square of log Z."""


def training_loss_of(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor | None,
    z_loss: float,
    label_smoothing: float,
) -> TrainingLoss:
    """The training objective from one log-sum-exp over the vocabulary, log Z.

    With the logits x, the label y and V entries, summed over all labels:

    - cross-entropy log Z - x_y; with smoothing s the label has the share 1 - s and every entry
      s / V, which is log Z - (1 - s) x_y - s mean(x) (Szegedy et al. 2016, section 7);
    - z-loss: coefficient times (log Z)^2, which keeps log Z near 0 (Chowdhery et al. 2022, PaLM, section 5).

    Args:
        input_ids, labels, positions: as of :func:`loss_of`.
        z_loss: coefficient.
        label_smoothing: share s.
    """
    if not z_loss and not label_smoothing:
        loss = loss_of(model, input_ids, labels, positions, reduction="sum")
        return TrainingLoss(loss, loss.detach(), torch.zeros_like(loss))
    logits = _logits_of(model, input_ids, positions)
    log_z = logits.logsumexp(-1)
    of_label = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    wanted = of_label
    if label_smoothing:
        wanted = torch.lerp(of_label, logits.mean(-1), label_smoothing)

    def summed(of_places: torch.Tensor) -> torch.Tensor:
        return of_places.masked_fill(labels < 0, 0.0).sum()

    z_losses = z_loss * summed(log_z.square())
    return TrainingLoss(
        objective=summed(log_z - wanted) + z_losses,
        cross_entropy=summed(log_z - of_label).detach(),
        z_loss=z_losses.detach(),
    )


def _logits_of(model: nn.Module, input_ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Float32, shape [sequences, length, vocabulary]."""
    documents = {} if positions is None else {"position_ids": positions}
    return model(input_ids=input_ids, use_cache=False, **documents).logits.float()


def check_document_mask(model: Any, sequence_length: int) -> None:
    """Make sure that documents packed into one sequence do not see each other in this model.

    Raises:
        ConfigError: changing one document changes what the model says about the next (convolutions and
            recurrent layers do not stop at a document's end).
    """
    half = max(1, min(16, sequence_length // 2))
    positions = torch.arange(half).repeat(2)[None]
    second = torch.arange(half) % model.config.get_text_config().vocab_size
    training = model.training
    model.eval()
    with torch.no_grad():
        seen = [
            model(input_ids=torch.cat([first, second])[None], position_ids=positions, use_cache=False).logits[0, half:]
            for first in (torch.zeros_like(second), torch.ones_like(second))
        ]
    model.train(training)
    # what is masked leaves no trace at all; new weights are small, and so is what leaks through them
    if (seen[0] - seen[1]).abs().max() > 2e-6 * seen[0].abs().max():
        raise ConfigError(
            f"data.document_mask: in a model of type {model.config.model_type!r} what is packed together influences "
            "each other in spite of it. Set it to false, or choose a model of attention alone."
        )


def load_tokenizer(directory: Path | str) -> Any:
    """The transformers tokenizer of a directory or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


def pick_precision(config: ModelConfig, tokenizer: Any, sequence_length: int, device: torch.device) -> str:
    """bf16 where the device has it and trains faster with it, else fp32.

    On CPUs this depends on instruction set and kernels, so one forward and backward pass of the
    model decides. bf16 has to win by a tenth, since it also pays for keeping fp32 weights.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    tokens = torch.zeros(max(1, 1024 // sequence_length), sequence_length, dtype=torch.long)

    def seconds(precision: str) -> float:
        model = build_model(config, tokenizer, sequence_length, DTYPES[precision], seed=0)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            loss_of(model, tokens, tokens).backward()
            times.append(time.perf_counter() - began)
        return min(times)

    return "bf16" if seconds("bf16") * 1.1 < seconds("fp32") else "fp32"

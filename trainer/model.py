"""The model, built by transformers from the configuration, and its loss."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from trainer.adapters import AdapterConfig, add_adapter, load_in_4_bits
from trainer.chunked_head import Criterion, summed_cross_entropy, summed_over_logits
from trainer.config import ModelConfig
from trainer.errors import ConfigError
from trainer.settings import nearest


def model_configuration(
    config: ModelConfig, vocabulary_size: int, sequence_length: int, special_ids: dict[str, int | None] | None = None
) -> Any:
    """The transformers configuration of the model.

    Args:
        vocabulary_size: entries of the tokenizer.
        special_ids: ``bos_token_id`` and so on, as the tokenizer has them.

    Raises:
        ConfigError: an unknown architecture or setting, a vocabulary smaller than the tokenizer's, or an attention
            that is not installed.
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
    if config.attention != "auto":
        result._attn_implementation = attention_kernel(config.attention)
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


def attention_kernel(choice: str) -> str:
    """The name that transformers has for `model.attention`.

    Raises:
        ConfigError: FlashAttention is not installed.
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if choice != "flash":
        return choice
    if is_flash_attn_3_available():
        return "flash_attention_3"
    if is_flash_attn_2_available():
        return "flash_attention_2"
    raise ConfigError(
        "model.attention: flash needs an NVIDIA GPU and the package flash-attn (or flash-attn-3). "
        "sdpa needs nothing, and its kernel on a GPU is FlashAttention as well."
    )


def build_model(
    config: ModelConfig,
    tokenizer: Any,
    sequence_length: int,
    dtype: torch.dtype,
    seed: int,
    finish: Callable[[nn.Module], None] = lambda part: None,
) -> nn.Module:
    """The model on the CPU with its initial or pretrained weights, and with a new adapter where one is asked for.

    The same seed gives the same initial weights on every rank, in every precision and whatever ``finish`` does.

    Args:
        finish: called with each part of the model (a layer, the embeddings, …) as soon as it has its weights. Where
            it divides them over the ranks at once, the initial weights of the whole model are never in one process.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    special_ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    entries = max(tokenizer.get_vocab().values()) + 1  # more than its tokens, where the ids have gaps
    settings = model_configuration(config, entries, sequence_length, special_ids)
    if config.pretrained:
        model = load_pretrained(config, dtype, settings)
        if config.adapter:
            add_adapter(model, config.adapter)
        for part, _, _ in _parts(model, model):
            finish(part)
        return model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    _initialise(model, dtype, finish)
    return model


def load_pretrained(config: ModelConfig, dtype: torch.dtype, settings: Any = None) -> Any:
    """The pretrained model without an adapter; in 4 bits where the adapter is one for that.

    Args:
        settings: its transformers configuration, where another than the weights' own.
    """
    from transformers import AutoModelForCausalLM

    assert config.pretrained
    if config.adapter and config.adapter.type == "qlora":
        return load_in_4_bits(config.pretrained, dtype, settings)
    return AutoModelForCausalLM.from_pretrained(config.pretrained, config=settings, dtype=dtype)


def _parts(module: nn.Module, owner: Any) -> Iterator[tuple[nn.Module, Any, bool]]:
    """A model in parts, inner ones first: every module with no list of layers inside, and the containers of these.

    Yields:
        The part, the transformers model that it belongs to, and whether the part is a container, of which only the
        weights of its own count.
    """
    from transformers import PreTrainedModel

    owner = module if isinstance(module, PreTrainedModel) else owner
    container = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
    for child in module.children() if container else ():
        yield from _parts(child, owner)
    yield module, owner, container


def _initialise(model: Any, dtype: torch.dtype, finish: Callable[[nn.Module], None]) -> None:
    """Give a model on the meta device its initial weights, one part after the other.

    They are drawn in fp32 and rounded once, so that every precision starts from the same weights. Buffers, such as
    the frequencies of rotary embeddings, stay in fp32.
    """
    from transformers.initialization import guard_torch_init_functions

    made: dict[torch.Tensor, torch.Tensor] = {}  # a tied weight has several places
    with torch.no_grad(), guard_torch_init_functions():
        for part, owner, container in _parts(model, model):
            new: list[torch.Tensor] = []
            for module in [part] if container else part.modules():
                for tensors in (module._parameters, module._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None and tensor.is_meta:
                            if tensor not in made:
                                made[tensor] = _unset(tensor)
                                new.append(made[tensor])
                            tensors[name] = made[tensor]  # type: ignore[assignment]
            if container:
                owner._init_weights(part)
            else:
                part.apply(owner._init_weights)
            for tensor in new:
                if tensor.is_floating_point() and tensor.isnan().any():
                    raise ConfigError(f"model.type: transformers gives {type(part).__name__} no initial weights.")
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # the part around it leaves it alone
                if isinstance(tensor, nn.Parameter):
                    tensor.data = tensor.to(dtype)
            finish(part)


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor on the meta device; NaN shows what nobody sets afterwards."""
    memory = torch.full_like(tensor, math.nan if tensor.is_floating_point() else 0, device="cpu")
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def save_model(
    model: Any, weights: Iterable[dict[str, torch.Tensor]], directory: Path, file_bytes: int = 2 * 2**30
) -> None:
    """Write a model as `from_pretrained` reads it.

    Args:
        weights: groups of whole tensors on the CPU, each tensor once. No more than one file and one group of them
            are in memory at a time.
        file_bytes: size at which a file of weights is closed and the next is begun.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    model.save_pretrained(directory, state_dict={})  # what is not weights
    files: list[Path] = []
    place: dict[str, int] = {}
    held: dict[str, torch.Tensor] = {}
    total = 0

    def close_file() -> None:
        files.append(directory / f"{len(files)}.partial")
        save_file(held, files[-1], metadata={"format": "pt"})
        place.update(dict.fromkeys(held, len(files)))
        held.clear()

    for group in weights:
        kept = {name: tensor for name, tensor in group.items() if name not in (model._keys_to_ignore_on_save or ())}
        held |= {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, kept).items()}
        total += sum(tensor.nbytes for tensor in kept.values())
        if sum(tensor.nbytes for tensor in held.values()) >= file_bytes:
            close_file()
    if held:
        close_file()
    if len(files) == 1:
        files[0].rename(directory / "model.safetensors")
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for file, name in zip(files, names, strict=True):
        file.rename(directory / name)
    index = {"metadata": {"total_size": total}, "weight_map": {key: names[n - 1] for key, n in place.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def count_parameters(settings: Any, adapter: AdapterConfig | None = None) -> tuple[int, int]:
    """Parameters of a model with this transformers configuration, tied ones once, without allocating them.

    Returns:
        Those of the model, and how many are trained: all of them, or those of the adapter.

    Raises:
        ConfigError: transformers cannot build it, or the adapter does not fit it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # every architecture checks its sizes in its own way
        raise ConfigError(f"model.config: transformers cannot build it: {error}") from None
    whole = trained = sum(parameter.numel() for parameter in model.parameters())
    if adapter:
        with torch.device("meta"):
            add_adapter(model, adapter)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return whole, trained


def count_expert_parameters(settings: Any) -> tuple[int, float]:
    """Parameters of all experts, routed ones, without allocating them, and the share of them that a token meets."""
    from transformers import AutoModelForCausalLM

    sizes = settings.get_text_config()
    total = getattr(sizes, "num_local_experts", None) or getattr(sizes, "num_experts", None)
    if not total:
        return 0, 1.0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    return experts, sizes.num_experts_per_tok / total


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
    total = summed_over_logits(model, input_ids, labels, summed_cross_entropy, **_documents(positions))
    return total if reduction == "sum" else total / (labels >= 0).sum()


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
    criterion = _criterion(z_loss, label_smoothing)
    sums = summed_over_logits(model, input_ids, labels, criterion, **_documents(positions))
    objective, cross_entropy, z_loss_sum = sums.unbind()
    return TrainingLoss(objective, cross_entropy.detach(), z_loss_sum.detach())


@cache
def _criterion(z_loss: float, label_smoothing: float) -> Criterion:
    """From logits and labels to the three sums of a :class:`TrainingLoss`; the same object for the same arguments."""

    def sums(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        log_z = logits.logsumexp(-1)
        of_label = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        wanted = of_label
        if label_smoothing:
            wanted = torch.lerp(of_label, logits.mean(-1), label_smoothing)

        def summed(of_places: torch.Tensor) -> torch.Tensor:
            return of_places.masked_fill(labels < 0, 0.0).sum()

        z_losses = z_loss * summed(log_z.square())
        return torch.stack([summed(log_z - wanted) + z_losses, summed(log_z - of_label), z_losses])

    return sums


def _documents(positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if positions is None else {"position_ids": positions}


def check_document_mask(model: Any, sequence_length: int) -> None:
    """Make sure that documents packed into one sequence do not see each other in this model.

    Raises:
        ConfigError: changing one document changes what the model says about the next (convolutions and
            recurrent layers do not stop at a document's end).
    """
    half = max(1, min(16, sequence_length // 2))
    device = next(model.parameters()).device
    positions = torch.arange(half, device=device).repeat(2)[None]
    second = torch.arange(half, device=device) % model.config.get_text_config().vocab_size
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

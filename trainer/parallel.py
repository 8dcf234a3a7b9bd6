"""The layout of the ranks: how a model and a batch are divided over the training processes."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from trainer.errors import ConfigError
from trainer.settings import OPERATIONAL, Settings

MODELS_WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Architectures whose experts DeepSpeed's AutoEP divides and the export puts together again."""
UNFINISHED = ("tensor", "pipeline")
"""What is not yet built."""

WHOLE_MATRIX_OPTIMIZERS = ("adafactor", "muon")
"""Their update of a weight depends on its rows and columns, so that no rank can do with a piece of it."""


class ParallelConfig(Settings):
    """How the ranks divide what is more than the batch; the groups that this makes share the global batch."""

    tensor: Annotated[int, Ge(1), OPERATIONAL] = 1
    """Ranks that divide every layer's matrices: for layers that are too large for one device, over fast links."""
    pipeline: Annotated[int, Ge(1), OPERATIONAL] = 1
    """Ranks that hold consecutive layers each: for models that are too large for one device, over slow links."""
    expert: Annotated[int, Ge(1), OPERATIONAL] = 1
    """Data-parallel ranks that divide the experts of a mixture: for more experts than fit on one device."""
    sequence: Annotated[int, Ge(1), OPERATIONAL] = 1
    """Ranks that divide every sequence: for contexts whose activations are too large for one device."""


@dataclass(frozen=True)
class Place:
    """What a rank works on: its number along each direction."""

    pipeline: int
    """Its stage: which of the consecutive parts of the layers it holds."""
    data: int
    """Which part of the global batch it works on."""
    sequence: int
    """Which part of every sequence."""
    tensor: int
    """Which part of every layer."""


@dataclass(frozen=True)
class Layout:
    """The numbers of parts into which a run is divided; ranks = pipeline x data x sequence x tensor.

    Neighbouring ranks, with the fastest links between them, divide layers, then sequences, then the
    batch; stages, which talk least, are furthest apart. This is also how DeepSpeed counts.
    """

    pipeline: int
    data: int
    sequence: int
    tensor: int

    @classmethod
    def of(cls, ranks: int, parallel: ParallelConfig) -> "Layout":
        """The layout that the configuration asks for.

        Raises:
            ValueError: the sizes do not divide the ranks, or the experts' size not the data-parallel ranks.
        """
        divided = parallel.pipeline * parallel.sequence * parallel.tensor
        if ranks % divided:
            raise ValueError(
                f"ranks: {ranks} ranks do not divide by parallel.tensor x pipeline x sequence = {parallel.tensor} x "
                f"{parallel.pipeline} x {parallel.sequence} = {divided}"
            )
        layout = cls(parallel.pipeline, ranks // divided, parallel.sequence, parallel.tensor)
        if layout.data % parallel.expert:
            raise ValueError(
                f"parallel: expert={parallel.expert} does not divide the {layout.data} data-parallel ranks that "
                f"ranks={ranks} leave (it may be {_divisors(layout.data)})"
            )
        return layout

    @property
    def averaged(self) -> int:
        """Ranks over which gradients are averaged, because they hold the same weights and see other tokens."""
        return self.data * self.sequence

    def place(self, rank: int) -> Place:
        """Where ``rank`` (0 to ranks - 1) stands."""
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        pipeline, data = divmod(rest, self.data)
        return Place(pipeline, data, sequence, tensor)


def check_pairings(parallel: ParallelConfig, zero_stage: int, optimizer: str, compiled: bool) -> None:
    """Refuse what cannot be combined.

    Raises:
        ValueError: the key of the training section, and what it may be.
    """
    divided = [key for key in ("tensor", "pipeline", "expert", "sequence") if getattr(parallel, key) > 1]
    for key in set(divided) & set(UNFINISHED):
        raise ValueError(f"parallel: {key} can only be 1 so far")
    if len(divided) > 1:
        raise ValueError(f"parallel: {' and '.join(divided)} cannot be combined; one of them may be more than 1")
    if parallel.tensor > 1 and zero_stage > 2:
        raise ValueError(f"zero_stage: {zero_stage} cannot be combined with parallel.tensor; use 0, 1 or 2")
    for key in ("tensor", "expert"):
        if getattr(parallel, key) > 1 and optimizer in WHOLE_MATRIX_OPTIMIZERS:
            raise ValueError(f"optimizer: {optimizer} needs whole matrices, not those of parallel.{key}; use adamw")
    if parallel.pipeline > 1 and zero_stage > 1:
        raise ValueError(f"zero_stage: {zero_stage} cannot be combined with parallel.pipeline; use 0 or 1")
    if parallel.pipeline > 1 and compiled:
        raise ValueError("compile: cannot be combined with parallel.pipeline; set it to false")


def check_model(parallel: ParallelConfig, model: Any, sequence_length: int) -> None:
    """Refuse sizes that a model with this transformers configuration cannot be divided by.

    Raises:
        ConfigError: the key, and the allowed values.
    """
    sizes = model.get_text_config()
    if parallel.expert > 1 and sizes.model_type not in MODELS_WITH_EXPERTS:
        raise ConfigError(
            f"train.parallel.expert: a {sizes.model_type!r} model has no experts that can be divided. Set it to 1, "
            f"or model.type to one of {', '.join(MODELS_WITH_EXPERTS)}."
        )
    if parallel.sequence > 1:
        _check_attention(model, sizes, sequence_length)
    heads = sizes.num_attention_heads
    groups = getattr(sizes, "num_key_value_heads", None) or heads
    experts = getattr(sizes, "num_local_experts", None) or getattr(sizes, "num_experts", None) or 1
    divided = [
        ("tensor", "model.config.num_attention_heads", heads),
        ("tensor", "model.config.num_key_value_heads", groups),
        ("sequence", "model.config.num_attention_heads", heads),
        ("sequence", "model.config.num_key_value_heads", groups),
        ("sequence", "data.sequence_length", sequence_length),
        ("expert", "the model's experts", experts),
    ]
    for key, name, total in divided:
        size = getattr(parallel, key)
        if total % size:
            raise ConfigError(f"train.parallel.{key}: {size} does not divide {name}={total}. Use {_divisors(total)}.")
    if parallel.pipeline > sizes.num_hidden_layers:
        raise ConfigError(
            f"train.parallel.pipeline: {parallel.pipeline} stages are more than "
            f"model.config.num_hidden_layers={sizes.num_hidden_layers}. Use 1 to {sizes.num_hidden_layers}."
        )


def _check_attention(model: Any, sizes: Any, sequence_length: int) -> None:
    """Refuse models whose places influence each other by other ways than full, unmasked attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    implementation = sizes._attn_implementation
    if implementation is None:
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model)]
        implementation = "sdpa" if architecture._supports_sdpa else "eager"
    layers = set(getattr(sizes, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(sizes, "sliding_window", None) if getattr(sizes, "use_sliding_window", True) else None
    reason = None
    if implementation == "eager":
        reason = "transformers has only eager attention for it, which needs a mask of the whole sequence"
    elif layers:
        reason = f"it has layers of type {', '.join(sorted(layers))}"
    elif window and window < sequence_length:
        reason = f"its attention sees {window} tokens back, fewer than data.sequence_length={sequence_length}"
    if reason:
        raise ConfigError(
            f"train.parallel.sequence: a {sizes.model_type!r} model cannot share sequences: {reason}. Set it to 1, or "
            "choose a model of full attention (llama, qwen3, …)."
        )


def _divisors(total: int) -> str:
    return " or ".join(str(size) for size in range(1, total + 1) if total % size == 0)

"""Sequence parallelism: ranks share every sequence, and in attention exchange places in it for heads.

Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"), as DeepSpeed implements it for transformers' models: around
attention an all-to-all gives every rank all places of some heads; everything else looks at one place at a time.

The engine is not told of it and sees data-parallel ranks: each has other labels, and the loss counts labels. Told
of it, DeepSpeed 0.19.8 sums gradients over the ranks of a sequence in ZeRO 0 to 2 and averages them in ZeRO 3.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import distributed

from trainer.data.loader import MicroBatch
from trainer.errors import ConfigError


@dataclass(frozen=True)
class SequenceShare:
    """A rank's part of every sequence: a consecutive one."""

    number: int
    """Which, from 0 on."""
    size: int
    """Ranks that share a sequence."""
    group: Any
    """These ranks' process group."""

    def of(self, part: MicroBatch) -> MicroBatch:
        """This rank's places of the micro-batch, with their positions in the whole sequences."""
        sequences, length = len(part.rows), (part.rows.shape[1] - 1) // self.size
        first = self.number * length
        positions = torch.arange(first, first + length, device=part.rows.device).repeat(sequences, 1)
        return MicroBatch(part.rows[:, first : first + length + 1], positions)

    def sum(self, value: torch.Tensor) -> None:
        """Replace each rank's value by the sum over those that share its sequences."""
        distributed.all_reduce(value, group=self.group)


def divide_sequences(engine: Any, size: int, device: torch.device) -> SequenceShare:
    """Let the model's attention work on sequences of which each of ``size`` neighbouring ranks has a part.

    Every rank has to call it, before its first training step.

    Raises:
        ConfigError: not all that mixes the places of this model is attention that can be divided.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = engine.module.config.get_text_config()
    heads = config.num_attention_heads
    whole_attention = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    group, _ = distributed.new_subgroups(size)
    share = SequenceShare(distributed.get_rank() % size, size, group)

    @cache  # it is made for one number of sequences, which is another in evaluation
    def attention_over(sequences: int) -> UlyssesSPAttentionHF:
        return UlyssesSPAttentionHF(
            attn=whole_attention,
            batch_size=sequences,
            attn_head_count=heads,
            attn_head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            kv_head_count=getattr(config, "num_key_value_heads", None) or heads,
            num_hidden_layers=config.num_hidden_layers,
            process_group=group,
            seq_length_is_variable=True,
        )

    def refusal(reason: str) -> ConfigError:
        return ConfigError(
            f"train.parallel.sequence: a {config.model_type!r} model with {config._attn_implementation} attention "
            f"cannot share sequences: {reason}. Set it to 1."
        )

    calls = 0

    def divided_attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        nonlocal calls
        calls += 1
        if mask is not None:
            raise refusal("its attention has a mask, which is made for a part of a sequence")
        output, weights = attention_over(len(query))(module, query, key, value, None, *args, **kwargs)
        return output.unflatten(-1, (heads, -1)), weights

    # transformers asks for the implementation by name also to choose masks, so it keeps its name
    ALL_ATTENTION_FUNCTIONS[config._attn_implementation] = divided_attention
    sample = share.of(MicroBatch(torch.zeros(1, 2 * size + 1, dtype=torch.long, device=device)))
    engine.eval()
    try:
        with torch.no_grad():
            engine(input_ids=sample.inputs, position_ids=sample.positions, use_cache=False)
    except AssertionError as error:  # DeepSpeed's, of what it cannot divide
        raise refusal(str(error).splitlines()[0]) from None
    if calls != config.num_hidden_layers:
        raise refusal(f"{calls} of its {config.num_hidden_layers} layers have attention that divides")
    engine.train()
    return share

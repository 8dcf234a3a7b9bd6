"""Scores a model on a held-out split: loss, perplexity, bits per byte, and the unigram entropy to compare with."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.data.loader import PADDING, MicroBatch, positions_in_documents
from trainer.data.shards import ShardSet, TokenStream
from trainer.errors import DataError
from trainer.model import loss_of


def score(
    model: nn.Module,
    shards: ShardSet,
    sequence_length: int,
    batch: int,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    document_mask: bool = False,
) -> dict[str, float]:
    """Score every token of the validation split but the first, in consecutive windows.

    A window's ``sequence_length`` tokens predict the same tokens one further; the last window may
    be shorter. With N predicted tokens, their summed negative log-likelihood S in nats, and B the
    bytes of the split's text in UTF-8:

    - ``eval/loss`` = S / N, nats a token;
    - ``eval/perplexity`` = exp(S / N);
    - ``eval/bits_per_byte`` = S / (B ln 2): independent of the tokenizer. The ends of documents
      are predicted too and count in S, so that nothing a model has to say is left out;
    - ``eval/unigram_entropy`` = the entropy of the split's own token frequencies, nats a token: the
      best loss of any model that ignores context.

    Args:
        batch: windows in one forward pass.
        on_progress: told the windows done and in all.
        document_mask: attention and positions stay inside documents, as in training with it.
    """
    stream = shards.stream("validation")
    end_id = shards.manifest["tokenizer"]["end_id"] if document_mask else None
    predicted = len(stream) - 1
    windows = math.ceil(predicted / sequence_length)
    total = 0.0
    model.eval()
    with torch.inference_mode():
        for first in range(0, windows, batch):
            end = min(windows, first + batch)
            part = read_windows(stream, range(first, end), sequence_length, len(stream), end_id).to(device)
            total += loss_of(model, part.inputs, part.labels, part.positions, reduction="sum").item()
            on_progress(end, windows)
    loss = total / predicted
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": total / (shards.total("validation", "text_bytes") * math.log(2)),
        "eval/unigram_entropy": unigram_entropy(stream, shards.vocabulary_size),
        "eval/tokens": float(predicted),
    }


def read_windows(
    stream: TokenStream, windows: Sequence[int], sequence_length: int, tokens: int, end_id: int | None
) -> MicroBatch:
    """Windows of a stream: one's inputs are ``sequence_length`` tokens, the next one's follow.

    Args:
        windows: number of each, from 0.
        tokens: how many of the stream's tokens may be read; after them is padding, also where a whole window is.
        end_id: the token that ends a document, where attention stays inside documents.
    """
    rows = np.full((len(windows), sequence_length + 1), PADDING, dtype=np.int64)
    for row, window in zip(rows, windows, strict=True):
        start = window * sequence_length
        if start < tokens:
            stream.read(start, row[: tokens - start])
    positions = positions_in_documents(rows, end_id)
    return MicroBatch(torch.from_numpy(rows), None if positions is None else torch.from_numpy(positions))


def unigram_entropy(stream: TokenStream, vocabulary_size: int) -> float:
    """Entropy of the stream's token frequencies, in nats (Shannon 1948)."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(stream), 2**20):
        part = np.empty(min(2**20, len(stream) - start), dtype=np.int64)
        stream.read(start, part)
        counts += np.bincount(part, minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Continue ``prompt`` by up to ``tokens`` tokens, within the model's context; the likeliest at temperature 0.

    Returns:
        The prompt and its continuation.

    Raises:
        DataError: the prompt fills the context, or has characters that the tokenizer does not know.
    """
    try:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"prompt {prompt!r}: the tokenizer cannot encode it ({error}).") from None
    if ids.shape[1] == 0:
        ids = torch.tensor([[tokenizer.eos_token_id]])
    context = model.config.max_position_embeddings
    if ids.shape[1] >= context:
        raise DataError(f"the prompt has {ids.shape[1]} tokens and the model's context only {context}. Shorten it.")
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = model.generate(
        ids.to(model.device).long(),
        attention_mask=torch.ones_like(ids).to(model.device),
        max_new_tokens=min(tokens, context - ids.shape[1]),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return prompt + tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)

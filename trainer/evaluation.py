"""Scores a model on a held-out split: loss, perplexity, bits per byte, and the unigram entropy to compare with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.data.loader import PADDING, MicroBatch, marked, positions_in_documents
from trainer.data.shards import ANSWER, ShardSet, TokenStream
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
    """Score every token of the validation split but the first, in consecutive windows; of conversations the answers.

    A window's ``sequence_length`` tokens predict the same tokens one further; the last window may
    be shorter. With N predicted tokens, their summed negative log-likelihood S in nats, and B the
    bytes of the split's text in UTF-8 (of the answers):

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
    windows = Windows.of(shards, sequence_length, document_mask)
    total, predicted = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for first in range(0, len(windows), batch):
            end = min(len(windows), first + batch)
            part = windows.read(range(first, end)).to(device)
            total += loss_of(model, part.inputs, part.labels, part.positions, reduction="sum").item()
            predicted += int((part.labels >= 0).sum())
            on_progress(end, len(windows))
    loss = total / predicted
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/bits_per_byte": total / (shards.total("validation", "text_bytes") * math.log(2)),
        "eval/unigram_entropy": unigram_entropy(windows.stream, shards.vocabulary_size, windows.marks),
        "eval/tokens": float(predicted),
    }


@dataclass(frozen=True)
class Windows:
    """What is scored together: stretches of the validation split, each with the token before its first label."""

    stream: TokenStream
    marks: TokenStream | None
    """The tokens' marks, where the documents are conversations."""
    end_id: int | None
    """The token that ends a document, where attention stays inside documents that share a window."""
    sequence_length: int
    starts: np.ndarray
    """First token of each window: int64, shape [windows]."""
    stops: np.ndarray
    """Where each ends: int64, shape [windows]."""

    @classmethod
    def of(
        cls, shards: ShardSet, sequence_length: int, document_mask: bool = False, most: int | None = None
    ) -> "Windows":
        """The windows of a shard set.

        Text is cut every ``sequence_length`` tokens. A conversation is one window, or several where it is longer.

        Args:
            document_mask: attention and positions stay inside documents.
            most: take only so many, from the first on.
        """
        stream = shards.stream("validation")
        if not shards.conversations:
            starts = np.arange(0, len(stream) - 1, sequence_length, dtype=np.int64)[:most]
            stops = np.minimum(starts + sequence_length + 1, len(stream))
            end_id = shards.manifest["tokenizer"]["end_id"] if document_mask else None
            return cls(stream, None, end_id, sequence_length, starts, stops)
        lengths = stream.document_lengths()
        firsts = np.cumsum(lengths) - lengths
        pieces = [
            (first + place, min(first + place + sequence_length + 1, first + length))
            for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
            for place in range(0, max(1, length - 1), sequence_length)
        ]
        starts, stops = np.array(pieces[:most], np.int64).reshape(-1, 2).T
        return cls(stream, shards.stream("validation", column="marks"), None, sequence_length, starts, stops)

    def __len__(self) -> int:
        return len(self.starts)

    def read(self, numbers: Sequence[int]) -> MicroBatch:
        """Windows as a micro-batch, padding after their tokens; nothing but padding where there is no such window."""
        rows = np.full((len(numbers), self.sequence_length + 1), PADDING, dtype=np.int64)
        for row, number in zip(rows, numbers, strict=True):
            if number < len(self):
                start, stop = int(self.starts[number]), int(self.stops[number])
                self.stream.read(start, row[: stop - start])
                if self.marks is not None:
                    marks = np.empty(stop - start, np.uint8)
                    self.marks.read(start, marks)
                    row[: stop - start] = marked(row[: stop - start], marks & ANSWER)
        positions = positions_in_documents(rows, self.end_id)
        return MicroBatch(torch.from_numpy(rows), None if positions is None else torch.from_numpy(positions))


def unigram_entropy(stream: TokenStream, vocabulary_size: int, marks: TokenStream | None = None) -> float:
    """Entropy of the frequencies of a stream's tokens, or of its answers' alone, in nats (Shannon 1948)."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(stream), 2**20):
        part = np.empty(min(2**20, len(stream) - start), dtype=np.int64)
        stream.read(start, part)
        if marks is not None:
            of_part = np.empty(len(part), np.uint8)
            marks.read(start, of_part)
            part = part[of_part & ANSWER > 0]
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

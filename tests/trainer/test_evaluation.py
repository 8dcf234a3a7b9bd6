"""Scores on held-out text: with the document mask, every document has the loss that it has alone."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trainer.conftest import LLAMA
from trainer.data.shards import FORMAT_VERSION, ShardSet, ShardWriter
from trainer.durable import complete_directory
from trainer.evaluation import score
from trainer.model import loss_of

END, LENGTH = 99, 64


def test_under_the_document_mask_every_document_is_scored_as_if_it_were_alone(tmp_path):
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(0, END, length), END) for length in random.integers(3, 100, 20)]
    tokens, lengths = np.concatenate(documents), np.array([len(document) for document in documents])
    content = {"kind": "shards", "format_version": FORMAT_VERSION, "tokenizer": {"end_id": END, "vocabulary_size": 100}}
    with complete_directory(tmp_path / "set", content) as aside:
        writer = ShardWriter(aside, "validation", 0, 100, "tokenizer", 2**20)
        writer.add(tokens, lengths, ["text"] * len(lengths), len(tokens))
        writer.flush()
        content["shards"] = writer.shards
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=100, initializer_range=0.5, **LLAMA)).eval()

    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, LENGTH):
            window = tokens[start : start + LENGTH + 1]
            borders = sorted({0, *np.flatnonzero(window[:-1] == END).tolist(), len(window) - 1})
            for first, last in itertools.pairwise(borders):
                alone = torch.from_numpy(window[None, first : last + 1].astype(np.int64))
                total += loss_of(model, alone[:, :-1], alone[:, 1:], reduction="sum").item()
    shards, device = ShardSet.open(tmp_path / "set"), torch.device("cpu")
    masked, whole = (score(model, shards, LENGTH, 2, device, document_mask=mask)["eval/loss"] for mask in (True, False))
    assert masked == pytest.approx(total / (len(tokens) - 1), abs=1e-5)
    assert abs(masked - whole) > 1e-3, "a window holds several documents, so the mask makes a difference"

"""Of conversations only the answers are labels, in any packing, on any ranks, and none sees another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.home import Home
from tasks.pack import pack
from tasks.stage import Reference
from tests.tasks.test_chat import INSTRUCTIONS, chat_data, chat_tokenizer, make_shards, write_chat
from trainer.data.loader import NO_LABEL, Batch, Loader, MicroBatch, Sequences
from trainer.data.shards import ANSWER, ShardSet
from trainer.evaluation import Windows, score
from trainer.model import loss_of

LENGTH = 256


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShardSet, Path]:
    """Conversations that hold the end-of-text token after every answer, some longer than a sequence; their packing."""
    directory = tmp_path_factory.mktemp("chat")
    (directory / "home").mkdir()
    home = Home(directory / "home")
    data = chat_data(
        write_chat(directory / "chat.jsonl", 80), chat_tokenizer(directory / "t", INSTRUCTIONS), sequence_length=LENGTH
    )
    made = make_shards(home, data)
    reference = Reference(path=made.directory, fingerprint=made.manifest["fingerprint"], cached=False)
    return made, pack(home, data, reference).path


def conversations(shards: ShardSet) -> list[tuple[list[int], list[int]]]:
    """Ids and marks of every training conversation."""
    stream, marks = shards.stream("train"), shards.stream("train", column="marks")
    ids, flags = np.empty(len(stream), np.int64), np.empty(len(stream), np.int64)
    stream.read(0, ids)
    marks.read(0, flags)
    ends = np.cumsum(stream.document_lengths())[:-1]
    return [(i.tolist(), m.tolist()) for i, m in zip(np.split(ids, ends), np.split(flags, ends), strict=True)]


def batches(shards: ShardSet, packing: Path | None, world_size: int, micro_batch: int) -> list[list[Batch]]:
    """One epoch of every rank, in global batches of 4 sequences."""
    sequences = Sequences.open(shards, LENGTH, None, 1, packing, document_mask=True)
    loaders = [Loader(sequences, 4, micro_batch, rank, world_size, torch.device("cpu")) for rank in range(world_size)]
    return [list(loader.iterate(0, len(sequences) // 4)) for loader in loaders]


def joined(ranks: list[list[Batch]], kind: str) -> list[torch.Tensor]:
    """What the ranks have of each global batch together."""
    return [
        torch.cat([getattr(part, kind) for batch in of_step for part in batch.micro_batches])
        for of_step in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize("packed", [True, False])
def test_labels_are_the_answers_and_are_counted_over_all_ranks(shards, packed):
    packing = shards[1] if packed else None
    one = batches(shards[0], packing, world_size=1, micro_batch=4)
    labels = joined(one, "labels")
    trained = sum(int((part != NO_LABEL).sum()) for part in labels)
    answers = sum(sum(mark & ANSWER for mark in marks) for _, marks in conversations(shards[0]))
    assert 0.5 * answers < trained <= answers  # what does not fill a last batch is left out
    for world_size, micro_batch in [(1, 1), (2, 2), (4, 1)]:
        ranks = batches(shards[0], packing, world_size, micro_batch)
        for kind in ("inputs", "labels", "positions"):
            for mine, theirs in zip(joined(ranks, kind), joined(one, kind), strict=True):
                assert torch.equal(mine, theirs)
        for of_step, expected in zip(zip(*ranks, strict=True), labels, strict=True):
            assert {batch.tokens for batch in of_step} == {int((expected != NO_LABEL).sum())}


def test_a_packed_conversation_is_whole_at_positions_from_0_with_labels_at_its_answers(shards):
    sequences = Sequences.open(shards[0], LENGTH, None, 1, shards[1], document_mask=True)
    rows = sequences.gather(np.arange(len(sequences)))
    part = MicroBatch(torch.from_numpy(rows))
    positions = sequences.positions(rows)
    assert positions is not None
    seen = 0
    whole = {tuple(ids): marks for ids, marks in conversations(shards[0]) if len(ids) <= LENGTH}
    for inputs, labels, places in zip(part.inputs.tolist(), part.labels.tolist(), positions.tolist(), strict=True):
        tokens = [*inputs, max(labels[-1], 0)]
        starts = [n for n, place in enumerate(places) if place == 0]
        for start in starts[1:] if starts[:1] == [0] else starts:
            for ids, marks in whole.items():
                if tokens[start : start + len(ids) - 1] == list(ids[:-1]):
                    expected = [t if m & ANSWER else NO_LABEL for t, m in zip(ids[1:], marks[1:], strict=True)]
                    assert labels[start : start + len(ids) - 1] == expected
                    assert places[start : start + len(ids) - 1] == list(range(len(ids) - 1))
                    seen += 1
    assert seen == len(whole) > 40


def test_neither_the_questions_nor_other_conversations_are_trained(shards):
    sequences = Sequences.open(shards[0], LENGTH, None, 1, shards[1], document_mask=True)
    rows = sequences.gather(np.arange(2))
    part = MicroBatch(torch.from_numpy(rows), torch.from_numpy(sequences.positions(rows)))
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=263, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, logits: torch.Tensor) -> None:
        logits.retain_grad()
        kept.append(logits)

    model.lm_head.register_forward_hook(keep)
    loss_of(model, part.inputs, part.labels, part.positions, "sum").backward()
    assert kept[0].grad is not None
    assert torch.equal(kept[0].grad.abs().sum(-1) > 0, part.labels != NO_LABEL)

    question = int((part.labels[0] == NO_LABEL).nonzero()[3]) + 1
    changed = rows.copy()
    changed[0, question] = ~(~changed[0, question] ^ 1)
    other = MicroBatch(torch.from_numpy(changed), part.positions)
    assert not torch.equal(other.inputs, part.inputs)
    assert torch.equal(other.labels, part.labels)


def test_the_score_is_that_of_the_answers_alone(shards):
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(vocab_size=263, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    metrics = score(model, shards[0], LENGTH, 4, torch.device("cpu"))
    assert metrics["eval/tokens"] == shards[0].total("validation", "answer_tokens")
    # by hand, one conversation that fits at a time
    windows = Windows.of(shards[0], 1000)
    total = 0.0
    for number in range(len(windows)):
        part = windows.read([number])
        with torch.no_grad():
            logits = model(input_ids=part.inputs).logits.log_softmax(-1)
        chosen = part.labels[0] != NO_LABEL
        total -= logits[0, chosen].gather(1, part.labels[0][chosen][:, None]).sum().item()
    long = shards[0].stream("validation").document_lengths().max() > LENGTH
    assert metrics["eval/loss"] * metrics["eval/tokens"] == pytest.approx(total, rel=0.02 if long else 1e-5)

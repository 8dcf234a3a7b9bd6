"""Best-fit packing: no document that fits is cut, every token is trained once an epoch, documents stay apart."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import ModelConfig
from trainer.data.loader import NO_LABEL, PADDING, Loader, Sequences
from trainer.data.packing import PackingPlan, best_fit, plan_name, write_plan
from trainer.data.shards import FORMAT_VERSION, ShardSet, ShardWriter
from trainer.durable import complete_directory
from trainer.errors import ConfigError, DataError
from trainer.model import check_document_mask, loss_of, model_configuration

END = 0
LENGTHS = st.lists(st.integers(0, 60), max_size=60)


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Rooms left by best-fit decreasing as the paper has it, a piece at a time."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@given(LENGTHS, st.integers(1, 40))
def test_every_token_is_in_one_piece_and_only_documents_too_long_are_cut(lengths, capacity):
    offsets, starts, sizes = best_fit(np.array(lengths, dtype=np.int64), capacity)
    covered = sorted(token for start, size in zip(starts, sizes, strict=True) for token in range(start, start + size))
    assert covered == list(range(sum(lengths)))
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    whole = set(zip(starts.tolist(), sizes.tolist(), strict=True))
    assert all((begin, size) in whole for begin, size in zip(begins, lengths, strict=True) if 0 < size <= capacity)
    for begin, size in zip(begins, lengths, strict=True):
        assert all((begin + n * capacity, capacity) in whole for n in range(size // capacity))
    filled = [int(sizes[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    assert all(0 < tokens <= capacity for tokens in filled)


@given(LENGTHS, st.integers(1, 40))
def test_handling_equal_lengths_together_packs_as_tightly_as_one_by_one(lengths, capacity):
    offsets, _, sizes = best_fit(np.array(lengths, dtype=np.int64), capacity)
    rooms = [capacity - int(sizes[a:b].sum()) for a, b in itertools.pairwise(offsets)]
    assert sorted(rooms) == one_by_one(sizes.tolist(), capacity)


def packed_set(directory: Path, lengths: list[int], capacity: int, shard_tokens: int = 50) -> tuple[ShardSet, Path]:
    """Documents of distinct tokens that end with END, and the directory of their plan."""
    content = {"kind": "shards", "format_version": FORMAT_VERSION, "shards": [], "tokenizer": {"end_id": END}}
    with complete_directory(directory / "set", content) as aside:
        writer = ShardWriter(aside, "train", 0, 60_000, "tokenizer-1", shard_tokens)
        begin = 1
        for number, length in enumerate(lengths):
            ids = np.array([*range(begin, begin + length - 1), END])
            writer.add(ids, np.array([length]), [f"text-{number}"], length)
            begin += length - 1
        writer.flush()
        content["shards"] = writer.shards
    shards = ShardSet.open(directory / "set")
    (directory / "plan").mkdir()
    write_plan(directory / "plan" / plan_name(None), shards.stream("train").document_lengths(), capacity)
    return shards, directory / "plan"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(2, 24), st.integers(0, 2**32))
def test_an_epoch_trains_every_token_once_after_its_true_predecessor(tmp_path_factory, lengths, capacity, seed):
    shards, plan = packed_set(tmp_path_factory.mktemp("packed"), lengths, capacity)
    sequences = Sequences.open(shards, capacity, None, seed, plan)
    rows = sequences.gather(np.arange(len(sequences)))
    labels, inputs = rows[:, 1:], rows[:, :-1]
    trained = labels[labels != PADDING]
    text = np.empty(sum(lengths), dtype=np.int64)
    shards.stream("train").read(0, text)
    assert np.array_equal(np.sort(trained), np.sort(text))
    assert len(trained) == sequences.tokens(sequences.locate(np.arange(len(sequences))))
    inside = (labels > END) & (inputs > END)
    assert (labels[inside] == inputs[inside] + 1).all()
    if max(lengths) <= capacity:
        firsts = np.isin(labels, np.cumsum([1, *(length - 1 for length in lengths)])[:-1]) & (labels > END)
        assert (inputs[firsts] == END).all(), "a document begins after the end of another"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 12])
def test_every_rank_knows_the_labels_of_the_global_batch_and_has_its_part_of_it(tmp_path, world):
    lengths = np.random.default_rng(0).integers(1, 30, 100).tolist()
    shards, plan = packed_set(tmp_path, lengths, 16)
    sequences = Sequences.open(shards, 16, None, 1, plan, document_mask=True)
    ranks = [Loader(sequences, 12, 1, rank, world, torch.device("cpu")) for rank in range(world)]
    for parts in zip(*(loader.iterate(24, 30) for loader in ranks), strict=True):
        labels = torch.cat([part.labels for batch in parts for part in batch.micro_batches])
        assert {batch.tokens for batch in parts} == {int((labels != NO_LABEL).sum())}
        assert len(labels) == 12
    whole = Loader(sequences, 12, 12, 0, 1, torch.device("cpu")).batch(48).micro_batches[0]
    parts = [part for loader in ranks for part in loader.batch(48).micro_batches]
    assert torch.equal(torch.cat([part.rows for part in parts]), whole.rows)
    assert torch.equal(torch.cat([part.positions for part in parts]), whole.positions)


def test_positions_restart_where_a_document_begins(tmp_path):
    shards, plan = packed_set(tmp_path, [3, 5, 2, 7], 12)
    sequences = Sequences.open(shards, 12, None, 1, plan, document_mask=True)
    rows = np.array([[END, 5, 6, END, 7, END, 9, 8, 7, 6, 5, END, PADDING]])
    assert sequences.positions(rows).tolist() == [[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 0]]
    assert Sequences.open(shards, 12, None, 1, plan).positions(rows) is None


def test_a_plan_is_the_same_bytes_every_time_and_pyarrow_reads_it(tmp_path):
    import pyarrow as pa

    lengths = np.random.default_rng(0).integers(0, 3000, 1000)
    counts = [write_plan(tmp_path / name, lengths, 1024) for name in ("one", "other")]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    rows = pa.ipc.open_file(str(tmp_path / "one")).read_all().to_pylist()
    plan = PackingPlan(tmp_path / "one")
    assert len(rows) == len(plan) == counts[0]["sequences"]
    assert sum(sum(row["lengths"]) for row in rows) == counts[0]["tokens"] == lengths.sum()
    assert plan.pieces(7) == (rows[7]["starts"], rows[7]["lengths"])
    assert counts[0]["tokens"] > 0.99 * 1024 * len(plan)


def test_a_plan_that_cannot_be_read_is_named(tmp_path):
    for content in (b"", b"ARROW1\0\0", b"x" * 1000):
        (tmp_path / "all.arrow").write_bytes(content)
        with pytest.raises(DataError, match=r"all\.arrow: not a readable packing plan"):
            PackingPlan(tmp_path / "all.arrow")


SIZES = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    "qwen3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "lfm2": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip


def small_model(kind: str, attention: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    configuration = model_configuration(ModelConfig(type=kind, config=SIZES[kind]), 100, 64)
    return AutoModelForCausalLM.from_config(configuration, attn_implementation=attention).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_packed_document_has_the_logits_that_it_has_alone(kind, attention):
    model = small_model(kind, attention)
    random = torch.Generator().manual_seed(1)
    lengths = [[9, 1, 22], [16, 16], [1, 1, 29, 1]]
    documents = [[torch.randint(1, 100, (n,), generator=random) for n in row] for row in lengths]
    inputs = torch.stack([torch.cat(row) for row in documents])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with torch.no_grad():
        packed = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
        crossing = model(input_ids=inputs, use_cache=False).logits
        alone = [torch.cat([model(input_ids=part[None]).logits[0] for part in row]) for row in documents]
    alone = torch.stack(alone)
    assert torch.allclose(packed, alone, atol=1e-5)
    assert not torch.allclose(crossing, alone, atol=1e-3), "the comparison sees what crosses"


def test_a_model_that_lets_documents_see_each_other_is_refused():
    for kind in ("llama", "gpt2"):
        check_document_mask(small_model(kind, "sdpa"), 32)
    with pytest.raises(ConfigError, match=r"data\.document_mask: in a model of type 'lfm2'"):
        check_document_mask(small_model("lfm2", "sdpa"), 32)


def test_padding_takes_no_part_in_the_loss():
    model = small_model("llama", "sdpa")
    inputs, labels = torch.randint(1, 100, (2, 16)), torch.randint(1, 100, (2, 16))
    labels[0, 5:] = NO_LABEL
    summed = loss_of(model, inputs, labels, reduction="sum")
    parts = loss_of(model, inputs[:1, :5], labels[:1, :5], reduction="sum") + loss_of(
        model, inputs[1:], labels[1:], reduction="sum"
    )
    assert summed.item() == pytest.approx(parts.item(), rel=1e-5)

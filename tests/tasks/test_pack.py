"""The pack stage: plans that cover all text of every source, cut nothing that fits, and keep the sources' weights."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from tasks.home import Home
from tasks.pack import pack, sequences_and_tokens
from tasks.sources import resolve
from tasks.stage import Reference
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer
from tests.conftest import DAMAGE
from trainer.data.loader import PADDING, Sequences
from trainer.data.packing import PackingPlan, plan_name
from trainer.data.shards import ShardSet

WEIGHTS = [3.0, 1.0]
LENGTH = 64


@pytest.fixture
def mixed(work: Home, tmp_path: Path) -> tuple[DataConfig, Reference]:
    """Two sources of documents of 2 to 150 tokens, and their shard set."""
    draw = random.Random(3)
    for name, count in (("a", 400), ("d", 300)):
        texts = (f"{name}{n} ".ljust(draw.randint(6, 149), name) for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig.model_validate(
        {
            "sources": [
                {"path": str(tmp_path / f"{name}.jsonl"), "weight": weight}
                for name, weight in zip("ad", WEIGHTS, strict=True)
            ],
            "tokenizer": "byte",
            "validation_fraction": 0.1,
            "sequence_length": LENGTH,
            "packing": "best_fit",
        }
    )
    files = resolve(work, config.sources, "s")
    return config, tokenize(work, config, files, [], build_tokenizer(work, config.tokenizer, config.reading, files))


def test_every_source_is_covered_once_and_no_document_that_fits_is_cut(work, mixed):
    config, shards = mixed
    packed = pack(work, config, shards)
    shard_set = ShardSet.open(shards.path)
    for source in (0, 1):
        lengths = shard_set.stream("train", source).document_lengths()
        plan = PackingPlan(packed.path / plan_name(source))
        pieces = sorted(piece for n in range(len(plan)) for piece in zip(*plan.pieces(n), strict=True))
        assert all(sum(plan.pieces(n)[1]) <= LENGTH for n in range(len(plan)))
        assert [start for start, _ in pieces] == np.cumsum([0, *(size for _, size in pieces)])[:-1].tolist()
        whole = dict(pieces)
        starts = np.cumsum(lengths) - lengths
        fitting = [
            (start, size) for start, size in zip(starts.tolist(), lengths.tolist(), strict=True) if size <= LENGTH
        ]
        assert 0 < len(fitting) < len(lengths)
        assert all(whole[start] == size for start, size in fitting)
    sequences, tokens = sequences_and_tokens(packed.path)
    assert tokens == shard_set.total("train", "tokens")
    assert tokens / (sequences * LENGTH) > 0.95, "little padding"


def test_packed_sources_come_in_the_proportions_of_their_weights(work, mixed):
    config, shards = mixed
    packed = pack(work, config, shards)
    sequences = Sequences.open(ShardSet.open(shards.path), LENGTH, config.weights, 5, packed.path)
    assert [len(plan) for plan in sequences.plans] == list(sequences.order.sequences)
    sources = sequences.locate(np.arange(4096 * 3))[:, 0]
    for window in np.split(sources, 3):
        assert np.bincount(window).tolist() == [3072, 1024]
    rows = sequences.gather(np.arange(64))
    others = {0: "d", 1: "a"}
    canary = ShardSet.open(shards.path).manifest["canary"]
    ids = dict(zip(canary["text"].encode(), canary["ids"], strict=True))
    for row, source in zip(rows, sources, strict=False):
        labels = row[1:][row[1:] != PADDING]
        assert ids[ord(others[source])] not in labels, "a sequence holds one source's text alone"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_plan_is_made_once_for_a_set_and_a_length_and_again_where_it_is_damaged(work, mixed, kind):
    config, shards = mixed
    first = pack(work, config, shards)
    assert pack(work, config, shards).cached
    other = pack(work, config.model_copy(update={"sequence_length": 32}), shards)
    assert other.path != first.path
    content = (first.path / plan_name(1)).read_bytes()
    DAMAGE[kind](first.path / plan_name(1))
    again = pack(work, config, shards)
    assert (again.cached, again.path) == (False, first.path)
    assert (first.path / plan_name(1)).read_bytes() == content

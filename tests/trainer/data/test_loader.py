"""The loader: the same global batches for every world size and resume point, each token once an epoch."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.data.loader import Batch, Loader, Sequences
from trainer.data.order import Order
from trainer.data.shards import FORMAT_VERSION, ShardSet, ShardWriter
from trainer.durable import complete_directory
from trainer.errors import DataError

LENGTH = 4
CPU = torch.device("cpu")


def shard_set(directory: Path, sizes: tuple[int, ...]) -> ShardSet:
    """One source a size; source s holds the tokens s*10000, s*10000 + 1, …, over several shards."""
    content = {"kind": "shards", "format_version": FORMAT_VERSION, "shards": []}
    with complete_directory(directory, content) as aside:
        for source, size in enumerate(sizes):
            writer = ShardWriter(aside, "train", source, 60_000, "tokenizer-1", 100)
            for ids in np.array_split(np.arange(size) + 10_000 * source, max(1, size // 30)):
                writer.add(ids, np.array([len(ids)]), ["text"], len(ids))
            writer.flush()
            content["shards"] += writer.shards
    return ShardSet.open(directory)


@pytest.fixture
def sequences(tmp_path):
    """999 sequences of 4 tokens and one more token at the end."""
    return Sequences.open(shard_set(tmp_path / "set", (999 * LENGTH + 3,)), LENGTH, None, seed=1)


def loader(sequences: Sequences, batch: int, rank: int = 0, world: int = 1, micro: int | None = None) -> Loader:
    return Loader(sequences, batch, micro or batch // world, rank, world, CPU)


def inputs_of(batch: list[Batch]) -> torch.Tensor:
    return torch.cat([part.inputs for part in batch.micro_batches])


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("position", [0, 240, 999 - 7, 10**6 + 1])
def test_the_slices_of_all_ranks_are_the_global_batch_for_every_world_size(sequences, world, position):
    batch = 240 // world * world
    whole = loader(sequences, batch).batch(position)
    slices = [loader(sequences, batch, rank, world, micro=1).batch(position) for rank in range(world)]
    assert all(len(part.micro_batches) == batch // world for part in slices)
    assert torch.equal(torch.cat([inputs_of(part) for part in slices]), inputs_of(whole))


@pytest.mark.parametrize("micro", [1, 2, 3, 8, 24, 240])
def test_micro_batches_only_cut_the_global_batch(sequences, micro):
    parts = loader(sequences, 240, micro=micro).batch(480)
    assert [len(part.inputs) for part in parts.micro_batches] == [micro] * (240 // micro)
    assert torch.equal(inputs_of(parts), inputs_of(loader(sequences, 240).batch(480)))


@pytest.mark.parametrize(("batch", "world", "micro"), [(240, 7, 1), (240, 16, 4), (5, 2, 1), (4, 8, 1)])
def test_a_batch_that_does_not_divide_is_refused_and_never_shortened(sequences, batch, world, micro):
    with pytest.raises(ValueError, match=f"{batch} sequences does not divide"):
        loader(sequences, batch, 0, world, micro)


def test_labels_are_the_inputs_one_further_and_everything_is_contiguous_int64(sequences):
    for part in loader(sequences, 12, micro=4).batch(36).micro_batches:
        inputs, labels = part.inputs, part.labels
        assert torch.equal(labels, inputs + 1), "the tokens of the text count upwards"
        assert inputs.shape == labels.shape == (4, LENGTH)
        for tensor in (part.rows, inputs, labels):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_but_the_first_and_the_tail_is_predicted_once_an_epoch(sequences, epoch):
    size = len(sequences)
    batches = loader(sequences, 27).iterate(epoch * size, size // 27)
    predicted = torch.cat([part.labels.flatten() for batch in batches for part in batch.micro_batches])
    assert torch.equal(predicted.sort().values, torch.arange(1, size * LENGTH + 1))


@pytest.mark.parametrize("stop", [1, 3, 36, 37, 38, 60])
def test_a_resume_goes_on_as_if_never_stopped_also_across_the_end_of_an_epoch(sequences, stop):
    whole = [inputs_of(batch) for batch in loader(sequences, 27).iterate(0, 80)]
    resumed = [inputs_of(batch) for batch in loader(sequences, 27).iterate(stop * 27, 80 - stop)]
    assert all(torch.equal(one, other) for one, other in zip(whole[stop:], resumed, strict=True))


def test_two_resumes_at_other_world_sizes_repeat_and_skip_nothing(sequences):
    size, batch = len(sequences), 24
    seen, position = [], 0
    for world, steps in ((1, 20), (3, 30), (8, 34)):
        ranks = [list(loader(sequences, batch, rank, world).iterate(position, steps)) for rank in range(world)]
        seen += [inputs_of(part) for step in zip(*ranks, strict=True) for part in step]
        position += steps * batch
    first_tokens = torch.cat(seen)[:, 0]
    assert position > 2 * size
    for epoch in range(2):
        assert len(first_tokens[epoch * size : (epoch + 1) * size].unique()) == size


def test_what_was_prefetched_and_not_consumed_comes_again(sequences):
    batches = loader(sequences, 9).iterate(0, 50)
    consumed = [inputs_of(next(batches)) for _ in range(3)]
    batches.close()
    again = inputs_of(next(loader(sequences, 9).iterate(27, 1)))
    straight = [inputs_of(batch) for batch in loader(sequences, 9).iterate(0, 4)]
    assert torch.equal(torch.cat([*consumed, again]), torch.cat(straight))


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


def test_the_thread_ends_when_the_consumer_stops_early_or_fails(sequences):
    batches = loader(sequences, 9).iterate(0, 10**6)
    next(batches)
    assert loader_threads()
    batches.close()
    assert not loader_threads()

    def failing() -> None:
        for _ in loader(sequences, 9).iterate(0, 10**6):
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        failing()
    assert not loader_threads()


def test_the_thread_leaves_the_cores_to_training(tmp_path):
    content = {"kind": "shards", "format_version": FORMAT_VERSION}
    with complete_directory(tmp_path / "large", content) as aside:
        writer = ShardWriter(aside, "train", 0, 60_000, "tokenizer-1", 2**21)
        writer.add(np.arange(2**20) % 60_000, np.array([2**20]), ["text"], 2**20)
        writer.flush()
        content["shards"] = writer.shards
    large = Sequences.open(ShardSet.open(tmp_path / "large"), 1024, None, seed=1)
    large.gather(np.arange(1))  # maps the shard, for which pyarrow has threads
    torch.ones(2**20).add(1)  # the threads that serve this one are there from now on
    threads = len(os.listdir("/proc/self/task"))

    batches = loader(large, 512).iterate(0, 4)
    next(batches)
    now = len(os.listdir("/proc/self/task"))
    batches.close()

    # with more OpenMP threads than cores, all of them sleep at each barrier: a step takes 1.3 to 1.7 times as long
    assert now == threads + 1, "the loader's thread, without any that serve it"


def test_the_thread_ends_after_the_last_step(sequences):
    assert len(list(loader(sequences, 9).iterate(0, 7))) == 7
    assert list(loader(sequences, 9).iterate(0, 0)) == []
    assert not loader_threads()


def test_an_error_in_the_thread_reaches_the_consumer_after_the_good_batches(tmp_path):
    shards = shard_set(tmp_path / "set", (41,))
    broken = Sequences([shards.stream("train")], Order((1000,), (1.0,), seed=1), LENGTH)
    batches = loader(broken, 1).iterate(0, 500)
    with pytest.raises(IndexError, match="of a stream of 41"):
        list(batches)
    assert not loader_threads()


def test_waiting_is_measured(sequences):
    one = loader(sequences, 9)
    list(one.iterate(0, 5))
    assert 0 < one.seconds_waited < 60


def test_weighted_sources_are_mixed_in_proportion_and_each_keeps_its_own_epochs(tmp_path):
    shards = shard_set(tmp_path / "set", (401, 2001))
    mixed = Sequences.open(shards, LENGTH, [1.0, 3.0], seed=1)
    assert len(mixed) == 100 + 500
    firsts = mixed.gather(np.arange(4096))[:, 0]
    source = firsts // 10_000
    assert np.bincount(source).tolist() == [1024, 3072]
    visits = np.bincount(firsts[source == 0] // LENGTH, minlength=100)
    assert set(visits.tolist()) == {10, 11}


def test_without_weights_all_sources_are_one_stream(tmp_path):
    shards = shard_set(tmp_path / "set", (403, 2001))
    joined = Sequences.open(shards, LENGTH, None, seed=1)
    assert len(joined) == (403 + 2001 - 1) // LENGTH
    rows = joined.gather(np.arange(len(joined)))
    expected = np.concatenate([np.arange(403), np.arange(2001) + 10_000])[: len(joined) * LENGTH]
    assert np.array_equal(np.sort(rows[:, :-1].ravel()), expected)


@pytest.mark.parametrize(
    ("sizes", "weights", "words"), [((4,), None, "all has 4"), ((50, 3), [1, 1], "source 1 has 3")]
)
def test_a_text_shorter_than_one_sequence_is_refused_with_its_length(tmp_path, sizes, weights, words):
    with pytest.raises(DataError, match=f"{words} tokens.*sequence_length={LENGTH}"):
        Sequences.open(shard_set(tmp_path / "set", sizes), LENGTH, weights, seed=1)


def test_one_sequence_is_enough_and_repeats(tmp_path):
    single = Sequences.open(shard_set(tmp_path / "set", (LENGTH + 1,)), LENGTH, None, seed=1)
    assert single.gather(np.arange(3)).tolist() == [[0, 1, 2, 3, 4]] * 3

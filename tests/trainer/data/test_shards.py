"""The shard format: what is written is read back, by us and by everyone else, or refused."""

import hashlib
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from trainer.data.shards import FORMAT_VERSION, ShardSet, ShardWriter, TokenStream, token_dtype
from trainer.durable import complete_directory
from trainer.errors import DataError

CANARY = {"text": "Zoë 🦊\r\n<|endoftext|>", "ids": [90, 111, 3]}


def documents(count: int, vocabulary: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocabulary, random.integers(1, 40)) for _ in range(count)]


def write(directory: Path, texts: list[np.ndarray], vocabulary: int = 300, shard_tokens: int = 10**6) -> ShardWriter:
    writer = ShardWriter(directory, "train", 0, vocabulary, "tokenizer-1", shard_tokens)
    for number, ids in enumerate(texts):
        writer.add(ids, np.array([len(ids)]), [f"text-{number}"], 3 * len(ids))
    writer.flush()
    return writer


def shard_set(directory: Path, **changes: object) -> ShardSet:
    content = {
        "kind": "shards",
        "format_version": FORMAT_VERSION,
        "tokenizer": {"fingerprint": "tokenizer-1", "vocabulary_size": 300},
        "canary": CANARY,
        **changes,
    }
    with complete_directory(directory, content) as aside:
        content["shards"] = write(aside, documents(9, 300), shard_tokens=50).shards
    return ShardSet.open(directory)


def stream_of(*paths: Path) -> TokenStream:
    """A stream over shards, with the counts that their own metadata has."""
    counts = [int(pa.ipc.open_file(str(path)).schema.metadata[b"forgeline.tokens"]) for path in paths]
    return TokenStream(zip(paths, counts, strict=True))


def read(stream: TokenStream, start: int, count: int) -> list[int]:
    out = np.empty(count, dtype=np.int64)
    stream.read(start, out)
    return out.tolist()


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (262_144, "uint32")],
)
def test_tokens_take_the_smallest_unsigned_type_that_holds_the_vocabulary(tmp_path, vocabulary, expected):
    assert token_dtype(vocabulary) == expected
    ids = np.array([0, 1, vocabulary - 1])
    writer = write(tmp_path, [ids], vocabulary)
    path = tmp_path / writer.shards[0]["path"]
    column = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0).column("tokens")
    assert column.type.value_type == expected
    assert read(stream_of(path), 0, 3) == ids.tolist()


@pytest.mark.parametrize("ids", [[0, 300], [-1, 0], [65_536 + 5]])
def test_an_id_outside_the_vocabulary_is_refused_and_never_wrapped(tmp_path, ids):
    with pytest.raises(DataError, match=r"text-0.*vocabulary of 300"):
        write(tmp_path, [np.array(ids)])


def test_what_was_written_is_read_back_across_every_shard_border(tmp_path):
    texts = documents(60, 300)
    writer = write(tmp_path, texts, shard_tokens=64)
    whole = np.concatenate(texts).tolist()
    stream = stream_of(*(tmp_path / shard["path"] for shard in writer.shards))
    assert len(writer.shards) > 10
    assert len(stream) == len(whole) == sum(shard["tokens"] for shard in writer.shards)
    for count in (1, 2, 65, 200, len(whole)):
        for start in range(0, len(whole) - count + 1, max(1, count // 3)):
            assert read(stream, start, count) == whole[start : start + count]


def test_the_writer_counts_documents_tokens_and_bytes_of_each_shard(tmp_path):
    texts = documents(20, 300)
    shards = write(tmp_path, texts, shard_tokens=100).shards
    assert sum(shard["documents"] for shard in shards) == 20
    assert sum(shard["text_bytes"] for shard in shards) == 3 * sum(map(len, texts))
    assert all(shard["tokens"] < 100 + 40 for shard in shards)
    assert [shard["path"] for shard in shards] == [
        f"train/source-000-shard-{number:05d}.arrow" for number in range(len(shards))
    ]


def test_pyarrow_and_datasets_both_read_a_shard(tmp_path):
    texts = documents(30, 300)
    path = tmp_path / write(tmp_path, texts).shards[0]["path"]
    batch = pa.ipc.open_file(str(path)).get_batch(0)
    assert batch.column("tokens").to_pylist() == [ids.tolist() for ids in texts]
    rows = datasets.Dataset.from_file(str(path))
    assert rows["tokens"][:] == [ids.tolist() for ids in texts]
    assert rows["source"][:] == [f"text-{number}" for number in range(30)]
    with pa.ipc.open_stream(str(path)) as stream:
        assert stream.read_all().num_rows == 30


def test_a_shard_says_what_it_is_in_its_schema(tmp_path):
    texts = documents(5, 300)
    path = tmp_path / write(tmp_path, texts).shards[0]["path"]
    metadata = pa.ipc.open_file(str(path)).schema.metadata
    values = np.concatenate(texts).astype("<u2")
    assert metadata[b"forgeline.format_version"] == str(FORMAT_VERSION).encode()
    assert metadata[b"forgeline.tokenizer"] == b"tokenizer-1"
    assert metadata[b"forgeline.vocabulary_size"] == b"300"
    assert metadata[b"forgeline.tokens"] == str(len(values)).encode()
    assert metadata[b"forgeline.sha256"] == hashlib.sha256(values.tobytes()).hexdigest().encode()


def test_a_stream_maps_its_files_and_copies_nothing(tmp_path):
    path = tmp_path / write(tmp_path, [np.zeros(2_000_000, dtype=np.int64)]).shards[0]["path"]
    before = pa.total_allocated_bytes()
    stream = stream_of(path)
    assert len(stream) == 2_000_000
    assert pa.total_allocated_bytes() - before < 10_000


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 10_000), (10_000, 1)])
def test_reading_past_an_end_is_an_error_and_never_wraps(tmp_path, start, count):
    path = tmp_path / write(tmp_path, documents(5, 300)).shards[0]["path"]
    with pytest.raises(IndexError, match="of a stream of"):
        read(stream_of(path), start, count)


def test_documents_of_no_tokens_and_an_empty_split_do_no_harm(tmp_path):
    path = tmp_path / write(tmp_path, [np.array([], dtype=np.int64), np.array([7])]).shards[0]["path"]
    assert read(stream_of(path), 0, 1) == [7]
    assert len(TokenStream([])) == 0
    assert write(tmp_path, []).shards == []


def test_a_shard_cut_off_anywhere_is_refused_by_name(tmp_path):
    path = tmp_path / write(tmp_path, documents(4, 300)).shards[0]["path"]
    whole, stream = path.read_bytes(), stream_of(path)
    for size in range(0, len(whole), 13):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=path.name):
            read(TokenStream([(path, len(stream))]), 0, 1)


def test_a_shard_with_a_damaged_byte_is_refused_by_name_or_keeps_its_length(tmp_path):
    texts = documents(4, 300)
    path = tmp_path / write(tmp_path, texts).shards[0]["path"]
    whole = path.read_bytes()
    refused, tokens = 0, sum(map(len, texts))
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert len(read(TokenStream([(path, tokens)]), 0, tokens)) == tokens
        except DataError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


def test_a_missing_shard_is_refused_by_name(tmp_path):
    shards = shard_set(tmp_path / "set")
    lost = shards.manifest["shards"][0]["path"]
    (tmp_path / "set" / lost).unlink()
    with pytest.raises(DataError, match=lost):
        shards.stream("train")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_is_refused_by_name_when_the_set_is_opened(tmp_path, change):
    shards = shard_set(tmp_path / "set")
    path = tmp_path / "set" / shards.manifest["shards"][1]["path"]
    path.write_bytes(path.read_bytes()[:-1] if change < 0 else path.read_bytes() + b"x")
    with pytest.raises(DataError, match=f"{path.name}: .* bytes, the manifest says"):
        shards.stream("train")


def test_a_shard_with_another_count_than_the_manifest_is_refused_by_name(tmp_path):
    path = tmp_path / write(tmp_path, documents(5, 300)).shards[0]["path"]
    with pytest.raises(DataError, match=f"{path.name}: it has .* tokens and the set's manifest says 7"):
        read(TokenStream([(path, 7)]), 0, 1)


def test_opening_maps_no_shard_and_a_read_maps_only_its_own(tmp_path):
    writer = write(tmp_path, documents(60, 300), shard_tokens=64)
    stream = stream_of(*(tmp_path / shard["path"] for shard in writer.shards))
    assert not stream._mapped
    read(stream, len(stream) - 2, 2)
    assert list(stream._mapped) == [len(writer.shards) - 1]


@pytest.mark.parametrize("vocabulary", [2**8, 2**16, 2**20])  # the highest ids use the type's last bit
@pytest.mark.parametrize("length", [1, 2, 17, 150])
def test_rows_are_gathered_across_every_shard_border_in_any_order(tmp_path, length, vocabulary):
    texts = documents(60, vocabulary)
    writer = write(tmp_path, texts, vocabulary, shard_tokens=64)
    stream = stream_of(*(tmp_path / shard["path"] for shard in writer.shards))
    whole = np.concatenate(texts)
    starts = np.random.default_rng(0).permutation(len(whole) - length + 1)
    expected = np.lib.stride_tricks.sliding_window_view(whole, length)[starts]
    for together in (1, 5, len(starts)):
        rows = np.empty((len(starts), length), dtype=np.int64)
        for first in range(0, len(starts), together):
            stream.gather(starts[first : first + together], rows[first : first + together])
        assert np.array_equal(rows, expected), f"{together} rows a call"
    with pytest.raises(IndexError, match="of a stream of"):
        stream.gather(np.array([len(whole) - length + 1]), rows[:1])


def test_the_documents_lengths_are_those_written(tmp_path):
    texts = documents(60, 300)
    writer = write(tmp_path, texts, shard_tokens=64)
    stream = stream_of(*(tmp_path / shard["path"] for shard in writer.shards))
    assert stream.document_lengths().tolist() == [len(ids) for ids in texts]


def test_a_set_knows_its_totals(tmp_path):
    shards = shard_set(tmp_path / "set")
    assert shards.vocabulary_size == 300
    assert shards.total("train", "documents") == 9
    assert shards.total("train", "tokens") == len(shards.stream("train")) == len(shards.stream("train", 0))
    assert (
        shards.total("validation", "tokens") == len(shards.stream("validation")) == len(shards.stream("train", 1)) == 0
    )


@pytest.mark.parametrize("content", [None, "", "{", "[]", "null", '"text"', '{"kind": "export"}'])
def test_a_directory_that_is_no_shard_set_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match="not a shard set"):
        ShardSet.open(tmp_path)


def test_a_set_of_another_format_is_refused_with_both_versions(tmp_path):
    with pytest.raises(DataError, match=f"shard format 99, this version reads {FORMAT_VERSION}"):
        shard_set(tmp_path / "set", format_version=99)


def test_a_tokenizer_that_encodes_the_canary_otherwise_is_refused(tmp_path):
    shards = shard_set(tmp_path / "set")
    shards.check_canary(lambda text: CANARY["ids"] if text == CANARY["text"] else [])
    for ids in ([], [90, 111], [90, 111, 4], [90, 111, 3, 0]):
        with pytest.raises(DataError, match="another tokenizer"):
            shards.check_canary(lambda text, ids=ids: ids)

"""Shards: Arrow IPC files of token ids, one row a document, and the manifest that binds them.

Owns the format (writer and reader). Never tokenizes and never shuffles.

A shard set is a directory::

    manifest.json                            files with checksums, shards, tokenizer, canary, lineage
    train/source-000-shard-00000.arrow       columns: tokens (list of uint8/16/32), source (string)
    validation/source-000-shard-00000.arrow

Shards of conversations have a third column, `marks` (list of uint8, as long as `tokens`): the sum of 1 where a
token belongs to an answer, which alone is trained, and 2 where it begins a conversation.

Every shard belongs to one source, so that sources can be mixed by weight when they are read.

A shard is both of Arrow's IPC formats at once, because `pyarrow.ipc.open_file` reads only the one
and `datasets.Dataset.from_file` only the other: a whole stream, then the footer of a file. It lacks
the file format's leading magic, which `open_file` does not look at.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from trainer.durable import MANIFEST, read_manifest
from trainer.errors import DataError

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
ANSWER, BEGINNING = 1, 2
"""What the marks of a token in a conversation are made of."""
_TOGETHER = 8
"""Rows of one shard from which on copying them together takes less time than one by one."""


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest unsigned integer type that holds every id of a vocabulary."""
    for candidate in (np.uint8, np.uint16):
        if vocabulary_size <= np.iinfo(candidate).max + 1:
            return np.dtype(candidate)
    return np.dtype(np.uint32)


@dataclass
class ShardWriter:
    """Collects the documents of one source and split, and writes a shard whenever enough tokens are together.

    Memory is bounded by one shard plus one call's documents.
    """

    directory: Path
    split: str
    source: int
    vocabulary_size: int
    tokenizer: str
    """Fingerprint of the tokenizer, kept in each shard's schema metadata."""
    shard_tokens: int
    """Tokens after which a shard is written; the last document may exceed it."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """What was written: path, split, source, documents, tokens, text_bytes."""
    _tokens: list[np.ndarray] = field(default_factory=list)
    _lengths: list[np.ndarray] = field(default_factory=list)
    _marks: list[np.ndarray] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _count: int = 0
    _text_bytes: int = 0

    def add(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray,
        names: list[str],
        text_bytes: int,
        marks: np.ndarray | None = None,
    ) -> None:
        """Append documents.

        Args:
            tokens: ids of all the documents, one after the other; any integer type, shape [sum(lengths)].
            lengths: number of tokens of each document, shape [documents].
            names: where each document came from.
            text_bytes: length of their text in UTF-8 bytes; of the answers alone in conversations.
            marks: uint8, shape [sum(lengths)], for conversations; for all documents of a shard set or for none.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocabulary_size:
            raise DataError(
                f"{names[0]} or one shortly after it: ids {tokens.min()} to {tokens.max()} do not fit a vocabulary of "
                f"{self.vocabulary_size} entries."
            )
        self._tokens.append(tokens.astype(token_dtype(self.vocabulary_size)))
        self._lengths.append(lengths)
        self._marks += [] if marks is None else [marks]
        self._names.extend(names)
        self._count += len(tokens)
        self._text_bytes += text_bytes
        if self._count >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write the documents collected so far as one shard."""
        if not self._names:
            return
        values = np.concatenate(self._tokens)
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise DataError(
                f"{self._names[-1]}: a document of {self._lengths[-1].max():,} tokens; a shard holds "
                "2,147,483,647. Split it."
            )
        columns = {
            "tokens": pa.ListArray.from_arrays(offsets.astype(np.int32), values),
            "source": pa.array(self._names, pa.string()),
        }
        if self._marks:
            columns["marks"] = pa.ListArray.from_arrays(offsets.astype(np.int32), np.concatenate(self._marks))
        schema = pa.schema(
            [(name, column.type) for name, column in columns.items()],
            metadata={
                "forgeline.format_version": str(FORMAT_VERSION),
                "forgeline.tokenizer": self.tokenizer,
                "forgeline.vocabulary_size": str(self.vocabulary_size),
                "forgeline.tokens": str(len(values)),
                "forgeline.sha256": hashlib.sha256(values.data).hexdigest(),
            },
        )
        batch = pa.record_batch(list(columns.values()), schema=schema)
        path = Path(self.split) / f"source-{self.source:03d}-shard-{len(self.shards):05d}.arrow"
        (self.directory / path).parent.mkdir(exist_ok=True)
        _write_shard(self.directory / path, batch)
        self.shards.append(
            {
                "path": str(path),
                "split": self.split,
                "source": self.source,
                "documents": len(self._names),
                "tokens": len(values),
                "text_bytes": self._text_bytes,
                **({"answer_tokens": sum(int((m & ANSWER).sum()) for m in self._marks)} if self._marks else {}),
            }
        )
        self._marks = []
        self._tokens, self._lengths, self._names, self._count, self._text_bytes = [], [], [], 0, 0


def _write_shard(path: Path, batch: pa.RecordBatch) -> None:
    """Write a record batch so that readers of Arrow's file format and of its stream format both read it.

    The footer of a file counts offsets from its 8 leading bytes on. The stream's schema message is
    made 8 bytes longer instead, by a padded entry in its metadata, so that the offsets are the same.
    """
    padding = "forgeline.padding"
    short = batch.schema.with_metadata({**batch.schema.metadata, padding: ""})
    long = batch.schema.with_metadata({**batch.schema.metadata, padding: " " * 8})
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, short) as writer:
        writer.write_batch(batch.replace_schema_metadata(short.metadata))
    head = long.serialize()
    assert head.size == 8 + short.serialize().size
    with open(path, "r+b") as file:
        file.write(head)


class TokenStream:
    """The tokens of several shards as one sequence, mapped from disk and never copied as a whole.

    A shard is mapped when it is first read, so that opening costs the same at any size.
    """

    def __init__(self, shards: Iterable[tuple[Path, int]], column: str = "tokens") -> None:
        """Take each shard's path and number of tokens.

        Args:
            shards: in the order of the stream; the counts as the set's manifest has them.
            column: `tokens`, or `marks`, which has as many values.
        """
        self._column = column
        known = [(path, tokens) for path, tokens in shards if tokens]
        self._paths = [path for path, _ in known]
        self._starts = np.cumsum([0, *(tokens for _, tokens in known)], dtype=np.int64)
        self._mapped: dict[int, _MappedShard] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, out: np.ndarray) -> None:
        """Copy ``len(out)`` tokens, beginning at ``start``, into ``out`` (converted to its type).

        Raises:
            IndexError: the stream ends before.
            DataError: a shard cannot be read.
        """
        if start < 0 or start + len(out) > len(self):
            raise IndexError(f"tokens [{start}, {start + len(out)}) of a stream of {len(self)}")
        number = int(self._starts.searchsorted(start, side="right")) - 1
        filled = 0
        while filled < len(out):
            begin = start + filled - int(self._starts[number])
            filled += self._shard(number).read(begin, out[filled:])
            number += 1

    def gather(self, starts: np.ndarray, out: np.ndarray) -> None:
        """Copy a stretch of tokens into each row of ``out``, all of one length.

        Args:
            starts: int64, shape [rows].
            out: any integer type, shape [rows, length], C-contiguous.

        Raises:
            IndexError: a stretch lies outside the stream.
            DataError: a shard cannot be read.
        """
        if not len(starts):
            return
        length = out.shape[1]
        if starts.min() < 0 or starts.max() + length > len(self):
            raise IndexError(f"tokens [{starts.min()}, {starts.max() + length}) of a stream of {len(self)}")
        numbers = self._starts.searchsorted(starts, side="right") - 1
        begins = starts - self._starts[numbers]
        left = np.ones(len(out), bool)
        for number in np.flatnonzero(np.bincount(numbers) >= _TOGETHER).tolist():
            segment = self._shard(number).segments[0]
            inside = np.flatnonzero((numbers == number) & (begins + length <= len(segment)))
            if len(inside):
                # copied as they are and then widened, which is faster than both at once
                out[inside] = np.lib.stride_tricks.sliding_window_view(segment, length)[begins[inside]]
                left[inside] = False
        for row in np.flatnonzero(left).tolist():
            number, begin = int(numbers[row]), int(begins[row])
            piece = self._shard(number).segments[0][begin : begin + length]
            if len(piece) == length:
                out[row] = piece
            else:  # it goes on in another record batch or shard
                self.read(int(starts[row]), out[row])

    def document_lengths(self) -> np.ndarray:
        """Number of tokens of every document, in the stream's order: int64, shape [documents]."""
        parts = [_document_lengths(path) for path in self._paths]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _shard(self, number: int) -> "_MappedShard":
        shard = self._mapped.get(number)
        if shard is None:
            tokens = int(self._starts[number + 1] - self._starts[number])
            # two threads may both map it: the later one wins, and nothing is lost
            shard = self._mapped[number] = _MappedShard(self._paths[number], tokens, self._column)
        return shard


class _MappedShard:
    """The tokens of one shard: a view of the mapped file for each of its record batches."""

    def __init__(self, path: Path, tokens: int, column: str) -> None:
        self.segments = [segment for segment in _map_shard(path, column) if len(segment)]
        self._starts = np.cumsum([0, *map(len, self.segments)], dtype=np.int64)
        if self._starts[-1] != tokens:
            raise DataError(f"{path}: it has {self._starts[-1]} tokens and the set's manifest says {tokens}.")

    def read(self, begin: int, out: np.ndarray) -> int:
        """Copy what there is of ``out`` from ``begin`` on; returns the number of tokens copied."""
        number = int(self._starts.searchsorted(begin, side="right")) - 1
        filled = 0
        while filled < len(out) and number < len(self.segments):
            offset = begin + filled - int(self._starts[number])
            piece = self.segments[number][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return filled


def _document_lengths(path: Path) -> np.ndarray:
    with _readable(path) as reader:
        columns = [reader.get_batch(number).column("tokens") for number in range(reader.num_record_batches)]
        return np.concatenate([np.diff(as_numpy(column.offsets)).astype(np.int64) for column in columns])


def as_numpy(array: pa.Array) -> np.ndarray:
    """A view of an Arrow array of integers; pyarrow's own `to_numpy` would first import pandas, a third of a second.

    Raises:
        ValueError: it holds something else, nulls, or fewer values than it says.
    """
    if not pa.types.is_integer(array.type) or array.null_count:
        raise ValueError(f"{array.type} with {array.null_count} nulls instead of integers")
    buffer, width = array.buffers()[1], array.type.byte_width
    if buffer is None or buffer.size < (array.offset + len(array)) * width:
        raise ValueError(f"a buffer too small for {len(array)} values")
    if not len(array):  # where there is nothing, Arrow has no memory to look at
        return np.zeros(0, np.dtype(str(array.type)))
    return np.frombuffer(buffer, np.dtype(str(array.type)), len(array), array.offset * width)


def _map_shard(path: Path, column: str) -> list[np.ndarray]:
    """The flat buffer of a column in each record batch of a shard, as views of the mapped file."""
    with _readable(path) as reader:
        lists = [reader.get_batch(number).column(column) for number in range(reader.num_record_batches)]
        found = []
        for array in lists:
            offsets = as_numpy(array.offsets)
            found.append(as_numpy(array.values)[offsets[0] : offsets[-1]])
        tokens, expected = sum(len(values) for values in found), int(reader.schema.metadata[b"forgeline.tokens"])
        if tokens != expected:
            raise ValueError(f"{tokens} tokens, its metadata says {expected}")
        return found


@contextmanager
def _readable(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    """The mapped shard, open to be read; what is wrong with it is said with its name."""
    try:
        yield pa.ipc.open_file(pa.memory_map(str(path)))
    # a damaged length of -1 is a SystemError of pyarrow's
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, IndexError, SystemError) as error:
        raise DataError(
            f"{path}: not a readable shard ({error}). Run the pipeline again: it rebuilds the set."
        ) from error


@dataclass(frozen=True)
class ShardSet:
    """A complete shard set, opened by its directory."""

    directory: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "ShardSet":
        """Open the set in ``directory``.

        Raises:
            DataError: there is no shard set, or it is of another format version.
        """
        manifest = read_manifest(directory)
        if manifest is None or manifest.get("kind") != "shards":
            raise DataError(f"{directory}: not a shard set (no {MANIFEST} of one).")
        if manifest["format_version"] != FORMAT_VERSION:
            raise DataError(
                f"{directory}: shard format {manifest['format_version']}, this version reads {FORMAT_VERSION}. "
                "Run the pipeline again: it rebuilds the set."
            )
        return cls(directory, manifest)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids of the tokenizer that made the set."""
        return self.manifest["tokenizer"]["vocabulary_size"]

    def total(self, split: str, field: str) -> int:
        """Sum of ``documents``, ``tokens``, ``text_bytes`` or ``answer_tokens`` over the shards of a split."""
        return sum(shard[field] for shard in self.manifest["shards"] if shard["split"] == split)

    @property
    def conversations(self) -> bool:
        """Whether the documents are conversations, with marks."""
        return any("answer_tokens" in shard for shard in self.manifest["shards"])

    def stream(self, split: str, source: int | None = None, column: str = "tokens") -> TokenStream:
        """The tokens of a split, of every source or of one; or their marks, where the documents are conversations.

        Raises:
            DataError: a shard is missing or has another size than when it was written.
        """
        chosen = [
            shard for shard in self.manifest["shards"] if shard["split"] == split and source in (None, shard["source"])
        ]
        sizes = {entry["path"]: entry["size"] for entry in self.manifest["files"]}
        for shard in chosen:
            path = self.directory / shard["path"]
            try:
                size = path.stat().st_size
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}. Run the pipeline again: it rebuilds the set.") from None
            if size != sizes[shard["path"]]:
                raise DataError(
                    f"{path}: {size} bytes, the manifest says {sizes[shard['path']]}. "
                    "Run the pipeline again: it rebuilds the set."
                )
        return TokenStream(((self.directory / shard["path"], shard["tokens"]) for shard in chosen), column)

    def check_canary(self, encode: Any) -> None:
        """Refuse a tokenizer that is not the one that made the set.

        Args:
            encode: maps a text to its ids.

        Raises:
            DataError: the canary text is encoded otherwise.
        """
        canary = self.manifest["canary"]
        if list(encode(canary["text"])) != canary["ids"]:
            raise DataError(
                f"{self.directory}: these shards were made by another tokenizer, or by another version of its "
                "library: the canary text in the manifest now has other ids. Remove the directory to rebuild it."
            )

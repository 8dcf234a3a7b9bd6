"""Sources: from what the configuration names to files with content hashes, and to documents.

A document is a name and a text. What cannot be read as one becomes a `BadRecord`, never data.
"""

import codecs
import csv
import fnmatch
import glob
import hashlib
import io
import json
import logging
import lzma
import os
import string
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import pyarrow
from annotated_types import Gt
from pydantic import Field, model_validator

from tasks.home import FileHashes, Home
from trainer.durable import exclusive, explained, write_json
from trainer.errors import DataError, ForgelineError
from trainer.settings import ShortSettings

logger = logging.getLogger("forgeline")

_RECORD_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
_ZSTANDARD = (".zst", ".zstd")
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", *_ZSTANDARD)
_PIECE_CHARACTERS = 2**23
"""Longest text file that is held in memory as a whole, and longest piece of a text."""
_RECORD_BYTES = 256 * 2**20
_TOO_LONG = "longer than 256 MB, which is the most a record of a file of records may be"
_BLOCK_BYTES = 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (
    OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    pyarrow.ArrowException,
)  # fmt: skip
"""What reading a damaged file raises."""
_VERSION_KEYS = ("size", "ETag", "etag", "LastModified", "Last-Modified", "mtime", "Content-MD5", "Digest")
"""What fsspec's file systems say about the version of a file."""


class SourceConfig(ShortSettings):
    """One source of text. Set `path` or `dataset`; a plain string is short for `path`."""

    path: str | None = None
    """File, directory, glob or URL. `$NAME` is replaced from the environment; `$PYTHON_STDLIB` is Python's library."""
    dataset: str | None = None
    """Hugging Face data set, by hub name; streamed."""
    subset: str | None = None
    """The data set's configuration."""
    split: str = "train"
    """The data set's split."""
    revision: str | None = None
    """The data set's branch, tag or commit. Unset: the newest commit at planning."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of paths to leave out, matched against the whole path (`*` also matches `/`)."""
    text_field: str | None = None
    """Field that holds the text, for this source; unset, `data.text_field`."""
    weight: Annotated[float | None, Gt(0)] = None
    """Share of this source in training, relative to the others. Set for all sources or for none."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_origin(self) -> "SourceConfig":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("path: set either path or dataset")
        return self


@dataclass(frozen=True)
class SourceFile:
    """One input of a source: a local file, or a whole hub data set."""

    source: int
    """Position of its source in `data.sources`."""
    name: str
    """Its name in shards and manifests: the path below the source's fixed part, or the data set's name."""
    path: Path | None
    """Where the file is; None for a hub data set."""
    sha256: str
    """Content hash, or the data set's commit."""
    size: int
    """Bytes on disk; 0 where unknown."""
    config: SourceConfig

    def identity(self) -> list[Any]:
        """What of it changes the documents that come out."""
        return [self.source, self.name, self.sha256, self.config.text_field, self.config.subset, self.config.split]


@dataclass(frozen=True)
class Reading:
    """How records become texts."""

    text_field: str = "text"
    """Field that holds the text, in files of records."""
    template: str | None = None
    """Text made of several fields, `{name}` each; it takes the place of the one field."""
    separator: str | None = None
    """What is between the documents of a text file; None where a file is one document."""

    def identity(self) -> list[Any]:
        """What of it changes the documents that come out."""
        return [self.text_field, self.template, self.separator]

    def fields(self, source: SourceConfig) -> list[str]:
        """The fields that a source's texts are made of."""
        if source.text_field or self.template is None:
            return [source.text_field or self.text_field]
        return template_fields(self.template)

    def text(self, source: SourceConfig, record: dict[str, Any]) -> str:
        """The text of a record that has all the fields."""
        if source.text_field or self.template is None:
            return record[source.text_field or self.text_field]
        return "".join(
            literal + (record[name] if name is not None else "")
            for literal, name, _, _ in string.Formatter().parse(self.template)
        )


def template_fields(template: str) -> list[str]:
    """The fields that a template names, each once.

    Raises:
        ValueError: it is no template of plain field names.
    """
    names = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name or form or conversion:
            raise ValueError("text_template: write fields as {name}, and braces as {{ and }}")
        names.append(name)
    if not names:
        raise ValueError("text_template: it names no field; write fields as {name}")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Part:
    """A part of a big file: bytes [start, stop) between two records, or parquet's row groups [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True)
class BadRecord:
    """Something that should have been a document and could not be read as one."""

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.reason}"


@dataclass(frozen=True)
class Document:
    """One text and where it came from."""

    name: str
    text: str

    @property
    def characters(self) -> int:
        """Length of the text."""
        return len(self.text)

    def digest(self) -> bytes:
        """Hash of the text, the same wherever it came from."""
        return text_digest(self.text)

    def pieces(self) -> Iterator[str]:
        """The text, in pieces that follow one another."""
        for start in range(0, len(self.text), _PIECE_CHARACTERS):
            yield self.text[start : start + _PIECE_CHARACTERS]


@dataclass(frozen=True)
class LargeDocument:
    """One text that is too large to be in memory as a whole; it is read again from its file, piece by piece."""

    name: str
    path: Path
    characters: int
    sum: bytes

    def digest(self) -> bytes:
        """Hash of the text, the same wherever it came from."""
        return self.sum

    def pieces(self) -> Iterator[str]:
        """The text, in pieces that follow one another."""
        with _open(self.path) as stream:
            yield from _decoded(stream)


def text_digest(text: str) -> bytes:
    """128 bits of BLAKE2b over a text's UTF-8 bytes."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def text_share(digest: bytes, purpose: Literal["validation", "tokenizer"]) -> float:
    """A number in [0, 1) that is always the same for the same text; those for different purposes are independent."""
    bits = digest[:8] if purpose == "validation" else digest[8:]
    return int.from_bytes(bits, "big") / 2**64


def resolve(home: Home, sources: Iterable[SourceConfig], key: str) -> list[SourceFile]:
    """The files behind the sources, sorted within each, with their content hashes.

    Args:
        key: the configuration key, for messages.

    Raises:
        DataError: a source is missing or empty.
    """
    hashes = home.hashes()
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        found = [_hub_data_set(number, source)] if source.dataset else _files(home, hashes, number, source, key)
        files.extend(found)
    return files


def _files(home: Home, hashes: FileHashes, number: int, source: SourceConfig, key: str) -> list[SourceFile]:
    assert source.path is not None
    where = f"{key}[{number}]"
    pattern = string.Template(source.path).safe_substitute(
        {"PYTHON_STDLIB": sysconfig.get_path("stdlib"), **os.environ}
    )
    if "://" in pattern:
        paths, root = [_downloaded(home, pattern, where)], None
    else:
        pattern = os.path.abspath(os.path.expanduser(pattern))
        if os.path.isdir(pattern):
            paths, root = [Path(path) for path in glob.glob(f"{glob.escape(pattern)}/**", recursive=True)], pattern
        elif os.path.exists(pattern):
            paths, root = [Path(pattern)], os.path.dirname(pattern)
        else:
            paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
            root = os.path.dirname(pattern[: min((pattern.find(c) for c in "*?[" if c in pattern), default=0)])
            if not paths:
                raise DataError(f"{where}: nothing is at {source.path!r} (looked at {pattern}). Check the path.")
    kept = sorted(
        {path for path in paths if path.is_file() and not any(fnmatch.fnmatch(str(path), p) for p in source.exclude)}
    )
    if not kept:
        raise DataError(f"{where}: {source.path!r} holds no file{' that is not excluded' if source.exclude else ''}.")
    result = []
    for path in kept:
        name = str(path.relative_to(root)) if root else _basename(pattern)
        try:
            name.encode()
            result.append(SourceFile(number, name, path, hashes(path), path.stat().st_size, source))
        except OSError as error:
            raise DataError(f"{where}: {path} cannot be read ({error.strerror}).") from None
        except UnicodeEncodeError:
            raise DataError(f"{where}: the name of {os.fsencode(path)!r} is not UTF-8. Rename or exclude it.") from None
    return result


def _basename(url: str) -> str:
    """The file name in a URL, without a query, so that its suffix says what it is."""
    return url.partition("?")[0].partition("#")[0].rstrip("/").rsplit("/", 1)[-1]


def _downloaded(home: Home, url: str, where: str) -> Path:
    """A local copy of a remote file, fetched again when the remote one has changed."""
    place = home.directory("downloads", f"{zlib.crc32(url.encode()):08x}-{_basename(url)}")
    with exclusive(home.lock("downloads", place.name)):
        return _fetched(url, place, where)


def _fetched(url: str, place: Path, where: str) -> Path:
    import fsspec

    note = place.with_name(place.name + ".origin.json")
    try:
        filesystem, remote = fsspec.core.url_to_fs(url)
        info = filesystem.info(remote)
        state = {key: str(info[key]) for key in _VERSION_KEYS if key in info}
        if place.exists() and note.exists() and json.loads(note.read_text()) == {"url": url, **state}:
            return place
        aside = place.with_name(f".{place.name}.partial")
        with explained(place):
            filesystem.get_file(remote, str(aside))
            os.replace(aside, place)
        write_json(note, {"url": url, **state})
    except ForgelineError:
        raise
    except ImportError as error:
        raise DataError(f"{where}: {url}: {error}") from None
    except Exception as error:  # every file system has its own errors
        if place.exists():
            logger.warning("%s cannot be reached; using the copy from before", url)
            return place
        raise DataError(
            f"{where}: {url} cannot be fetched ({type(error).__name__}: {str(error) or 'no answer'}). "
            "Check the address and the network, or name a local copy: --set 'data.sources=[\"PATH\"]'."
        ) from None
    return place


def _hub_data_set(number: int, source: SourceConfig) -> SourceFile:
    from huggingface_hub import HfApi

    assert source.dataset is not None
    try:
        info = HfApi().dataset_info(source.dataset, revision=source.revision, timeout=30)
    except Exception as error:  # hub errors, connection errors and time-outs alike
        raise DataError(
            f"data.sources[{number}]: hub data set {source.dataset!r} cannot be reached ({type(error).__name__}). "
            "Check its name and the network, or name local files."
        ) from None
    return SourceFile(number, source.dataset, None, info.sha or "", 0, source)


def read_documents(
    file: SourceFile, reading: Reading, part: Part | None = None
) -> Iterator[Document | LargeDocument | BadRecord]:
    """Every document of one input, in order; memory holds one record of at most 256 MB, or a piece of a larger text.

    Args:
        part: only this part of the file; see :func:`parts`.

    Raises:
        DataError: no record has the fields of the text.
    """
    if file.path is None:
        yield from _texts(_hub_records(file), reading, file.config, file.name)
        return
    kind = _suffix(file.path)
    where = f"{file.path}@{part.start}" if part and part.start and kind != ".parquet" else str(file.path)
    if kind in _RECORD_FORMATS:
        fields = reading.fields(file.config)
        yield from _texts(_records(file.path, kind, where, fields, part), reading, file.config, where)
    elif reading.separator:
        yield from _separated(file, reading.separator.encode(), where, part)
    else:
        yield _whole_file(file)


def parts(file: SourceFile, reading: Reading, size: int) -> list[Part | None]:
    """The parts of about ``size`` bytes that a big file can be read in, or [None] where it is read as a whole.

    Files of lines, uncompressed text files with a separator, and parquet files have parts.
    """
    if file.path is None or file.size <= size:
        return [None]
    kind = _suffix(file.path)
    if file.path.suffix.lower() in _COMPRESSIONS:
        return [None]
    try:
        if kind == ".parquet":
            return list(_row_group_parts(file.path, size))
        if kind in (".jsonl", ".ndjson", ".json"):
            with open(file.path, "rb") as stream:
                if stream.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[":
                    return [None]
            return list(_byte_parts(file, b"\n", size))
        separator = (reading.separator or "").encode()
        if kind not in _RECORD_FORMATS and separator and not _overlaps_itself(separator):
            return list(_byte_parts(file, separator, size))
    except _UNREADABLE:  # said when its documents are read
        pass
    return [None]


def _overlaps_itself(separator: bytes) -> bool:
    """Whether two occurrences can overlap, so that where one begins depends on all the text before."""
    return any(separator.startswith(separator[n:]) for n in range(1, len(separator)))


def _row_group_parts(path: Path, size: int) -> Iterator[Part]:
    import pyarrow.parquet

    metadata = pyarrow.parquet.ParquetFile(path).metadata
    start, held = 0, 0
    for number in range(metadata.num_row_groups):
        held += metadata.row_group(number).total_byte_size
        if held >= size or number == metadata.num_row_groups - 1:
            yield Part(start, number + 1)
            start, held = number + 1, 0


def _byte_parts(file: SourceFile, delimiter: bytes, size: int) -> Iterator[Part]:
    assert file.path is not None
    with open(file.path, "rb") as stream:
        start = 0
        while start < file.size:
            stop = _after_next(stream, delimiter, start + size, file.size)
            yield Part(start, stop)
            start = stop


def _after_next(stream: Any, delimiter: bytes, place: int, end: int) -> int:
    """Where the first delimiter that begins at ``place`` or later ends; ``end`` where there is none."""
    while place < end:
        stream.seek(place)
        block = stream.read(2**20)
        found = block.find(delimiter)
        if found >= 0:
            return place + found + len(delimiter)
        place += max(1, len(block) - len(delimiter) + 1)
    return end


def _suffix(path: Path) -> str:
    """The suffix that says what is in a file, in lower case: that before a compression's."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _whole_file(file: SourceFile) -> Document | LargeDocument | BadRecord:
    assert file.path is not None
    held: list[str] = []
    digest = hashlib.blake2b(digest_size=16)
    characters = 0
    try:
        with _open(file.path) as stream:
            for piece in _decoded(stream):
                characters += len(piece)
                digest.update(piece.encode())
                if characters <= _PIECE_CHARACTERS:
                    held.append(piece)
                else:
                    held.clear()
    except UnicodeDecodeError as error:
        return BadRecord(str(file.path), None, f"not UTF-8 at byte {error.start}")
    except _UNREADABLE as error:
        return BadRecord(str(file.path), None, f"cannot be read: {error}")
    if characters > _PIECE_CHARACTERS:
        return LargeDocument(file.name, file.path, characters, digest.digest())
    return Document(file.name, "".join(held)) if characters else BadRecord(str(file.path), None, "empty")


def _decoded(stream: Any) -> Iterator[str]:
    """The text of a stream of UTF-8, without a byte order mark, in pieces of some megabytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    place = 0
    while True:
        block = stream.read(_BLOCK_BYTES)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise UnicodeDecodeError(
                "utf-8", error.object, place - pending + error.start, place - pending + error.end, error.reason
            ) from None
        place += len(block)
        if text:
            yield text
        if not block:
            return


def _separated(file: SourceFile, separator: bytes, where: str, part: Part | None) -> Iterator[Document | BadRecord]:
    """The documents between a text file's separators; what is empty between two of them is no document."""
    assert file.path is not None
    name = f"{file.name}@{part.start}" if part and part.start else file.name
    number = 0
    try:
        with _open(file.path, part) as stream:
            for number, record in enumerate(_split(stream, separator), 1):
                if record is None:
                    yield BadRecord(where, number, _TOO_LONG)
                    continue
                try:
                    text = (record.removeprefix(_BYTE_ORDER_MARK) if number == 1 else record).decode()
                except UnicodeDecodeError as error:
                    yield BadRecord(where, number, f"not UTF-8 at byte {error.start} of this document")
                    continue
                if text:
                    yield Document(f"{name}:{number}", text)
    except _UNREADABLE as error:
        yield BadRecord(where, None, f"cannot be read further: {error}")
    if not number:
        yield BadRecord(where, None, "empty")


class _Bytes(io.RawIOBase):
    """Bytes [start, stop) of a file, as a stream."""

    def __init__(self, path: Path, part: Part) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._file.seek(part.start)
        self._left = part.stop - part.start

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(memoryview(buffer)[: self._left]) or 0
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path, part: Part | None = None) -> Any:
    """A file's bytes, decompressed."""
    if part:
        return io.BufferedReader(_Bytes(path, part), _BLOCK_BYTES)
    suffix = path.suffix.lower()
    if suffix in _ZSTANDARD:
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    if suffix not in _COMPRESSIONS:
        return open(path, "rb")
    import fsspec

    return fsspec.open(str(path), "rb", compression="infer").open()


def _split(stream: Any, delimiter: bytes) -> Iterator[bytes | None]:
    """What is between the delimiters of a stream, one after the other; None for what is longer than a record may be."""
    rest = bytearray()
    too_long = False
    # one read of what is underneath at a time: what came before damage is not lost with it
    read = getattr(stream, "read1", stream.read)
    while block := read(_BLOCK_BYTES):
        searched = max(0, len(rest) - len(delimiter) + 1)
        rest += block
        if rest.find(delimiter, searched) >= 0:
            *records, last = bytes(rest).split(delimiter)
            for record in records:
                yield None if too_long else record
                too_long = False
            rest = bytearray(last)
        if len(rest) > _RECORD_BYTES:
            too_long = True
            del rest[: len(rest) - len(delimiter) + 1]
    if rest or too_long:
        yield None if too_long else bytes(rest)


def _texts(
    records: Iterator[tuple[int, Any]], reading: Reading, source: SourceConfig, where: str
) -> Iterator[Document | BadRecord]:
    """Take the text out of numbered records; a record may be a BadRecord already."""
    seen: set[str] = set()
    found = False
    fields = reading.fields(source)
    base = os.path.basename(where)
    for line, record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        if not isinstance(record, dict):
            yield BadRecord(where, line, "not an object with fields")
            continue
        missing = [field for field in fields if field not in record]
        if missing:
            seen.update(str(key) for key in record)
            yield BadRecord(where, line, f"no field {missing[0]!r}")
            continue
        found = True
        faults = [(field, fault) for field in fields if (fault := _fault_of(record[field], len(fields) > 1))]
        if faults:
            yield BadRecord(where, line, f"field {faults[0][0]!r} {faults[0][1]}")
        elif text := reading.text(source, record):
            yield Document(f"{base}:{line}", text)
        else:
            yield BadRecord(where, line, "all its fields are empty")
    if not found and seen:
        key = "data.text_field to the one that holds" if len(fields) == 1 else "data.text_template to those that make"
        raise DataError(
            f"{where}: no record has the field {', '.join(map(repr, fields))} "
            f"(they have: {', '.join(sorted(seen)[:20])}). Set {key} the text."
        )


def _fault_of(text: Any, may_be_empty: bool) -> str | None:
    """Why a field's value is not the text of a document, or a part of it."""
    if not isinstance(text, str):
        return "is not a text"
    if not text:
        return None if may_be_empty else "is empty"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not valid Unicode at character {error.start}"
    return None


def _records(path: Path, kind: str, where: str, fields: list[str], part: Part | None) -> Iterator[tuple[int, Any]]:
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path, fields, part)
        elif kind == ".arrow":
            yield from enumerate((row for batch in _arrow_batches(where) for row in batch.to_pylist()), 1)
        elif kind == ".csv":
            with _open(path) as stream:
                yield from enumerate(_csv_rows(stream), 2)
        else:
            with _open(path, part) as stream:
                yield from _json_records(stream, where)
    except _UNREADABLE as error:
        yield 0, BadRecord(where, None, f"cannot be read further: {error}")


def _parquet_rows(path: Path, fields: list[str], part: Part | None) -> Iterator[tuple[int, Any]]:
    """Numbered rows; of the fields of the text alone, where the file has them."""
    import pyarrow.parquet

    reader = pyarrow.parquet.ParquetFile(path)
    groups = range(part.start, part.stop) if part else range(reader.metadata.num_row_groups)
    first = 1 + sum(reader.metadata.row_group(number).num_rows for number in range(groups.start))
    columns = fields if set(fields) <= set(reader.schema_arrow.names) else None
    batches = reader.iter_batches(1024, row_groups=list(groups), columns=columns)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)


def _arrow_batches(where: str) -> Iterator[Any]:
    """The record batches of an Arrow file, or of an Arrow stream, which `datasets` saves under the same suffix."""
    mapped = pyarrow.memory_map(where)
    try:
        table = pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        yield from pyarrow.ipc.open_stream(mapped)
        return
    yield from (table.get_batch(number) for number in range(table.num_record_batches))


def _csv_rows(stream: Any) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # Python's limit of 128 KiB is shorter than many documents
    without_mark = (line.removeprefix(_BYTE_ORDER_MARK) if not n else line for n, line in enumerate(stream))
    # bytes that are not UTF-8 become lone surrogates, so that only their own record is refused
    yield from csv.DictReader(line.decode("utf-8", "surrogateescape") for line in without_mark)


def _json_records(stream: Any, where: str) -> Iterator[tuple[int, Any]]:
    """JSON lines; or, where the text begins with a bracket, one JSON list of objects."""
    begun = False
    lines = _split(stream, b"\n")
    for number, line in enumerate(lines, 1):
        if line is None:
            yield number, BadRecord(where, number, _TOO_LONG)
            continue
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if not line or line.isspace():
            continue
        if not begun and line.lstrip().startswith(b"["):
            yield from enumerate(json.loads(_joined(line, lines)), 1)
            return
        begun = True
        try:
            yield number, _json(line)
        except (ValueError, RecursionError) as error:
            yield number, BadRecord(where, number, f"not JSON: {error}")


def _joined(line: bytes, lines: Iterator[bytes | None]) -> bytes:
    """The rest of a file that has to be in memory as a whole."""
    kept, size = [line], len(line)
    for line_after in lines:
        size += _RECORD_BYTES + 1 if line_after is None else len(line_after)
        if size > _RECORD_BYTES:
            raise ValueError("a JSON list of more than 256 MB; write one object a line instead")
        assert line_after is not None
        kept.append(line_after)
    return b"\n".join(kept)


def _json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # or what only Python's own parser takes: NaN, lone surrogates
        return json.loads(line)


def _hub_records(file: SourceFile) -> Iterator[tuple[int, Any]]:
    import datasets

    source = file.config
    rows = datasets.load_dataset(
        source.dataset, source.subset, split=source.split, revision=file.sha256, streaming=True
    )
    yield from enumerate(rows, 1)

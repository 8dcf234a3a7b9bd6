"""Sources: from what the configuration names to files with content hashes, and to documents.

A document is a name and a text. What cannot be read as one becomes a `BadRecord`, never data.
"""

import csv
import fnmatch
import glob
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
from typing import Annotated, Any

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


def read_documents(file: SourceFile, default_field: str) -> Iterator[Document | BadRecord]:
    """Every document of one input, in order; memory holds one record (one file, where a file is one document).

    Args:
        default_field: the field that holds the text, where the source names none.

    Raises:
        DataError: no record has the text field.
    """
    field = file.config.text_field or default_field
    if file.path is None:
        yield from _texts(_hub_records(file), field, file.name)
        return
    kind = _suffix(file.path)
    if kind not in _RECORD_FORMATS:
        yield _whole_file(file)
    else:
        yield from _texts(_records(file, kind), field, str(file.path))


def _suffix(path: Path) -> str:
    """The suffix that says what is in a file, in lower case: that before a compression's."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _whole_file(file: SourceFile) -> Document | BadRecord:
    assert file.path is not None
    try:
        with _open(file.path) as stream:
            text = stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRecord(str(file.path), None, f"not UTF-8 at byte {error.start}")
    except _UNREADABLE as error:
        return BadRecord(str(file.path), None, f"cannot be read: {error}")
    return Document(file.name, text) if text else BadRecord(str(file.path), None, "empty")


def _open(path: Path) -> Any:
    if path.suffix.lower() in _ZSTANDARD:
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    import fsspec

    return fsspec.open(str(path), "rb", compression="infer").open()


def _texts(records: Iterator[tuple[int, Any]], field: str, where: str) -> Iterator[Document | BadRecord]:
    """Take the text out of numbered records; a record may be a BadRecord already."""
    seen: set[str] = set()
    found = False
    for line, record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        if not isinstance(record, dict):
            yield BadRecord(where, line, "not an object with fields")
            continue
        if field not in record:
            seen.update(str(key) for key in record)
            yield BadRecord(where, line, f"no field {field!r}")
            continue
        found = True
        fault = _fault_of(record[field])
        if fault:
            yield BadRecord(where, line, f"field {field!r} {fault}")
        else:
            yield Document(f"{os.path.basename(where)}:{line}", record[field])
    if not found and seen:
        raise DataError(
            f"{where}: no record has the field {field!r} (they have: {', '.join(sorted(seen)[:20])}). "
            "Set data.text_field to the one that holds the text."
        )


def _fault_of(text: Any) -> str | None:
    """Why a field's value is not the text of a document."""
    if not isinstance(text, str):
        return "is not a text"
    if not text:
        return "is empty"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not valid Unicode at character {error.start}"
    return None


def _records(file: SourceFile, kind: str) -> Iterator[tuple[int, Any]]:
    assert file.path is not None
    where = str(file.path)
    try:
        if kind == ".parquet":
            import pyarrow.parquet

            reader = pyarrow.parquet.ParquetFile(where)
            rows = (row for batch in reader.iter_batches(1024) for row in batch.to_pylist())
            yield from enumerate(rows, 1)
        elif kind == ".arrow":
            yield from enumerate((row for batch in _arrow_batches(where) for row in batch.to_pylist()), 1)
        elif kind == ".csv":
            with _open(file.path) as stream:
                yield from enumerate(_csv_rows(stream), 2)
        else:
            with _open(file.path) as stream:
                yield from _json_records(stream, where)
    except _UNREADABLE as error:
        yield 0, BadRecord(where, None, f"cannot be read further: {error}")


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
    for number, line in enumerate(stream, 1):
        line = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        if not line.strip():
            continue
        if not begun and line.lstrip().startswith(b"["):
            yield from enumerate(json.loads(line + stream.read()), 1)
            return
        begun = True
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, BadRecord(where, number, f"not JSON: {error}")


def _hub_records(file: SourceFile) -> Iterator[tuple[int, Any]]:
    import datasets

    source = file.config
    rows = datasets.load_dataset(
        source.dataset, source.subset, split=source.split, revision=file.sha256, streaming=True
    )
    yield from enumerate(rows, 1)

"""Files of records and hub data sets: numbered records, one after the other.

A record is whatever stands in one place of the file; what cannot be read as one is a `BadRecord`.
"""

import csv
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow

from tasks.sources import SourceFile
from tasks.streams import (
    BLOCK_BYTES,
    BYTE_ORDER_MARK,
    RECORD_BYTES,
    TOO_LONG,
    UNREADABLE,
    Part,
    decoded,
    open_bytes,
    split,
)

RECORD_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")
_ROWS = 256
"""Rows of a table that become Python objects together."""
_BLANKS = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class BadRecord:
    """Something that should have been a document and could not be read as one."""

    file: str
    line: int | None
    reason: str
    cuts_off: bool = False
    """Whether what follows it in the file could not be read either."""

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.reason}"


def read_records(path: Path, kind: str, where: str, fields: list[str], part: Part | None) -> Iterator[tuple[int, Any]]:
    """The numbered records of a file, or of a part of it; a record may be a BadRecord already.

    Args:
        kind: one of RECORD_FORMATS.
        where: what messages call it.
        fields: those that are wanted, so that others need not be read.
    """
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path, fields, part)
        elif kind == ".arrow":
            yield from _arrow_rows(path, fields, part)
        elif kind == ".csv":
            with open_bytes(path) as stream:
                yield from enumerate(_csv_rows(stream, where), 2)
        elif not (part and part.start) and holds_list(path):
            with open_bytes(path) as stream:
                yield from enumerate(_json_list(stream), 1)
        else:
            with open_bytes(path, part) as stream:
                yield from _json_lines(stream, where)
    except UNREADABLE as error:
        yield 0, BadRecord(where, None, f"cannot be read further: {error}", cuts_off=True)


def row_parts(path: Path, kind: str, size: int) -> Iterator[Part]:
    """Ranges of parquet's row groups, or of Arrow's record batches, that take about ``size`` bytes each."""
    if kind == ".parquet":
        metadata = _parquet(path).metadata
        sizes = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    else:
        sizes = [batch.nbytes for batch in _arrow_batches(path)]
    on_disk = path.stat().st_size / max(1, sum(sizes))
    start, held = 0, 0
    for number, unpacked in enumerate(sizes, 1):
        held += int(unpacked * on_disk)
        if held >= size or number == len(sizes):
            yield Part(start, number, held)
            start, held = number, 0


def _parquet(path: Path) -> Any:
    import pyarrow.parquet

    # read through small buffers: a row group may be larger than the memory
    return pyarrow.parquet.ParquetFile(path, buffer_size=BLOCK_BYTES, pre_buffer=False)


def _parquet_rows(path: Path, fields: list[str], part: Part | None) -> Iterator[tuple[int, Any]]:
    """Numbered rows; of the fields of the text alone, where the file has them."""
    reader = _parquet(path)
    groups = range(part.start, part.stop) if part else range(reader.metadata.num_row_groups)
    first = 1 + sum(reader.metadata.row_group(number).num_rows for number in range(groups.start))
    columns = fields if set(fields) <= set(reader.schema_arrow.names) else None
    batches = reader.iter_batches(_ROWS, row_groups=list(groups), columns=columns)
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), first)


def _arrow_rows(path: Path, fields: list[str], part: Part | None) -> Iterator[tuple[int, Any]]:
    """Numbered rows; of the fields of the text alone, where the file has them."""
    first = 1
    for number, batch in enumerate(_arrow_batches(path)):
        if part and number >= part.stop:
            return
        if not part or number >= part.start:
            wanted = batch.select(fields) if set(fields) <= set(batch.schema.names) else batch
            wanted.validate(full=True)  # lengths that lead out of the file would end the process
            pieces = (wanted.slice(start, _ROWS) for start in range(0, batch.num_rows, _ROWS))
            yield from enumerate((row for piece in pieces for row in piece.to_pylist()), first)
        first += batch.num_rows


def _arrow_batches(path: Path) -> Iterator[Any]:
    """The record batches of an Arrow file, or of an Arrow stream, which `datasets` saves under the same suffix.

    They are mapped: one that is not looked into costs no memory.
    """
    mapped = pyarrow.memory_map(str(path))
    try:
        table = pyarrow.ipc.open_file(mapped)
    except pyarrow.ArrowInvalid:
        mapped.seek(0)
        yield from pyarrow.ipc.open_stream(mapped)
        return
    yield from (table.get_batch(number) for number in range(table.num_record_batches))


def _csv_rows(stream: Any, where: str) -> Iterator[dict[str, Any] | BadRecord]:
    # Python's limit of 128 KiB is shorter than many documents; without one, a quote that never ends takes all memory
    csv.field_size_limit(RECORD_BYTES)
    # bytes that are not UTF-8 become lone surrogates, so that only their own record is refused
    lines = (line.decode("utf-8", "surrogateescape") for line in _csv_lines(stream))
    rows = csv.DictReader(lines, strict=True)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error) or "limit" in str(error):  # a quote that never ends took what follows
                raise
            yield BadRecord(where, rows.line_num, f"not CSV: {error}")


def _csv_lines(stream: Any) -> Iterator[bytes]:
    for number, line in enumerate(split(stream, b"\n")):
        if line is None:
            raise ValueError(TOO_LONG)
        yield (line if number else line.removeprefix(BYTE_ORDER_MARK)) + b"\n"


def holds_list(path: Path) -> bool:
    """Whether a file of JSON is one list, not lines."""
    with open_bytes(path) as stream:
        return stream.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _json_list(stream: Any) -> Iterator[Any]:
    """The values of one JSON list, one after the other; memory holds one of them."""
    decode = json.JSONDecoder().raw_decode
    text, place, wanted, count, ended = "", 0, 0, 0, False
    for piece in itertools.chain(decoded(stream), [""]):  # the empty one says that there is no more
        text, place = text[place:] + piece, 0
        if piece and len(text) < wanted:
            continue
        while not ended:
            # before a value stands a bracket or a comma; after it too, or it may go on in the next piece
            start = _after_blanks(text, place)
            first = _after_blanks(text, start + 1)
            close = start if count else first
            if text[close : close + 1] == "]":
                ended, place = True, close + 1
                break
            if count and text[start : start + 1] != ",":
                break
            try:
                value, end = decode(text, first)
            except ValueError:
                break
            after = _after_blanks(text, end)
            if piece and text[after : after + 1] not in (",", "]"):
                break
            yield value
            count, place = count + 1, end
        if ended and text[place:].strip():
            raise ValueError("there is more after the list")
        # a value that is not complete is tried again when there is twice as much of it
        wanted = 2 * (len(text) - place)
        if len(text) - place > RECORD_BYTES:
            break
    if not ended:
        raise ValueError(f"value {count + 1} of the list is not JSON, or longer than 256 MB")


def _after_blanks(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    return found.end() if found else len(text)


def _json_lines(stream: Any, where: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(split(stream, b"\n"), 1):
        if line is None:
            yield number, BadRecord(where, number, TOO_LONG)
            continue
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if not line or line.isspace():
            continue
        try:
            yield number, _json(line)
        except (ValueError, RecursionError) as error:
            yield number, BadRecord(where, number, f"not JSON: {error}")


def _json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # or what only Python's own parser takes: NaN, lone surrogates
        return json.loads(line)


def hub_records(file: SourceFile) -> Iterator[tuple[int, Any]]:
    """The numbered rows of a hub data set, streamed."""
    import datasets

    source = file.config
    rows = datasets.load_dataset(
        source.dataset, source.subset, split=source.split, revision=file.sha256, streaming=True
    )
    yield from enumerate(rows, 1)

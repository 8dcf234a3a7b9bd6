"""Files of records and hub data sets: numbered records, one after the other.

A record is whatever stands in one place of the file; what cannot be read as one is a `BadRecord`.
"""

import csv
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow

from tasks.sources import SourceFile
from tasks.streams import BYTE_ORDER_MARK, RECORD_BYTES, TOO_LONG, UNREADABLE, Part, open_bytes, split

RECORD_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".arrow")


@dataclass(frozen=True)
class BadRecord:
    """Something that should have been a document and could not be read as one."""

    file: str
    line: int | None
    reason: str

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
            yield from enumerate((row for batch in _arrow_batches(where) for row in batch.to_pylist()), 1)
        elif kind == ".csv":
            with open_bytes(path) as stream:
                yield from enumerate(_csv_rows(stream), 2)
        else:
            with open_bytes(path, part) as stream:
                yield from _json_records(stream, where)
    except UNREADABLE as error:
        yield 0, BadRecord(where, None, f"cannot be read further: {error}")


def row_group_parts(path: Path, size: int) -> Iterator[Part]:
    """Parquet's row groups, in ranges of about ``size`` bytes."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.ParquetFile(path).metadata
    start, held = 0, 0
    for number in range(metadata.num_row_groups):
        held += metadata.row_group(number).total_byte_size
        if held >= size or number == metadata.num_row_groups - 1:
            yield Part(start, number + 1)
            start, held = number + 1, 0


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
    without_mark = (line.removeprefix(BYTE_ORDER_MARK) if not n else line for n, line in enumerate(stream))
    # bytes that are not UTF-8 become lone surrogates, so that only their own record is refused
    yield from csv.DictReader(line.decode("utf-8", "surrogateescape") for line in without_mark)


def _json_records(stream: Any, where: str) -> Iterator[tuple[int, Any]]:
    """JSON lines; or, where the text begins with a bracket, one JSON list of objects."""
    begun = False
    lines = split(stream, b"\n")
    for number, line in enumerate(lines, 1):
        if line is None:
            yield number, BadRecord(where, number, TOO_LONG)
            continue
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
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
        size += RECORD_BYTES + 1 if line_after is None else len(line_after)
        if size > RECORD_BYTES:
            raise ValueError("a JSON list of more than 256 MB; write one object a line instead")
        assert line_after is not None
        kept.append(line_after)
    return b"\n".join(kept)


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

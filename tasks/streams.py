"""Streams of bytes: a file or a part of it, decompressed, and what is between its delimiters.

Owns the limits that keep memory bounded. Knows nothing of texts and records.
"""

import codecs
import csv
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow

_ZSTANDARD = (".zst", ".zstd")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", *_ZSTANDARD)
RECORD_BYTES = 256 * 2**20
TOO_LONG = "longer than 256 MB, which is the most a record of a file of records may be"
BLOCK_BYTES = 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (
    OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    pyarrow.ArrowException,
)  # fmt: skip
"""What reading a damaged file raises."""


@dataclass(frozen=True)
class Part:
    """A part of a big file: bytes [start, stop) between two records, or parquet's row groups or Arrow's batches."""

    start: int
    stop: int
    size: int
    """About how many bytes of the file it takes."""


def kind_of(path: Path) -> str:
    """The suffix that says what is in a file, in lower case: that before a compression's."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


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


def open_bytes(path: Path, part: Part | None = None) -> Any:
    """A file's bytes, decompressed."""
    if part:
        return io.BufferedReader(_Bytes(path, part), BLOCK_BYTES)
    suffix = path.suffix.lower()
    if suffix in _ZSTANDARD:
        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    if ".tar" in path.suffixes[-2:] or suffix == ".tgz":
        raise ValueError("an archive of files: unpack it")
    if suffix == ".zip" and len(zipfile.ZipFile(path).namelist()) != 1:
        raise ValueError("a zip file that does not hold exactly one file: unpack it")
    if suffix not in COMPRESSIONS:
        return open(path, "rb")
    import fsspec

    return fsspec.open(str(path), "rb", compression="infer").open()


def split(stream: Any, delimiter: bytes) -> Iterator[bytes | None]:
    """What is between the delimiters of a stream, one after the other; None for what is longer than a record may be."""
    rest = bytearray()
    too_long = False
    # one read of what is underneath at a time: what came before damage is not lost with it
    read = getattr(stream, "read1", stream.read)
    while block := read(BLOCK_BYTES):
        searched = max(0, len(rest) - len(delimiter) + 1)
        rest += block
        if rest.find(delimiter, searched) >= 0:
            *records, last = bytes(rest).split(delimiter)
            for record in records:
                yield None if too_long else record
                too_long = False
            rest = bytearray(last)
        if len(rest) > RECORD_BYTES:
            too_long = True
            del rest[: len(rest) - len(delimiter) + 1]
    if rest or too_long:
        yield None if too_long else bytes(rest)


def decoded(stream: Any) -> Iterator[str]:
    """The text of a stream of UTF-8, without a byte order mark, in pieces of some megabytes."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    place = 0
    while True:
        block = stream.read(BLOCK_BYTES)
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


def byte_parts(path: Path, delimiter: bytes, size: int) -> Iterator[Part]:
    """Parts of about ``size`` bytes, each of which ends with a delimiter or with the file."""
    with open(path, "rb") as stream:
        start, end = 0, os.fstat(stream.fileno()).st_size
        while start < end:
            stop = _after_next(stream, delimiter, start + size, end)
            yield Part(start, stop, stop - start)
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

"""Reading: from the files of a source to documents.

A document is a name and a text. What cannot be read as one becomes a `BadRecord`, never data.
"""

import itertools
import os
import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from tasks.records import RECORD_FORMATS, BadRecord, holds_list, hub_records, read_records, row_parts
from tasks.sources import SourceConfig, SourceFile
from tasks.streams import (
    BYTE_ORDER_MARK,
    COMPRESSIONS,
    TOO_LONG,
    UNREADABLE,
    Part,
    byte_parts,
    decoded,
    kind_of,
    open_bytes,
    split,
)
from trainer.errors import DataError

if TYPE_CHECKING:
    from tasks.chat import ChatEncoder

_PIECE_CHARACTERS = 2**23
"""Longest text file that is held in memory as a whole, and longest piece of a text."""
PRIVATE_USE = 0xF0000
"""First of the characters that no message has, so that they can stand for what it spells."""
_ROLE_OF = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_ROLE_OF |= {"human": "user", "gpt": "assistant"}
"""Who may speak, and what templates call them."""
_FILES_LOOKED_AT, _RECORDS_LOOKED_AT = 8, 200
"""Of a source, and of a file, before anything is tokenized."""


@dataclass(frozen=True)
class Reading:
    """How records become texts."""

    text_field: str = "text"
    """Field that holds the text, in files of records."""
    template: str | None = None
    """Text made of several fields, `{name}` each; it takes the place of the one field."""
    separator: str | None = None
    """What is between the documents of a text file; None where a file is one document."""
    messages_field: str | None = None
    """Field that holds a conversation, which takes the place of a text."""

    def identity(self) -> list[Any]:
        """What of it changes the documents that come out."""
        chat = [self.messages_field] if self.messages_field else []
        return [self.text_field, self.template, self.separator, *chat]

    def fields(self, source: SourceConfig) -> list[str]:
        """The fields that a source's texts are made of."""
        if self.messages_field:
            return [source.text_field or self.messages_field]
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


def messages_of(value: Any) -> list[dict[str, str]]:
    """The messages of a record, in the form that chat templates know: `role` and `content`.

    It takes `{role, content}`, also with the content in parts of text, and `{from, value}` of ShareGPT.

    Raises:
        ValueError: what is wrong with them.
    """
    if not isinstance(value, list) or not value:
        raise ValueError("is no list of messages")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is no object with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(role, str) or role not in _ROLE_OF:
            raise ValueError(f"message {number} has the role {role!r}; known are {', '.join(_ROLE_OF)}")
        if not isinstance(content, str):
            raise ValueError(f"message {number} has no content that is a text")
        if any(ord(character) >= PRIVATE_USE or "\ud800" <= character <= "\udfff" for character in content):
            raise ValueError(f"message {number} has private-use characters or invalid Unicode")
        messages.append({"role": _ROLE_OF[role], "content": content})
    return messages


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
        with open_bytes(self.path) as stream:
            yield from decoded(stream)


def text_digest(text: str) -> bytes:
    """128 bits of XXH3 over a text's UTF-8 bytes; a cryptographic hash would cost a tenth of the whole stage."""
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


def text_share(digest: bytes, purpose: Literal["validation", "tokenizer"]) -> float:
    """A number in [0, 1) that is always the same for the same text; those for different purposes are independent."""
    bits = digest[:8] if purpose == "validation" else digest[8:]
    return int.from_bytes(bits, "big") / 2**64


def read_documents(
    file: SourceFile,
    reading: Reading,
    part: Part | None = None,
    most: int | None = None,
    chat: "ChatEncoder | None" = None,
) -> Iterator[Document | LargeDocument | BadRecord]:
    """Every document of one input, in order; memory holds one record of at most 256 MB, or a piece of a larger text.

    Args:
        part: only this part of the file; see :func:`parts`.
        most: only so many of its first records, where it is a file of records.
        chat: makes documents of conversations; without it they are just what is said in them.

    Raises:
        DataError: no record has the fields of the text.
    """
    if file.path is None:
        yield from _texts(hub_records(file), reading, file.config, file.name, chat)
        return
    kind = kind_of(file.path)
    where = (
        f"{file.path}@{part.start}" if part and part.start and kind not in (".parquet", ".arrow") else str(file.path)
    )
    if kind in RECORD_FORMATS:
        fields = reading.fields(file.config)
        records = itertools.islice(read_records(file.path, kind, where, fields, part), most)
        yield from _texts(records, reading, file.config, where, chat)
    elif reading.messages_field:
        yield BadRecord(str(file.path), None, f"no file of records ({', '.join(RECORD_FORMATS)}), so of no messages")
    elif reading.separator:
        yield from _separated(file, reading.separator.encode(), where, part)
    else:
        yield _whole_file(file)


def check_first_records(files: list[SourceFile], reading: Reading, key: str) -> None:
    """Refuse sources of which the first records of the first files already say that there is no text in them.

    Args:
        files: those of all sources, in order.
        key: the configuration key, for messages.

    Raises:
        DataError: a file's records lack the field, or a small source has no document at all.
    """
    for number, of_source in itertools.groupby(files, lambda file: file.source):
        first = list(itertools.islice(of_source, _FILES_LOOKED_AT + 1))
        bad = [_first_fault(file, reading) for file in first[:_FILES_LOOKED_AT]]
        if len(first) <= _FILES_LOOKED_AT and all(bad):
            raise DataError(f"{key}[{number}]: it holds no document. First: {bad[0]}")


def _first_fault(file: SourceFile, reading: Reading) -> BadRecord | None:
    """What is wrong with a file whose first records are all bad; None where one is not, or they are not all."""
    if file.path is None:
        return None
    if kind_of(file.path) not in RECORD_FORMATS:
        return None if file.size else BadRecord(str(file.path), None, "empty")
    count, fault = 0, BadRecord(str(file.path), None, "empty")
    for count, item in enumerate(read_documents(file, reading, most=_RECORDS_LOOKED_AT), 1):
        if not isinstance(item, BadRecord):
            return None
        fault = item if count == 1 else fault
    return fault if count < _RECORDS_LOOKED_AT else None


def parts(file: SourceFile, reading: Reading, size: int) -> list[Part | None]:
    """The parts of about ``size`` bytes that a big file can be read in, or [None] where it is read as a whole.

    Files of JSON lines, text files with a separator, parquet and Arrow files have parts; what is compressed, CSV,
    one JSON list and a hub data set are read as a whole, in bounded memory.
    """
    if file.path is None or file.size <= size:
        return [None]
    kind = kind_of(file.path)
    if file.path.suffix.lower() in COMPRESSIONS:
        return [None]
    try:
        if kind in (".parquet", ".arrow"):
            return list(row_parts(file.path, kind, size))
        if kind in (".jsonl", ".ndjson", ".json"):
            return [None] if holds_list(file.path) else list(byte_parts(file.path, b"\n", size))
        separator = (reading.separator or "").encode()
        if kind not in RECORD_FORMATS and separator and not _overlaps_itself(separator):
            return list(byte_parts(file.path, separator, size))
    except UNREADABLE:  # said when its documents are read
        pass
    return [None]


def _overlaps_itself(separator: bytes) -> bool:
    """Whether two occurrences can overlap, so that where one begins depends on all the text before."""
    return any(separator.startswith(separator[n:]) for n in range(1, len(separator)))


def _whole_file(file: SourceFile) -> Document | LargeDocument | BadRecord:
    assert file.path is not None
    held: list[str] = []
    digest = xxhash.xxh3_128()
    characters = 0
    try:
        with open_bytes(file.path) as stream:
            for piece in decoded(stream):
                characters += len(piece)
                digest.update(piece.encode())
                if characters <= _PIECE_CHARACTERS:
                    held.append(piece)
                else:
                    held.clear()
    except UnicodeDecodeError as error:
        return BadRecord(str(file.path), None, f"not UTF-8 at byte {error.start}")
    except UNREADABLE as error:
        return BadRecord(str(file.path), None, f"cannot be read: {error}")
    if characters > _PIECE_CHARACTERS:
        return LargeDocument(file.name, file.path, characters, digest.digest())
    return Document(file.name, "".join(held)) if characters else BadRecord(str(file.path), None, "empty")


def _separated(file: SourceFile, separator: bytes, where: str, part: Part | None) -> Iterator[Document | BadRecord]:
    """The documents between a text file's separators; what is empty between two of them is no document."""
    assert file.path is not None
    name = f"{file.name}@{part.start}" if part and part.start else file.name
    number = 0
    try:
        with open_bytes(file.path, part) as stream:
            for number, record in enumerate(split(stream, separator), 1):
                if record is None:
                    yield BadRecord(where, number, TOO_LONG)
                    continue
                try:
                    text = (record.removeprefix(BYTE_ORDER_MARK) if number == 1 else record).decode()
                except UnicodeDecodeError as error:
                    yield BadRecord(where, number, f"not UTF-8 at byte {error.start} of this document")
                    continue
                if text:
                    yield Document(f"{name}:{number}", text)
    except UNREADABLE as error:
        yield BadRecord(where, None, f"cannot be read further: {error}", cuts_off=True)
    if not number:
        yield BadRecord(where, None, "empty")


def _texts(
    records: Iterator[tuple[int, Any]],
    reading: Reading,
    source: SourceConfig,
    where: str,
    chat: "ChatEncoder | None",
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
        if reading.messages_field:
            try:
                messages = messages_of(record[fields[0]])
                said = Document(f"{base}:{line}", "\n".join(message["content"] for message in messages))
                yield chat.conversation(said.name, messages) if chat else said
            except ValueError as error:
                yield BadRecord(where, line, f"field {fields[0]!r} {error}")
            continue
        faults = [(field, fault) for field in fields if (fault := _fault_of(record[field], len(fields) > 1))]
        if faults:
            yield BadRecord(where, line, f"field {faults[0][0]!r} {faults[0][1]}")
        elif any(record[field] for field in fields):
            yield Document(f"{base}:{line}", reading.text(source, record))
        else:
            yield BadRecord(where, line, "all its fields are empty")
    if not found and seen:
        key = "data.text_field to the one that holds" if len(fields) == 1 else "data.text_template to those that make"
        what = "text"
        if reading.messages_field:
            key, what = "data.messages_field to the one that holds", "messages"
        raise DataError(
            f"{where}: no record has the field {', '.join(map(repr, fields))} "
            f"(they have: {', '.join(sorted(seen)[:20])}). Set {key} the {what}."
        )


def _fault_of(text: Any, may_be_empty: bool) -> str | None:
    """Why a field's value is not the text of a document, or a part of it."""
    if not isinstance(text, str):
        return "is not a text"
    if not text:
        return None if may_be_empty else "is empty"
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"is not valid Unicode at character {error.start}"
    return None

"""Units of tokenization: some megabytes of text become a small sealed set of shards, alone or in many processes.

A unit's content is a pure function of its name: whoever builds it, and in whatever order, writes the same bytes.
It never knows of other units; what depends on several of them (duplicates, limits) is the tokenize stage's.
"""

import contextlib
import json
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tasks.chat import ChatEncoder, Conversation
from tasks.encoding import Tokenization
from tasks.home import Home
from tasks.reading import Document, LargeDocument, Reading, read_documents, text_share
from tasks.records import BadRecord
from tasks.sources import SourceFile
from tasks.streams import Part
from trainer.data.shards import SPLITS, ShardWriter
from trainer.durable import complete_directory, exclusive, faults, read_manifest
from trainer.errors import DataError, WorkerDiedError
from trainer.processes import end_with_parent

DIGESTS = np.dtype([("high", "<u8"), ("low", "<u8"), ("row", "<u4"), ("rows", "<u4"), ("bytes", "<u8")])
"""One document in a unit's `digests-<split>.npy`, sorted: hash of its text, first row and number of rows in the unit's
shards of that split, UTF-8 bytes."""
_BATCH_CHARACTERS = 4 * 2**20
_PIECE_CHARACTERS = 4 * 2**20
"""Longest text that is encoded at once."""
_WINDOW = 256
"""Characters on each side of a cut that must have the same ids whether cut or not."""
_BORDERS = re.compile(r"(?<=\S)(?=\n\w)|(?<=\w)(?= [^\W\d])")
"""Where most tokenizers begin a token anyway."""


@dataclass(frozen=True)
class Rules:
    """What decides which documents go where."""

    reading: Reading
    minimum_length: int
    maximum_length: int | None
    split: str
    """`validation` for validation sources, `train` where there are some, else `hash` or `position`."""
    validation_fraction: float
    shard_tokens: int
    held_out: tuple[Path, ...] = ()
    """The units of the validation sources, whose documents are not for training."""

    def identity(self) -> list[Any]:
        """What of it changes a unit's bytes; the held-out documents are identified by their own files."""
        fraction = self.validation_fraction if self.split in ("hash", "position") else None
        return [self.reading.identity(), self.minimum_length, self.maximum_length, self.split, fraction,
                self.shard_tokens]  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """One unit of work: files, or parts of one, in order."""

    name: str
    """Fingerprint of its content."""
    files: tuple[tuple[SourceFile, Part | None], ...]
    rules: Rules
    tokenizer: Path
    """Directory of the tokenizer."""
    tokenizer_fingerprint: str
    fast: bool = False
    """Whether the fast encoder was found to be right; both give the same bytes."""

    @property
    def size(self) -> int:
        """Bytes of its files on disk, or of its parts."""
        return sum(part.size if part else file.size for file, part in self.files)


def build(home: Home, unit: Unit) -> Path:
    """The unit's directory, `HOME/units/<name>`, built unless it is there and whole.

    Raises:
        DataError: a file changed while it was read, or the tokenizer cannot encode a document.
    """
    final = home.directory("units", unit.name)
    with exclusive(home.lock("units", unit.name)):
        hashes = home.hashes()
        if not final.exists() or faults(final, hashes):
            content: dict[str, Any] = {}
            with complete_directory(final, content) as directory:
                content.update(_Writing(unit, directory).run())
                for file in {file.path: file for file, _ in unit.files}.values():
                    if file.path and not (file.path.exists() and hashes(file.path) == file.sha256):
                        raise DataError(f"{file.path}: it changed while it was read. Run again.")
            hashes.remember(final)
    return final


@lru_cache(maxsize=1)
def _loaded(directory: Path, fast: bool) -> Tokenization:
    """A tokenizer that stays, with its warm cache, for the next unit."""
    return Tokenization(directory, fast)


@lru_cache(maxsize=1)
def _chat(directory: Path) -> ChatEncoder:
    return ChatEncoder(directory)


@dataclass
class _Rows:
    """Texts of one split that wait to be encoded together."""

    writer: ShardWriter
    names: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    characters: int = 0
    text_bytes: int = 0
    written: int = 0
    digests: list[tuple[int, int, int, int, int]] = field(default_factory=list)


class _Writing:
    """One unit being written into one directory."""

    def __init__(self, unit: Unit, directory: Path) -> None:
        self.unit, self.rules, self.directory = unit, unit.rules, directory
        self.tokenization = _loaded(unit.tokenizer, unit.fast)
        self.rows = {split: _Rows(self._writer(split)) for split in SPLITS}
        self.records: Counter[str] = Counter()
        self.held_out = _held_out(self.rules.held_out)

    def _writer(self, split: str) -> ShardWriter:
        return ShardWriter(
            self.directory,
            split,
            0,
            self.tokenization.vocabulary_size,
            self.unit.tokenizer_fingerprint,
            self.rules.shard_tokens,
        )

    def run(self) -> dict[str, Any]:
        """Write the shards; returns the manifest's content."""
        chat = _chat(self.unit.tokenizer) if self.rules.reading.messages_field else None
        for file, part in self.unit.files:
            for item in read_documents(file, self.rules.reading, part, chat=chat):
                self.records["read"] += 1
                if isinstance(item, BadRecord):
                    self._quarantine(item)
                else:
                    self._place(item)
        for split, rows in self.rows.items():
            self._encode(rows)
            rows.writer.flush()
            if rows.digests:
                np.save(self.directory / f"digests-{split}.npy", np.sort(np.array(rows.digests, DIGESTS)))
        return {
            "kind": "unit",
            "fingerprint": self.unit.name,
            "records": dict(self.records),
            "shards": [shard for rows in self.rows.values() for shard in rows.writer.shards],
        }

    def _quarantine(self, record: BadRecord) -> None:
        self.records["bad"] += 1
        if record.cuts_off:
            self.records["cut_off"] += 1
        with open(self.directory / "quarantine.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(vars(record)) + "\n")

    def _place(self, item: Document | LargeDocument) -> None:
        """Put a document where it belongs: into a split, both, or nowhere."""
        rules = self.rules
        if item.characters < rules.minimum_length:
            self.records["too_short"] += 1
        elif rules.maximum_length is not None and item.characters > rules.maximum_length:
            self.records["too_long"] += 1
        elif rules.split == "position":
            # decimal, because 10 * (1 - 0.9) is less than 1 in floating point
            cut = int(item.characters * (1 - Decimal(repr(rules.validation_fraction))))
            self._add("train", item, item.digest(), 0, cut)
            self._add("validation", item, item.digest(), cut, item.characters)
        else:
            digest = item.digest()
            if rules.split == "hash":
                held_out = text_share(digest, "validation") < rules.validation_fraction
                self._add("validation" if held_out else "train", item, digest, 0, item.characters)
            elif rules.split == "validation" or digest not in self.held_out:
                self._add(rules.split, item, digest, 0, item.characters)
            else:
                self.records["held_out"] += 1

    def _add(self, split: str, item: Document | LargeDocument, digest: bytes, start: int, stop: int) -> None:
        """Take characters [start, stop) of a document as rows of a split: one, or several of a very long text."""
        rows = self.rows[split]
        words = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
        if isinstance(item, Conversation):  # whole, and encoded already
            rows.digests.append((*words, rows.written, 1, item.answer_bytes))
            rows.writer.add(item.ids, np.array([len(item.ids)]), [item.name], item.answer_bytes, item.marks)
            rows.written += 1
            return
        first = rows.written + len(rows.texts)
        size = count = 0
        if isinstance(item, Document) and stop - start <= _PIECE_CHARACTERS:
            lengths: Iterable[tuple[str, bool]] = [(item.text[start:stop], True)] if stop > start else []
        else:
            lengths = _cut(_between(item.pieces(), start, stop), self.tokenization)
        for text, ends in lengths:
            rows.names.append(f"{item.name}#{count}" if count else item.name)
            rows.texts.append(text)
            rows.begins.append(not count)
            rows.ends.append(ends)
            rows.characters += len(text)
            text_bytes = len(text) if text.isascii() else len(text.encode())
            rows.text_bytes += text_bytes
            size += text_bytes
            count += 1
            if rows.characters >= _BATCH_CHARACTERS:
                self._encode(rows)
        if count:
            rows.digests.append((*words, first, count, size))

    def _encode(self, rows: _Rows) -> None:
        if not rows.texts:
            return
        try:
            ids, lengths = self.tokenization.documents(rows.texts, np.array(rows.begins), np.array(rows.ends))
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(
                f"{rows.names[0]} or one shortly after it: the tokenizer cannot encode it ({error})."
            ) from None
        rows.writer.add(ids, lengths, rows.names, rows.text_bytes)
        rows.written += len(rows.texts)
        rows.names, rows.texts, rows.begins, rows.ends, rows.characters, rows.text_bytes = [], [], [], [], 0, 0


def _held_out(units: tuple[Path, ...]) -> set[bytes]:
    """The digests of the documents in these units' validation split."""
    found: set[bytes] = set()
    for unit in units:
        for high, low, *_ in load_digests(unit, "validation").tolist():
            found.add(high.to_bytes(8, "big") + low.to_bytes(8, "big"))
    return found


def load_digests(unit: Path, split: str) -> np.ndarray:
    """The documents of a unit's split, sorted by their hash, mapped from disk."""
    path = unit / f"digests-{split}.npy"
    return np.load(path, mmap_mode="r") if path.exists() else np.empty(0, DIGESTS)


def _between(pieces: Iterator[str], start: int, stop: int) -> Iterator[str]:
    """Characters [start, stop) of a text that comes in pieces."""
    place = 0
    for piece in pieces:
        if place >= stop:
            return
        text = piece[max(0, start - place) : stop - place]
        place += len(piece)
        if text:
            yield text


def _cut(pieces: Iterator[str], tokenization: Tokenization) -> Iterator[tuple[str, bool]]:
    """The text in lengths that are encoded at once, each with whether it is the last."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) > _PIECE_CHARACTERS:
            place = _place_to_cut(held, tokenization)
            yield held[:place], False
            held = held[place:]
    if held:
        yield held, True


def _place_to_cut(text: str, tokenization: Tokenization) -> int:
    """Where a long text may be cut so that both sides have the ids that they have in one piece.

    Where the text has no such place among the last 64 thousand characters before the limit, as in one endless word,
    it is cut at the limit: its ids then differ from those of the whole by a token or two there.
    """
    lowest = _PIECE_CHARACTERS - 2**16
    candidates = [found.start() for found in _BORDERS.finditer(text, lowest, _PIECE_CHARACTERS)]
    for place in candidates[-64:][::-1]:
        left, right = text[max(0, place - _WINDOW) : place], text[place : place + _WINDOW]
        whole, cut = tokenization.encode([left + right])[0], tokenization.encode([left, right])[0]
        if np.array_equal(whole, cut):
            return place
    return _PIECE_CHARACTERS


# --- many processes ------------------------------------------------------------------------------


class Builders:
    """What builds units: processes that start at once, so that they are ready when the work is; or this one.

    They end with the block that this manages, or with this process.
    """

    def __init__(self, home: Home, processes: int, tokenizer: Path) -> None:
        """Start them.

        Args:
            processes: with 1 or fewer, units are built in the calling thread.
            tokenizer: directory of the tokenizer that their units will want.
        """
        self._home = home
        self._waiting: queue.SimpleQueue[Unit | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Unit | BaseException] = queue.SimpleQueue()
        count = processes if processes > 1 else 0
        self._workers = [_Worker(home, tokenizer, self._waiting, self._finished) for _ in range(count)]
        for worker in self._workers:
            worker.start()

    def __enter__(self) -> "Builders":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()

    def build(self, units: list[Unit], done: Callable[[Unit], None]) -> None:
        """Build units.

        Args:
            done: called after each unit, in the calling thread.

        Raises:
            ForgelineError: what the first failing unit raised, or WorkerDiedError.
        """
        for unit in units:
            if self._workers:
                self._waiting.put(unit)
            else:
                build(self._home, unit)
                done(unit)
        for _ in units if self._workers else []:
            result = self._finished.get()
            if isinstance(result, BaseException):
                raise result
            done(result)


class _Worker(threading.Thread):
    """A process that builds units, and the thread that feeds it."""

    def __init__(self, home: Home, tokenizer: Path, waiting: queue.SimpleQueue, finished: queue.SimpleQueue) -> None:
        super().__init__(name="units", daemon=True)
        self.home, self.tokenizer, self.waiting, self.finished = home, tokenizer, waiting, finished
        self.process: subprocess.Popen | None = None
        self.stopped = False

    def run(self) -> None:
        """Hand one unit after the other to the process."""
        call = f"serve({os.getpid()}, {str(self.tokenizer)!r})"
        code = f"import sys; sys.path[:] = {sys.path!r}; from tasks.units import serve; {call}"
        # started here, because the kernel ends it with the thread that started it
        pipe = subprocess.PIPE
        with (
            contextlib.suppress(BrokenPipeError),  # on closing a dead process's pipe
            subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as self.process,
        ):
            assert self.process.stdin and self.process.stdout
            try:
                while not self.stopped and (unit := self.waiting.get()):
                    pickle.dump((self.home, unit), self.process.stdin)
                    self.process.stdin.flush()
                    error = pickle.load(self.process.stdout)
                    self.finished.put(error or unit)
            except (OSError, EOFError, pickle.UnpicklingError):
                code_of_end = self.process.wait()
                if not self.stopped:
                    self.finished.put(
                        WorkerDiedError(
                            f"A tokenization process ended (exit code {code_of_end}): killed, or out of memory. "
                            "What is finished stays; run again to go on."
                        )
                    )
            finally:
                self.process.kill()

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.stopped = True
        self.waiting.put(None)
        if self.process:
            self.process.kill()


def serve(parent: int, tokenizer: str) -> None:
    """A worker process's life: read units from standard input, build them, answer None or the exception."""
    end_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt ends the parent, which ends this
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with contextlib.suppress(Exception):  # said when it is wanted
        _loaded(Path(tokenizer), fast=True)
    with contextlib.suppress(EOFError):
        while True:
            home, unit = pickle.load(sys.stdin.buffer)
            try:
                build(home, unit)
                answer = None
            except Exception as error:
                answer = error
            try:
                content = pickle.dumps(answer)
            except Exception:  # an exception that cannot travel
                content = pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer}"))
            answers.write(content)
            answers.flush()


def facts(unit: Path) -> dict[str, Any]:
    """The manifest of a finished unit."""
    manifest = read_manifest(unit)
    assert manifest is not None, unit
    return manifest

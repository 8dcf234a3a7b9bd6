"""The tokenize stage: documents in, a shard set out."""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le, Lt
from prefect import task
from pydantic import Field, model_validator

from tasks.home import Home
from tasks.progress import Progress, report
from tasks.sources import BadRecord, Document, SourceConfig, SourceFile, read_documents
from tasks.stage import Reference, build_once, shown, timed
from tasks.tokenizer import TokenizerConfig, text_share
from trainer.data.shards import FORMAT_VERSION as SHARD_FORMAT
from trainer.data.shards import ShardSet, ShardWriter
from trainer.errors import DataError
from trainer.settings import OPERATIONAL, Settings, fingerprint

logger = logging.getLogger("forgeline")

FORMAT_VERSION = 1
CANARY = "Zoë’s naïve 🦊 said: “x²≠١٢٣”\t<|endoftext|>\r\n  if a[0]==None:\u00a0pass  # 中文 e\u0301 \x00 1234567890"
_BATCH_BYTES = 4 * 2**20


class DataConfig(Settings):
    """The text, and how it becomes training sequences."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Training text: paths, globs, directories, URLs, or mappings with a weight."""
    validation_sources: list[SourceConfig] = Field(default_factory=list)
    """Validation text of its own. Unset: a part of the sources."""
    text_field: str = "text"
    """Field that holds the text, in JSON lines, CSV, parquet, Arrow and hub data sets."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    sequence_length: Annotated[int, Ge(2)] = 1024
    """Tokens of context in training and evaluation."""
    packing: Literal["slice", "best_fit"] = "slice"
    """slice: the documents one after the other, cut anywhere; best_fit: none that fits in a sequence is cut."""
    document_mask: bool = False
    """Attention and positions stay inside documents, where a sequence holds several."""
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Part of the text that is held out, where there are no validation_sources."""
    validation_split: Literal["hash", "position"] = "hash"
    """hash: whole documents, by a hash of their text; position: the last characters of every document."""
    shard_tokens: Annotated[int, Ge(1)] = 2**24
    """Tokens after which a shard is closed."""
    bad_record_limit: Annotated[float, Ge(0), Le(1), OPERATIONAL] = 0.01
    """Largest share of records that may be unreadable; they are listed in the set's quarantine.jsonl."""

    @model_validator(mode="after")
    def _weights_of_all_or_none(self) -> "DataConfig":
        weights = [source.weight for source in self.sources]
        if any(weights) and None in weights:
            raise ValueError(
                f"sources: set a weight for all of them or for none (source {weights.index(None)} has none)"
            )
        return self

    @property
    def weights(self) -> list[float] | None:
        """The sources' mixture weights, or None."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return weights or None


def sources_fingerprint(files: list[SourceFile]) -> str:
    """Fingerprint of the raw text alone."""
    return fingerprint("sources", FORMAT_VERSION, files=[file.identity() for file in files])


@timed
def tokenize(
    home: Home,
    config: DataConfig,
    files: list[SourceFile],
    validation_files: list[SourceFile],
    tokenizer: Reference,
) -> Reference:
    """Write the shard set of the sources, `HOME/shards/<fingerprint>/`.

    Raises:
        DataError: too many records are bad, a source has no usable text, or a split is empty.
    """
    settings = config.identity()
    name = fingerprint(
        "tokenize",
        FORMAT_VERSION,
        shard_format=SHARD_FORMAT,
        config={key: settings[key] for key in ("validation_fraction", "validation_split", "shard_tokens")},
        text_field=config.text_field,
        files=[file.identity() for file in files],
        validation_files=[file.identity() for file in validation_files],
        tokenizer=tokenizer.fingerprint,
    )

    def build(directory: Path) -> dict[str, Any]:
        return _Tokenization(config, files, validation_files, tokenizer, directory).run(name)

    path, cached = build_once(home, "shards", name, build)
    _refuse_too_many_bad(ShardSet.open(path).manifest["records"], config.bad_record_limit)
    return Reference(path=path, fingerprint=name, cached=cached)


class _Tokenization:
    """One run of the stage, filling one directory."""

    def __init__(
        self,
        config: DataConfig,
        files: list[SourceFile],
        validation_files: list[SourceFile],
        tokenizer: Reference,
        directory: Path,
    ) -> None:
        from tokenizers import Tokenizer

        self.config, self.files, self.validation_files, self.directory = config, files, validation_files, directory
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self.encoder = Tokenizer.from_file(str(tokenizer.path / "tokenizer.json"))
        # the text of a document is never a control token, even where it spells one
        self.encoder.encode_special_tokens = True
        self.encoder.no_truncation()
        self.encoder.no_padding()
        settings = json.loads((tokenizer.path / "tokenizer_config.json").read_text(encoding="utf-8"))
        end = settings["eos_token"]
        self.end_token: str = end if isinstance(end, str) else end["content"]
        vocabulary = self.encoder.get_vocab(with_added_tokens=True)
        if self.end_token not in vocabulary:
            raise DataError(f"{tokenizer.path}: its end-of-text token {self.end_token!r} is not in its vocabulary.")
        self.end_id = vocabulary[self.end_token]
        self.vocabulary_size = max(vocabulary.values()) + 1  # some vocabularies have gaps
        self.held_out: set[bytes] = set()
        self.records: Counter[str] = Counter()
        self.bad: list[BadRecord] = []

    def run(self, name: str) -> dict[str, Any]:
        """Tokenize everything; returns the manifest's content."""
        shards: list[dict[str, Any]] = []
        work = [(file, True) for file in self.validation_files] + [(file, False) for file in self.files]
        total = sum(file.size for file, _ in work)
        done = 0
        writers: dict[str, ShardWriter] = {}
        previous: tuple[int, bool] | None = None
        for file, validates in work:
            if (file.source, validates) != previous:
                shards += _close(writers)
                writers = {split: self._writer(split, file.source) for split in ("train", "validation")}
                previous = (file.source, validates)
            for batch in _batches(self._split(file, validates)):
                self._encode(batch, writers)
            done += file.size
            report(Progress("tokenize", done / 1e6, total / 1e6 or None, "MB"))
        shards += _close(writers)
        self._check(shards)
        return {
            "kind": "shards",
            "format_version": SHARD_FORMAT,
            "fingerprint": name,
            "tokenizer": {
                "fingerprint": self.tokenizer_fingerprint,
                "vocabulary_size": self.vocabulary_size,
                "end_token": self.end_token,
                "end_id": self.end_id,
                "beginning_token": None,
            },
            "canary": self._canary(),
            "records": self._record_counts(),
            "shards": shards,
            "inputs": [
                {"source": file.source, "name": file.name, "path": str(file.path or ""), "sha256": file.sha256,
                 "size": file.size, "validation": validates}
                for file, validates in work
            ],
        }  # fmt: skip

    def _canary(self) -> dict[str, Any]:
        try:
            return {"text": CANARY, "ids": self.encoder.encode(CANARY, add_special_tokens=False).ids}
        except Exception:  # a char vocabulary lacks the canary's characters: use those it has
            text = "".join(symbol for symbol in sorted(self.encoder.get_vocab()) if len(symbol) == 1)
            return {"text": text, "ids": self.encoder.encode(text, add_special_tokens=False).ids}

    def _writer(self, split: str, source: int) -> ShardWriter:
        return ShardWriter(
            self.directory, split, source, self.vocabulary_size, self.tokenizer_fingerprint, self.config.shard_tokens
        )

    def _split(self, file: SourceFile, validates: bool) -> Iterator[tuple[str, Document]]:
        """The readable documents of a file, each with its split."""
        for item in read_documents(file, self.config.text_field):
            self.records["read"] += 1
            if isinstance(item, BadRecord):
                self._quarantine(item)
            elif validates:
                self.held_out.add(_digest(item.text))
                yield "validation", item
            elif self.validation_files:
                if _digest(item.text) not in self.held_out:
                    yield "train", item
            elif self.config.validation_split == "position":
                # decimal, because 10 * (1 - 0.9) is less than 1 in floating point
                cut = int(len(item.text) * (1 - Decimal(repr(self.config.validation_fraction))))
                for split, text in (("train", item.text[:cut]), ("validation", item.text[cut:])):
                    if text:
                        yield split, Document(item.name, text)
            else:
                held_out = text_share(item.text, "validation") < self.config.validation_fraction
                yield ("validation" if held_out else "train"), item

    def _record_counts(self) -> dict[str, Any]:
        return {"read": self.records["read"], "bad": self.records["bad"], "first_bad": [str(bad) for bad in self.bad]}

    def _quarantine(self, record: BadRecord) -> None:
        self.records["bad"] += 1
        if len(self.bad) < 3:
            self.bad.append(record)
        with open(self.directory / "quarantine.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(vars(record)) + "\n")

    def _encode(self, batch: list[tuple[str, Document]], writers: dict[str, ShardWriter]) -> None:
        try:
            encodings = self.encoder.encode_batch_fast([d.text for _, d in batch], add_special_tokens=False)
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(
                f"{batch[0][1].name} or one shortly after it: the tokenizer cannot encode it ({error})."
            ) from None
        for split, writer in writers.items():
            chosen = [
                (document, encoding.ids) for (s, document), encoding in zip(batch, encodings, strict=True) if s == split
            ]
            if chosen:
                ids = np.concatenate([np.array([*ids, self.end_id], dtype=np.int64) for _, ids in chosen])
                lengths = np.array([len(ids) + 1 for _, ids in chosen])
                size = sum(len(document.text.encode("utf-8", "surrogatepass")) for document, _ in chosen)
                writer.add(ids, lengths, [document.name for document, _ in chosen], size)

    def _check(self, shards: list[dict[str, Any]]) -> None:
        _refuse_too_many_bad(self._record_counts(), self.config.bad_record_limit)
        if self.bad:
            logger.warning("%d records were put into quarantine.jsonl; first: %s", self.records["bad"], self.bad[0])
        for number in range(len(self.config.sources)):
            if not any(s["split"] == "train" and s["source"] == number for s in shards):
                raise DataError(f"data.sources[{number}]: no document of it is left for training.")
        if not any(shard["split"] == "validation" for shard in shards):
            raise DataError(
                f"data.validation_fraction: no document of {self.records['read']} fell into the validation split. "
                "Raise it, set data.validation_split: position, or give data.validation_sources."
            )


def _refuse_too_many_bad(records: dict[str, Any], limit: float) -> None:
    if records["bad"] > limit * records["read"]:
        raise DataError(
            f"data.sources: {records['bad']} of {records['read']} records cannot be used, more than "
            f"data.bad_record_limit={limit:g} allows. First: {'; '.join(records['first_bad'])}"
        )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _batches(items: Iterator[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item[1].text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _close(writers: dict[str, ShardWriter]) -> list[dict[str, Any]]:
    for writer in writers.values():
        writer.flush()
    return [shard for writer in writers.values() for shard in writer.shards]


def describe(directory: Path) -> dict[str, Any]:
    """What is in a shard set, for people: counts a split, tokenizer, inputs."""
    shards = ShardSet.open(directory)
    manifest = shards.manifest
    return {
        "directory": str(directory),
        "fingerprint": manifest["fingerprint"],
        "tokenizer": manifest["tokenizer"],
        "splits": {
            split: {
                "shards": sum(shard["split"] == split for shard in manifest["shards"]),
                **{field: shards.total(split, field) for field in ("documents", "tokens", "text_bytes")},
            }
            for split in ("train", "validation")
        },
        "records": manifest["records"],
        "inputs": {"files": len(manifest["inputs"]), "bytes": sum(item["size"] for item in manifest["inputs"])},
    }


@task(name="tokenize", task_run_name="tokenize")
def tokenize_task(
    home: Home,
    config: DataConfig,
    files: list[SourceFile],
    validation_files: list[SourceFile],
    tokenizer: Reference,
) -> Reference:
    """Write the shard set."""
    return shown(tokenize(home, config, files, validation_files, tokenizer))

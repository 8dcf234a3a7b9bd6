"""The tokenize stage: documents in, a shard set out.

The text is cut into units of work (`tasks/units.py`), which are built in parallel and stay whatever happens to the
others. The set binds them together: hard links to their shards, in order, and one manifest. Where text has been added
since an earlier set, that set's units come first, as they are, and only the new files make new ones.
"""

import hashlib
import json
import logging
import os
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from prefect import task
from pydantic import Field, model_validator

from tasks.duplicates import without_duplicates
from tasks.encoding import Tokenization, fast_encoder_agrees
from tasks.home import Home
from tasks.progress import Progress, report
from tasks.reading import Reading, parts, read_documents, template_fields
from tasks.records import BadRecord
from tasks.retention import clean, in_use
from tasks.sources import SourceConfig, SourceFile
from tasks.stage import Reference, build_once, shown, timed
from tasks.streams import Part
from tasks.tokenizer import TokenizerConfig
from tasks.units import Builders, Rules, Unit, facts
from trainer.data.shards import FORMAT_VERSION as SHARD_FORMAT
from trainer.data.shards import ShardSet
from trainer.durable import faults, read_sealed, shared
from trainer.errors import DataError
from trainer.settings import OPERATIONAL, Settings, fingerprint

logger = logging.getLogger("forgeline")

FORMAT_VERSION = 3
_WORTH_PROCESSES = 8 * 2**20
"""Bytes of text below which starting processes takes longer than the work."""
_SAMPLE_FILES, _SAMPLE_TEXTS, _SAMPLE_CHARACTERS = 16, 4, 8192


class DataConfig(Settings):
    """The text, and how it becomes training sequences."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)]
    """Training text: paths, globs, directories, URLs, or mappings with a weight."""
    validation_sources: list[SourceConfig] = Field(default_factory=list)
    """Validation text of its own. Unset: a part of the sources."""
    text_field: str = "text"
    """Field that holds the text, in JSON lines, CSV, parquet, Arrow and hub data sets."""
    text_template: str | None = None
    """Text made of several fields in place of one, such as `"{title}\\n\\n{body}"`."""
    messages_field: str | None = None
    """Field that holds a conversation (`[{role, content}, …]`) in place of a text: only the answers are trained."""
    separator: Annotated[str, Field(min_length=1)] | None = None
    """What is between the documents of a text file. Unset: a file is one document."""
    minimum_length: Annotated[int, Ge(0)] = 0
    """Fewest characters of a document; shorter ones are left out."""
    maximum_length: Annotated[int, Ge(1)] | None = None
    """Most characters of a document; longer ones are left out."""
    deduplicate: bool = False
    """Keep only the first of documents with exactly the same text, across all sources."""
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
    unit_bytes: Annotated[int, Ge(1)] = 16 * 2**20
    """About how much text is one unit of work: what a kill can cost a process."""
    processes: Annotated[int | None, Ge(1), OPERATIONAL] = None
    """Processes that tokenize. Unset: one a core."""
    runner: Annotated[Literal["local", "ray"], OPERATIONAL] = "local"
    """local: this machine; ray: a Ray cluster whose machines share the work directory (extra `forgeline[ray]`)."""
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

    @model_validator(mode="after")
    def _usable_template_and_lengths(self) -> "DataConfig":
        if self.text_template is not None:
            template_fields(self.text_template)
        if self.maximum_length is not None and self.maximum_length < self.minimum_length:
            raise ValueError(f"maximum_length: {self.maximum_length} is less than minimum_length={self.minimum_length}")
        return self

    @model_validator(mode="after")
    def _usable_for_conversations(self) -> "DataConfig":
        if self.messages_field is None:
            return self
        for key in ("text_template", "separator"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: cannot be set together with messages_field")
        if self.validation_split == "position":
            raise ValueError("validation_split: position would cut conversations; use hash")
        if self.tokenizer.type != "pretrained":
            raise ValueError("tokenizer: messages_field needs that of a chat model: {type: pretrained, path: …}")
        return self

    @property
    def reading(self) -> Reading:
        """How records become texts."""
        return Reading(self.text_field, self.text_template, self.separator, self.messages_field)

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
    family = _family(config, validation_files, tokenizer)
    layers = _layers(home, family, files)
    name = fingerprint(
        "tokenize", FORMAT_VERSION, family=family, layers=[[f.identity() for f in layer] for layer in layers]
    )

    known: dict[Path, str] = {}

    def build(directory: Path) -> dict[str, Any]:
        return _Tokenizing(home, config, validation_files, layers, tokenizer, directory, known).run(name, family)

    with shared(in_use(home)):
        path, cached = build_once(home, "shards", name, build, known)
    if not cached:
        clean(home)
    manifest = ShardSet.open(path).manifest
    _refuse_too_many_bad(manifest["records"], len(manifest["inputs"]), config.bad_record_limit)
    return Reference(path=path, fingerprint=name, cached=cached)


def _family(config: DataConfig, validation_files: list[SourceFile], tokenizer: Reference) -> str:
    """Fingerprint of all but the training files: sets of one family can grow out of one another."""
    settings = config.identity()
    keys = ("validation_fraction", "validation_split", "shard_tokens", "unit_bytes", "minimum_length",
            "maximum_length", "deduplicate")  # fmt: skip
    return fingerprint(
        "tokenize-family",
        FORMAT_VERSION,
        shard_format=SHARD_FORMAT,
        config={key: settings[key] for key in keys},
        reading=config.reading.identity(),
        validation_files=[file.identity() for file in validation_files],
        tokenizer=tokenizer.fingerprint,
    )


def _layers(home: Home, family: str, files: list[SourceFile]) -> list[list[SourceFile]]:
    """The training files as they came: those of the largest earlier set that they contain, then the others."""
    present = {_key(file.identity()): file for file in files}
    best: list[list[SourceFile]] = []
    for path in sorted((home.path / "shards").glob("[!.]*")):
        manifest = read_sealed(path) or {}
        if manifest.get("kind") != "shards" or manifest.get("family") != family:
            continue
        inputs = [entry for entry in manifest["inputs"] if not entry["validation"]]
        if any(_key(entry["identity"]) not in present for entry in inputs):
            continue
        if len(inputs) > sum(map(len, best)):
            best = [[] for _ in range(1 + max(entry["layer"] for entry in inputs))]
            for entry in inputs:
                best[entry["layer"]].append(present[_key(entry["identity"])])
    known = {_key(file.identity()) for layer in best for file in layer}
    added = [file for file in files if _key(file.identity()) not in known]
    return [*best, added] if added else best


def _key(identity: list[Any]) -> tuple[Any, ...]:
    return tuple(identity)


class _Tokenizing:
    """One run of the stage, filling one directory."""

    def __init__(
        self,
        home: Home,
        config: DataConfig,
        validation_files: list[SourceFile],
        layers: list[list[SourceFile]],
        tokenizer: Reference,
        directory: Path,
        known: dict[Path, str],
    ) -> None:
        self.known = known
        self.home, self.config, self.directory, self.tokenizer = home, config, directory, tokenizer
        self.validation_files, self.layers = validation_files, layers
        self.total = sum(file.size for layer in [validation_files, *layers] for file in layer)
        self.done = 0

    def run(self, name: str, family: str) -> dict[str, Any]:
        """Tokenize everything; returns the manifest's content."""
        validation = self._units(self.validation_files, "validation", ())
        held_out = tuple(self._place(unit) for unit in validation)
        split = "train" if self.validation_files else self.config.validation_split
        training = [unit for layer in self.layers for unit in self._units(layer, split, held_out)]
        units = [*validation, *training]
        paths = [self._place(unit) for unit in units]
        tokenization, encoder = self._build(validation, training)
        if self.config.deduplicate:
            paths = without_duplicates(self.home, paths, self.config.shard_tokens)
        records, shards = self._assemble(list(zip(units, paths, strict=True)))
        self._check(records, shards)
        return {
            "kind": "shards",
            "format_version": SHARD_FORMAT,
            "fingerprint": name,
            "family": family,
            "tokenizer": {
                "fingerprint": self.tokenizer.fingerprint,
                "vocabulary_size": tokenization.vocabulary_size,
                "end_token": tokenization.end_token,
                "end_id": tokenization.end_id,
                "beginning_token": tokenization.beginning_token,
                "beginning_id": tokenization.beginning_id,
            },
            "encoder": {key: encoder[key] for key in ("name", "why")},
            "canary": tokenization.canary(),
            "records": records,
            "shards": shards,
            "units": sorted({unit.name for unit in units} | {path.name for path in paths}),
            "inputs": [
                {"source": file.source, "name": file.name, "path": str(file.path or ""), "sha256": file.sha256,
                 "size": file.size, "validation": number < 0, "layer": number, "identity": file.identity()}
                for number, layer in enumerate([self.validation_files, *self.layers], -1) for file in layer
            ],
        }  # fmt: skip

    def _sample(self) -> list[str]:
        """Beginnings of some documents of the input, the same for the same input; conversations go another way."""
        if self.config.messages_field:
            return []
        files = [file for layer in self.layers for file in layer if file.path]
        chosen = random.Random(len(files)).sample(files, min(_SAMPLE_FILES, len(files)))
        texts: list[str] = []
        for file in chosen:
            first: list[str] = []
            try:
                for item in read_documents(file, self.config.reading):
                    if not isinstance(item, BadRecord):
                        first.append(next(item.pieces())[:_SAMPLE_CHARACTERS])
                    if len(first) == _SAMPLE_TEXTS:
                        break
            except DataError:  # said when its unit is built
                pass
            texts += first
        return texts

    def _units(self, files: list[SourceFile], split: str, held_out: tuple[Path, ...]) -> list[Unit]:
        """The units of work of a layer's files, which are in order."""
        config = self.config
        rules = Rules(
            config.reading, config.minimum_length, config.maximum_length, split, config.validation_fraction,
            config.shard_tokens, held_out,
        )  # fmt: skip
        return [
            Unit(
                fingerprint(
                    "unit",
                    FORMAT_VERSION,
                    shard_format=SHARD_FORMAT,
                    # without the source's number: a unit stays when sources change their order
                    files=[[*file.identity()[1:], *([part.start, part.stop] if part else [])] for file, part in group],
                    rules=rules.identity(),
                    held_out=[f.identity() for f in self.validation_files] if split == "train" else [],
                    tokenizer=self.tokenizer.fingerprint,
                ),
                group, rules, self.tokenizer.path, self.tokenizer.fingerprint,
            )
            for group in _groups(files, config)
        ]  # fmt: skip

    def _place(self, unit: Unit) -> Path:
        return self.home.directory("units", unit.name)

    def _build(self, *stages: list[Unit]) -> tuple[Tokenization, dict[str, Any]]:
        """Build what is missing of the units, stage after stage; returns the tokenizer and which encoder was used."""
        hashes = self.home.hashes()
        missing = [
            [unit for place, unit in {self._place(unit): unit for unit in units}.items() if faults(place, hashes)]
            for units in stages
        ]
        size = sum(unit.size for units in missing for unit in units)
        self.done += self.total - size
        processes = min(self.config.processes or os.cpu_count() or 1, max(map(len, missing)))
        if self.config.runner == "ray" or (size < _WORTH_PROCESSES and self.config.processes is None):
            processes = 1
        with Builders(self.home, processes, self.tokenizer.path) as builders:
            tokenization = Tokenization(self.tokenizer.path, fast=False)
            encoder = fast_encoder_agrees(tokenization, self._sample())
            logger.log(
                logging.INFO if encoder["fast"] else logging.WARNING,
                "tokenize encoder=%s (%s)", encoder["name"], encoder["why"],
            )  # fmt: skip
            for units in missing:
                chosen = [replace(unit, fast=encoder["fast"]) for unit in units]
                if self.config.runner == "ray":
                    from tasks.ray import build_on_ray  # imports what only the extra brings

                    build_on_ray(self.home, chosen, self._progress)
                else:
                    builders.build(chosen, self._progress)
        return tokenization, encoder

    def _progress(self, unit: Unit) -> None:
        self.done += unit.size
        report(Progress("tokenize", self.done / 1e6, self.total / 1e6 or None, "MB"))

    def _assemble(self, built: list[tuple[Unit, Path]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Link the units' shards into the set, in order; returns the counts of records and the shards."""
        counts: Counter[str] = Counter(read=0, bad=0)
        numbers: Counter[tuple[str, int]] = Counter()
        shards: list[dict[str, Any]] = []
        first_bad: list[str] = []
        for unit, path in built:
            manifest = facts(path)
            counts.update(manifest["records"])
            if (path / "quarantine.jsonl").exists():
                first_bad += self._quarantine(path / "quarantine.jsonl", 3 - len(first_bad))
            sums = {entry["path"]: entry["sha256"] for entry in manifest["files"]}
            for shard in manifest["shards"]:
                key = shard["split"], unit.files[0][0].source
                place = f"{key[0]}/source-{key[1]:03d}-shard-{numbers[key]:05d}.arrow"
                numbers[key] += 1
                (self.directory / place).parent.mkdir(exist_ok=True)
                if _link(path / shard["path"], self.directory / place):
                    self.known[self.directory / place] = sums[shard["path"]]
                shards.append({**shard, "path": place, "source": key[1]})
        return {**counts, "first_bad": first_bad}, shards

    def _quarantine(self, path: Path, examples: int) -> list[str]:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        with open(self.directory / "quarantine.jsonl", "a", encoding="utf-8") as file:
            file.writelines(lines)
        return [str(BadRecord(**json.loads(line))) for line in lines[: max(0, examples)]]

    def _check(self, records: dict[str, Any], shards: list[dict[str, Any]]) -> None:
        files = sum(len(layer) for layer in [self.validation_files, *self.layers])
        _refuse_too_many_bad(records, files, self.config.bad_record_limit)
        if records["bad"]:
            logger.warning(
                "%d records were put into quarantine.jsonl; first: %s", records["bad"], records["first_bad"][0]
            )
        present = {shard["source"] for shard in shards if shard["split"] == "train"}
        for number in sorted(set(range(len(self.config.sources))) - present):
            problem = f"data.sources[{number}]: no document of it is left for training."
            if self.config.weights or not present or not self.config.deduplicate:
                raise DataError(f"{problem} {_left_out(records)}")
            logger.warning("%s %s", problem, _left_out(records))
        if not any(shard["split"] == "validation" for shard in shards):
            raise DataError(
                f"data.validation_fraction: no document of {records['read']} fell into the validation split. "
                "Raise it, set data.validation_split: position, or give data.validation_sources."
            )


def _groups(files: list[SourceFile], config: DataConfig) -> list[tuple[tuple[SourceFile, Part | None], ...]]:
    """Files of one source together up to about ``unit_bytes``, and bigger ones in parts.

    Where a group ends is drawn by the name of its last file, so that a changed file leaves the groups after it alone.
    """
    groups: list[tuple[tuple[SourceFile, Part | None], ...]] = []
    group: list[tuple[SourceFile, Part | None]] = []
    size = 0
    for number, file in enumerate(files):
        pieces = parts(file, config.reading, config.unit_bytes)
        if pieces == [None]:
            group.append((file, None))
            size += file.size
        drawn = int.from_bytes(hashlib.blake2b(file.name.encode(), digest_size=4).digest(), "big") / 2**32
        full = size >= config.unit_bytes or (
            2 * size >= config.unit_bytes and drawn < 4 * file.size / config.unit_bytes
        )
        last = number + 1 == len(files) or files[number + 1].source != file.source
        if group and (full or last or pieces != [None]):
            groups.append(tuple(group))
            group, size = [], 0
        if pieces != [None]:
            groups += [((file, piece),) for piece in pieces]
    return groups


def _link(origin: Path, place: Path) -> bool:
    """Whether it is the same file under another name; a copy where the file system has no hard links."""
    try:
        os.link(origin, place)
    except OSError:
        shutil.copyfile(origin, place)
        return False
    return True


def _left_out(records: dict[str, Any]) -> str:
    """Where records went that became no training document."""
    causes = {"bad": "unreadable", "too_short": "shorter than data.minimum_length",
              "too_long": "longer than data.maximum_length", "duplicate": "duplicates",
              "held_out": "also in the validation sources"}  # fmt: skip
    counts = [f"{records[key]} {cause}" for key, cause in causes.items() if records.get(key)]
    return f"Of {records['read']} records {', '.join(counts) or 'all others are held out'}."


def _refuse_too_many_bad(records: dict[str, Any], files: int, limit: float) -> None:
    cut_off = records.get("cut_off", 0)
    if records["bad"] > limit * records["read"]:
        problem = f"{records['bad']} of {records['read']} records cannot be used"
    elif cut_off > limit * files:  # nobody knows how many records these lost
        problem = f"{cut_off} of {files} files cannot be read to their end"
    else:
        return
    raise DataError(
        f"data.sources: {problem}, more than data.bad_record_limit={limit:g} allows. "
        f"First: {'; '.join(records['first_bad'])}"
    )


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
    """Write the shard set; what it holds and what was refused is an artifact of the task run."""
    reference = tokenize(home, config, files, validation_files, tokenizer)
    _publish(reference.path)
    return shown(reference)


def _publish(shards: Path) -> None:
    """Show the set in Prefect: records read and refused, documents and tokens of each split."""
    from prefect.artifacts import create_markdown_artifact

    facts = describe(shards)
    records = dict(facts["records"])
    first_bad = records.pop("first_bad")
    rows = [f"| {key} | {value:,} |" for key, value in records.items()]
    rows += [f"| {split} {key} | {value:,} |" for split, of in facts["splits"].items() for key, value in of.items()]
    listed = "\n".join(["", f"In `{shards / 'quarantine.jsonl'}`, first:", "", *(f"    {bad}" for bad in first_bad)])
    create_markdown_artifact(
        "\n".join(["| what | count |", "|---|---|", *rows]) + (listed if first_bad else ""),
        key="shards",
        description=f"{records['read']:,} records read, {records['bad']:,} bad",
    )

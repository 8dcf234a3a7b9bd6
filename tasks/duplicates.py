"""Exact duplicates across the units of a shard set: which rows are not the first of their text, and units without them.

Memory is bounded: every unit's digests lie sorted on disk, so that one range of hash values after the other is
compared, each small enough to sort in memory.
"""

import functools
import operator
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tasks.home import Home
from tasks.units import DIGESTS, facts, load_digests
from trainer.data.shards import SPLITS, ShardWriter
from trainer.durable import complete_directory, exclusive, faults
from trainer.settings import fingerprint

_FORMAT_VERSION = 1
_TOGETHER = 2**21
"""Documents whose digests are compared in memory at once (32 bytes each)."""


def without_duplicates(home: Home, units: list[Path], shard_tokens: int) -> list[Path]:
    """The units, each without the documents that an earlier one, or itself further up, already holds.

    A unit that loses nothing is returned as it is.
    """
    repeated = {split: _repeated(units, split) for split in SPLITS}
    return [
        _thinned(home, unit, {split: repeated[split][number] for split in SPLITS}, shard_tokens)
        for number, unit in enumerate(units)
    ]


def _repeated(units: list[Path], split: str) -> list[np.ndarray]:
    """For every unit, the positions in its sorted digests of documents that come earlier elsewhere."""
    digests = [load_digests(unit, split) for unit in units]
    total = sum(len(part) for part in digests)
    ranges = max(1, -(-total // _TOGETHER))
    borders = [int(2**64 * number // ranges) for number in range(1, ranges)]
    # digests are uniform, so equal ranges of values hold about equally many
    cuts = [
        np.concatenate([[0], np.searchsorted(part["high"], np.array(borders, np.uint64)), [len(part)]]).astype(np.int64)
        for part in digests
    ]
    found: list[list[np.ndarray]] = [[] for _ in units]
    for number in range(ranges):
        slices = [part[cut[number] : cut[number + 1]] for part, cut in zip(digests, cuts, strict=True)]
        together = np.concatenate(slices) if slices else np.empty(0, DIGESTS)
        counts = [len(part) for part in slices]
        unit = np.repeat(np.arange(len(units)), counts)
        place = np.concatenate([np.arange(cut[number], cut[number + 1]) for cut in cuts]) if cuts else unit
        order = np.lexsort((together["row"], unit, together["low"], together["high"]))
        ranked = together[order]
        later = np.zeros(len(ranked), bool)
        later[1:] = (ranked["high"][1:] == ranked["high"][:-1]) & (ranked["low"][1:] == ranked["low"][:-1])
        dropped = order[later]
        for owner in np.unique(unit[dropped]):
            found[owner].append(place[dropped[unit[dropped] == owner]])
    return [np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64) for parts in found]


def _thinned(home: Home, unit: Path, repeated: dict[str, np.ndarray], shard_tokens: int) -> Path:
    """A copy of a unit's shards without these documents."""
    if not any(len(places) for places in repeated.values()):
        return unit
    dropped = {split: load_digests(unit, split)[places] for split, places in repeated.items()}
    lost = {
        split: np.sort(np.concatenate([np.arange(d["row"], d["row"] + d["rows"]) for d in found])).tolist()
        for split, found in dropped.items()
        if len(found)
    }
    name = fingerprint("thinned", _FORMAT_VERSION, unit=unit.name, dropped=lost)
    final = home.directory("units", name)
    with exclusive(home.lock("units", name)):
        if final.exists() and not faults(final, home.hashes()):
            return final
        content: dict[str, Any] = {}
        with complete_directory(final, content) as directory:
            whole = facts(unit)
            content.update(
                kind="unit",
                fingerprint=name,
                records={**whole["records"], "duplicate": _documents(dropped)},
                shards=[
                    shard
                    for split in SPLITS
                    for shard in _copied(unit, directory, split, lost.get(split, []), dropped[split], shard_tokens)
                ],
            )
            if (unit / "quarantine.jsonl").exists():
                (directory / "quarantine.jsonl").write_bytes((unit / "quarantine.jsonl").read_bytes())
    return final


def _documents(dropped: dict[str, np.ndarray]) -> int:
    """How many documents these are; one that is cut into two splits is one."""
    splits = (Counter(zip(found["high"].tolist(), found["low"].tolist(), strict=True)) for found in dropped.values())
    return sum(functools.reduce(operator.or_, splits).values())


def _copied(
    unit: Path, directory: Path, split: str, lost: list[int], dropped: np.ndarray, shard_tokens: int
) -> list[dict[str, Any]]:
    """Write a split's rows but the lost ones; returns what was written."""
    shards = [shard for shard in facts(unit)["shards"] if shard["split"] == split]
    if not shards:
        return []
    metadata = pa.ipc.open_file(str(unit / shards[0]["path"])).schema.metadata
    writer = ShardWriter(
        directory, split, 0, int(metadata[b"forgeline.vocabulary_size"]), metadata[b"forgeline.tokenizer"].decode(),
        shard_tokens,
    )  # fmt: skip
    # bytes of text are known by document and kept by shard: the sum over the unit is exact
    sizes = _bytes_by_row(unit, split)
    first = 0
    for shard in shards:
        batch = pa.ipc.open_file(pa.memory_map(str(unit / shard["path"]))).get_batch(0)
        keep = np.ones(batch.num_rows, bool)
        here = np.array([row - first for row in lost if first <= row < first + batch.num_rows], np.int64)
        keep[here] = False
        tokens = batch.column("tokens")
        lengths = np.diff(tokens.offsets.to_numpy())
        names = [name for name, kept in zip(batch.column("source").to_pylist(), keep, strict=True) if kept]
        size = int(sizes[first : first + batch.num_rows][keep].sum())
        if names:
            kept = np.repeat(keep, lengths)
            marks = batch.column("marks").values.to_numpy()[kept] if "marks" in batch.schema.names else None
            writer.add(tokens.values.to_numpy()[kept], lengths[keep], names, size, marks)
        first += batch.num_rows
    writer.flush()
    return writer.shards


def _bytes_by_row(unit: Path, split: str) -> np.ndarray:
    """UTF-8 bytes of each row's text; of a document in several rows, all of them at the first."""
    digests = load_digests(unit, split)
    sizes = np.zeros(int((digests["row"] + digests["rows"]).max()) if len(digests) else 0, np.int64)
    sizes[digests["row"]] = digests["bytes"]
    return sizes

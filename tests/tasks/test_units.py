"""Units of tokenization: the same bytes whoever writes them, nothing lost by a kill, nothing done twice."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from tasks.duplicates import without_duplicates
from tasks.home import Home
from tasks.reading import Reading, parts, read_documents
from tasks.records import BadRecord
from tasks.sources import SourceConfig, resolve
from tasks.stage import Reference
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer
from tests.conftest import DAMAGE
from trainer.data.shards import ShardSet
from trainer.durable import faults
from trainer.errors import DataError, WorkerDiedError

REPOSITORY = Path(__file__).parents[2]
SERVER = """
import os, sys
from pathlib import Path
from tasks.home import Home
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer

home, config = Home(Path(sys.argv[1])), DataConfig.model_validate_json(sys.argv[2])
for processes in sys.stdin:
    pid = os.fork()
    if not pid:
        chosen = config.model_copy(update={"processes": int(processes)})
        files = resolve(home, config.sources, "data.sources")
        tokenize(home, chosen, files, [], build_tokenizer(home, config.tokenizer, config.reading, files))
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def words(count: int, seed: int = 0) -> list[str]:
    """Documents that are all different."""
    chosen, parts_of_speech = random.Random(seed), ["é", "the", "of", "🦊", "and\r\n", "to"]
    return [f"{seed}-{n} " + " ".join(chosen.choices(parts_of_speech, k=12)) for n in range(count)]


def lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def data(*sources: Any, **settings: Any) -> DataConfig:
    common = {"tokenizer": "byte", "validation_fraction": 0.3, "unit_bytes": 4000, "processes": 1}
    return DataConfig.model_validate({"sources": [str(source) for source in sources], **common, **settings})


def shards_of(home: Home, config: DataConfig) -> Reference:
    files, validation = resolve(home, config.sources, "s"), resolve(home, config.validation_sources, "v")
    tokenizer = build_tokenizer(home, config.tokenizer, config.reading, files)
    return tokenize(home, config, files, validation, tokenizer)


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def texts(directory: Path, split: str | None = None) -> list[str]:
    """The documents of a byte-tokenized set, in order."""
    manifest = ShardSet.open(directory).manifest
    table = {ord(symbol): byte for byte, symbol in _symbols().items()}
    order = sorted(table)
    found = []
    for shard in manifest["shards"]:
        if split in (None, shard["split"]):
            for row in pa.ipc.open_file(str(directory / shard["path"])).read_all().to_pylist():
                found.append(bytes(table[order[token]] for token in row["tokens"] if token < 256).decode())
    return found


def _symbols() -> dict[int, str]:
    from tasks.encoding import _byte_symbols

    return _byte_symbols()


# --- what a unit is ------------------------------------------------------------------------------


def write_separated(path: Path, chosen: list[str]) -> None:
    path.write_bytes("<|sep|>".join(chosen).encode())


def write_parquet(path: Path, chosen: list[str]) -> None:
    pyarrow.parquet.write_table(pa.table({"text": chosen, "id": range(len(chosen))}), path, row_group_size=7)


def write_arrow(path: Path, chosen: list[str]) -> None:
    table = pa.table({"text": chosen, "id": range(len(chosen))})
    writer = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    with writer(str(path), table.schema) as opened:
        opened.write_table(table, max_chunksize=7)


TABLES = [("a.parquet", write_parquet), ("a.arrow", write_arrow), ("stream.arrow", write_arrow)]


@pytest.mark.parametrize(("name", "write"), [("a.jsonl", lines), ("a.txt", write_separated), *TABLES], ids=str)
@pytest.mark.parametrize("size", [1, 50, 777, 4096, 10**6])
def test_the_parts_of_a_file_together_are_the_file(work, tmp_path, name, write, size):
    write(tmp_path / name, words(60))
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / name))], "s")
    reading = Reading(separator="<|sep|>")
    cut = parts(file, reading, size)
    found = [item for part in cut for item in read_documents(file, reading, part)]
    assert [item.text for item in found] == words(60)
    assert len(cut) > 1 or size >= 4096
    assert sum(part.size for part in cut if part) == pytest.approx(file.size, rel=0.3) or cut == [None]


def test_a_separator_that_overlaps_itself_keeps_a_file_whole(work, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\n\ntwo\n\n\n\nthree")
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / "a.txt"))], "s")
    reading = Reading(separator="\n\n")
    assert parts(file, reading, 3) == [None]
    assert [item.text for item in read_documents(file, reading)] == ["one", "\ntwo", "three"]


def test_a_record_longer_than_the_limit_is_one_bad_record(work, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.streams.RECORD_BYTES", 3 * 2**20)
    path = lines(tmp_path / "a.jsonl", ["before", "x" * 5 * 2**20, "after"])
    (file,) = resolve(work, [SourceConfig(path=str(path))], "s")
    before, bad, after = read_documents(file, Reading())
    assert (before.text, after.text) == ("before", "after")
    assert isinstance(bad, BadRecord)
    assert (bad.line, "longer than" in bad.reason) == (2, True)


def test_a_text_too_long_to_be_encoded_at_once_is_cut_where_the_ids_are_the_same(work, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.units._PIECE_CHARACTERS", 70_000)
    monkeypatch.setattr("tasks.reading._PIECE_CHARACTERS", 100_000)
    monkeypatch.setattr("tasks.streams.BLOCK_BYTES", 9_999)
    text = "".join(f"Line {n} of some prose, é 🦊\n\n" for n in range(20_000))
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "a.txt").write_text(text)
    lines(tmp_path / "b.jsonl", words(40))
    tokenizer = {"type": "bpe", "vocabulary_size": 300}
    config = data(tmp_path / "long", tmp_path / "b.jsonl", tokenizer=tokenizer, validation_split="position")
    built = shards_of(work, config).path
    files = resolve(work, config.sources, "s")
    reference = build_tokenizer(work, config.tokenizer, config.reading, files)
    from tasks.encoding import Tokenization

    tokenization = Tokenization(reference.path, fast=False)
    manifest = ShardSet.open(built).manifest
    rows = [
        row
        for shard in manifest["shards"]
        if shard["source"] == 0 and shard["split"] == "train"
        for row in pa.ipc.open_file(str(built / shard["path"])).read_all().to_pylist()
    ]
    cut = int(len(text) * 0.7)
    assert [row["source"] for row in rows] == ["a.txt", *(f"a.txt#{n}" for n in range(1, len(rows)))]
    assert len(rows) > 3
    flat = [token for row in rows for token in row["tokens"]]
    assert flat == [*tokenization.encode([text[:cut]])[0].tolist(), tokenization.end_id]


# --- the same bytes ------------------------------------------------------------------------------


def corpus(tmp_path: Path) -> DataConfig:
    for number in range(12):
        lines(tmp_path / "text" / f"{number:02d}.jsonl", words(20 + number * 3, number))
    lines(tmp_path / "big.jsonl", words(200, 99))
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n' + json.dumps({"text": "good"}) + "\n")
    return data(tmp_path / "text", tmp_path / "big.jsonl", tmp_path / "bad.jsonl", validation_split="position")


def test_one_process_and_many_write_the_same_bytes(work, tmp_path):
    config = corpus(tmp_path)
    expected = content(shards_of(work, config).path)
    assert len(expected) > 10
    (tmp_path / "other").mkdir()
    assert content(shards_of(Home(tmp_path / "other"), config.model_copy(update={"processes": 3})).path) == expected


def test_whatever_moments_it_is_killed_at_the_finished_set_has_the_same_bytes(work, tmp_path):
    config = corpus(tmp_path)
    expected = content(shards_of(work, config).path)
    (tmp_path / "other").mkdir()
    other = Home(tmp_path / "other")
    draw = random.Random(7)
    kills = 0
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(other.path), config.model_dump_json()],
        cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for attempt in range(60):
            server.stdin.write(f"{1 + (attempt % 4 == 3)}\n")
            server.stdin.flush()
            pid = int(server.stdout.readline())
            time.sleep(draw.uniform(0, 0.15 if attempt % 4 < 3 else 0.6))
            with contextlib.suppress(ProcessLookupError):  # it may be done by now
                os.kill(pid, signal.SIGKILL)
            code = int(server.stdout.readline())
            kills += code == -signal.SIGKILL
            if kills >= 20 and list((other.path / "units").glob("[!.]*")):
                break
            for path in list((other.path / "shards").glob("[!.]*")) if (other.path / "shards").exists() else []:
                for unit in (other.path / "units").glob("[!.]*"):
                    unit.rename(unit.with_name(f".{unit.name}.gone"))
                path.rename(path.with_name(f".{path.name}.gone"))
    finally:
        server.kill()
        server.communicate()
    assert kills >= 20
    built = shards_of(other, config)
    assert content(built.path) == expected
    assert faults(built.path) == []


def test_a_process_that_is_killed_is_a_failure_that_can_pass_and_its_finished_units_stay(work, tmp_path, monkeypatch):
    config = corpus(tmp_path).model_copy(update={"processes": 2})
    monkeypatch.setattr("tasks.units.sys.executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(WorkerDiedError, match="killed, or out of memory"):
        shards_of(work, config)
    monkeypatch.undo()
    assert faults(shards_of(work, config).path) == []


def test_an_error_in_another_process_is_the_same_error_here(work, tmp_path):
    config = corpus(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"body": 1}\n')
    with pytest.raises(DataError, match=r"no record has the field 'text' \(they have: body\)"):
        shards_of(work, config.model_copy(update={"processes": 2}))


# --- damage and growth ---------------------------------------------------------------------------


def inodes(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in directory.rglob("*.arrow") if "/." not in str(path)}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_costs_only_its_own_unit(work, tmp_path, kind):
    config = corpus(tmp_path)
    built = shards_of(work, config)
    expected, before = content(built.path), inodes(work.path / "units")
    victim = sorted((built.path / "train").glob("source-001-*"))[1]
    DAMAGE[kind](victim)
    assert any(str(victim) in fault for fault in faults(built.path))
    again = shards_of(work, config)
    assert not again.cached
    assert content(again.path) == expected
    after = inodes(work.path / "units")
    rebuilt = {Path(path).parents[1] for path in before if after[path] != before[path]}
    assert len(rebuilt) == (0 if kind == "gone" else 1)


def test_a_grown_source_reads_only_its_new_files_and_keeps_the_old_shards(work, tmp_path, monkeypatch):
    for name in ("b", "d", "f"):
        lines(tmp_path / "text" / f"{name}.jsonl", words(60, ord(name)))
    config = data(tmp_path / "text")
    old = shards_of(work, config)
    held = {path.stat().st_ino for path in old.path.rglob("*.arrow")}
    for name in ("a", "c", "z"):
        lines(tmp_path / "text" / f"{name}.jsonl", words(60, ord(name)))
    read = []
    monkeypatch.setattr(
        "tasks.units.read_documents", lambda f, *a, **k: read.append(f.name) or read_documents(f, *a, **k)
    )
    new = shards_of(work, config)
    assert sorted(set(read)) == ["a.jsonl", "c.jsonl", "z.jsonl"]
    assert held <= {path.stat().st_ino for path in new.path.rglob("*.arrow")}
    assert sorted(texts(new.path)) == sorted(text for name in "abcdfz" for text in words(60, ord(name)))
    assert shards_of(work, config).cached
    expected = content(new.path)
    DAMAGE["flipped"](next(iter(new.path.rglob("*.arrow"))))
    assert content(shards_of(work, config).path) == expected


@pytest.mark.parametrize(
    "change", [lambda path: path.write_text('{"text": "b"}\n'), Path.unlink], ids=["other", "gone"]
)
def test_a_file_that_changes_after_planning_makes_no_unit(work, tmp_path, change):
    config = data(lines(tmp_path / "a.jsonl", words(20)), bad_record_limit=1)
    files = resolve(work, config.sources, "s")
    tokenizer = build_tokenizer(work, config.tokenizer, config.reading, files)
    change(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a.jsonl: it changed while it was read. Run again"):
        tokenize(work, config, files, [], tokenizer)
    assert list((work.path / "units").iterdir()) == []


def test_a_changed_file_makes_a_new_set_and_leaves_the_other_units(work, tmp_path):
    config = corpus(tmp_path)
    shards_of(work, config)
    before = set(inodes(work.path / "units"))
    lines(tmp_path / "text" / "05.jsonl", words(77, 1234))
    shards_of(work, config)
    assert len(set(inodes(work.path / "units")) - before) < len(before) / 2


# --- filters -------------------------------------------------------------------------------------


def test_only_the_first_of_equal_documents_stays_across_files_and_sources(work, tmp_path):
    first, second = words(80, 1), words(80, 2)
    lines(tmp_path / "a.jsonl", [*first, first[3]])
    lines(tmp_path / "b.jsonl", [*second[:40], *first[:30], *second])
    config = data(tmp_path / "a.jsonl", tmp_path / "b.jsonl", deduplicate=True, unit_bytes=2000)
    built = shards_of(work, config)
    for split in ("train", "validation"):
        found = texts(built.path, split)
        assert len(found) == len(set(found))
    assert sorted(texts(built.path)) == sorted([*first, *second])
    manifest = ShardSet.open(built.path).manifest
    assert manifest["records"]["duplicate"] == 71
    assert sum(shard["text_bytes"] for shard in manifest["shards"]) == sum(len(t.encode()) for t in [*first, *second])
    (tmp_path / "other").mkdir()
    other = shards_of(Home(tmp_path / "other"), config.model_copy(update={"processes": 2}))
    assert content(other.path) == content(built.path)


def test_a_document_that_an_older_shard_holds_stays_there_and_the_newcomer_is_the_duplicate(work, tmp_path):
    lines(tmp_path / "text" / "m.jsonl", words(80, 1))
    config = data(tmp_path / "text", deduplicate=True)
    old = shards_of(work, config)
    held = {path.stat().st_ino for path in old.path.rglob("*.arrow")}
    lines(tmp_path / "text" / "a.jsonl", [*words(80, 1)[:50], *words(80, 2)])
    new = shards_of(work, config)
    assert held <= {path.stat().st_ino for path in new.path.rglob("*.arrow")}
    assert sorted(texts(new.path)) == sorted([*words(80, 1), *words(80, 2)])


def test_duplicates_are_found_however_few_digests_fit_in_memory(work, tmp_path, monkeypatch):
    lines(tmp_path / "a.jsonl", words(150, 1) + words(70, 1) + words(90, 2))
    config = data(tmp_path / "a.jsonl", unit_bytes=3000, validation_split="position")
    shards_of(work, config)
    units = sorted(path for path in (work.path / "units").glob("[!.]*"))
    whole = without_duplicates(work, units, 10**6)
    monkeypatch.setattr("tasks.duplicates._TOGETHER", 16)
    assert without_duplicates(work, units, 10**6) == whole
    assert whole != units


def test_documents_outside_the_lengths_are_left_out_and_counted(work, tmp_path):
    lines(tmp_path / "a.jsonl", [*words(30), "é" * 9, "é" * 10, "x" * 200, "x" * 201])
    built = shards_of(work, data(tmp_path / "a.jsonl", minimum_length=10, maximum_length=200))
    assert sorted(texts(built.path)) == sorted([*words(30), "é" * 10, "x" * 200])
    records = ShardSet.open(built.path).manifest["records"]
    assert (records["read"], records["too_short"], records["too_long"], records["bad"]) == (34, 1, 1, 0)


def test_a_template_makes_one_text_of_several_fields(work, tmp_path):
    rows = [{"title": f"T{n}", "body": f"B{n} 🦊", "id": n} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    config = data(tmp_path / "a.jsonl", tmp_path / "b.parquet", text_template="{title}\n\n{{{body}}}")
    built = shards_of(work, config)
    assert sorted(texts(built.path)) == sorted(2 * [f"T{n}\n\n{{B{n} 🦊}}" for n in range(40)])


def test_a_record_whose_fields_are_all_empty_is_a_bad_record(work, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "", "b": ""}\n{"a": "x", "b": ""}\n')
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / "a.jsonl"))], "s")
    bad, good = read_documents(file, Reading(template="{a}{b}"))
    assert (bad.reason, good.text) == ("all its fields are empty", "x")


@pytest.mark.parametrize("template", ["no field", "{}", "{a!r}", "{a:>3}", "{a"])
def test_a_template_that_is_none_is_refused(template):
    with pytest.raises(ValueError, match=r"text_template|expected '}'"):
        data("x", text_template=template)


def test_a_maximum_below_the_minimum_is_refused():
    with pytest.raises(ValueError, match="maximum_length: 3 is less than minimum_length=4"):
        data("x", minimum_length=4, maximum_length=3)


# --- memory --------------------------------------------------------------------------------------

MEMORY = """
import resource, sys
from pathlib import Path
from tasks.home import Home
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer

home, config = Home(Path(sys.argv[1])), DataConfig.model_validate_json(sys.argv[2])
files = resolve(home, config.sources, "data.sources")
tokenizer = build_tokenizer(home, config.tokenizer, config.reading, files)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenize(home, config, files, [], tokenizer)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["one-document.txt", "lines.jsonl"])
def test_memory_does_not_grow_with_the_size_of_a_file_or_document(work, tmp_path, name):
    kinds = [json.dumps({"text": f"{n} is a line of text that is repeated. " * 25}) + "\n" for n in range(100)]
    with open(tmp_path / name, "w") as file:
        for _ in range(2100):
            file.write("".join(kinds))
    lines(tmp_path / "small.jsonl", words(40))
    config = data(tmp_path / name, tmp_path / "small.jsonl", unit_bytes=32 * 2**20, bad_record_limit=1)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(work.path), config.model_dump_json()],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).stat().st_size > 200e6
    assert int(done.stdout) < 500 * 1024, "KiB more than before, for 220 MB of text"

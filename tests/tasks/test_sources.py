"""Sources: every kind of input is read as it is, and what cannot be read is named and never becomes data."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.home import FileHashes, Home
from tasks.reading import Document, Reading, read_documents
from tasks.records import BadRecord, _json_list
from tasks.sources import SourceConfig, SourceFile, resolve
from trainer.errors import DataError

REPOSITORY = Path(__file__).parents[2]
TEXTS = ["first\r\nwith CRLF", "zweites: Zoë 🦊", "third\x00with NUL", "x" * 200_000]


def files(work: Home, *sources: Any) -> list[SourceFile]:
    return resolve(work, [SourceConfig.model_validate(source) for source in sources], "data.sources")


def read(work: Home, source: Any, field: str = "text") -> list[Document | BadRecord]:
    return [item for file in files(work, source) for item in read_documents(file, Reading(field))]


def texts(work: Home, source: Any, field: str = "text") -> list[str]:
    found = read(work, source, field)
    assert not [item for item in found if isinstance(item, BadRecord)]
    return [item.text for item in found]


def bad(work: Home, source: Any) -> list[tuple[int | None, str]]:
    return [(item.line, item.reason) for item in read(work, source) if isinstance(item, BadRecord)]


def make(path: Path, content: str | bytes = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def json_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


# --- which files ---------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt", "sub/[odd]*.txt"):
        make(tmp_path / "tree" / name, name)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.txt", ["a.txt"]),
        ("", ["a.txt", "b.md", "sub/[odd]*.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("sub/", ["[odd]*.txt", "c.txt", "deep/d.txt"]),
        ("*.txt", ["a.txt"]),
        ("**/*.txt", ["a.txt", "sub/[odd]*.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("**/**/*.txt", ["a.txt", "sub/[odd]*.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("sub/**/d.*", ["deep/d.txt"]),
        ("?.[mt]*", ["a.txt", "b.md"]),
        ("sub/[odd]*.txt", ["[odd]*.txt"]),
    ],
)
def test_files_directories_and_globs_are_found_sorted_and_each_once(work, tree, pattern, names):
    found = files(work, f"{tree}/{pattern}")
    assert [file.name for file in found] == names
    assert all(file.size == file.path.stat().st_size for file in found)


def test_a_relative_path_counts_from_where_the_user_stands(work, tree, monkeypatch):
    monkeypatch.chdir(tree)
    found = files(work, "sub/c.txt")
    assert found[0].path == tree / "sub" / "c.txt"


def test_excluded_paths_are_left_out(work, tree):
    source = {"path": str(tree), "exclude": ["*/deep/*", "*.md", "*odd*"]}
    assert [file.name for file in files(work, source)] == ["a.txt", "sub/c.txt"]


def test_variables_are_replaced_and_the_standard_library_is_one(work, tree, monkeypatch):
    monkeypatch.setenv("CORPUS", str(tree))
    assert len(files(work, "$CORPUS/a.txt", "${CORPUS}/sub/*.txt")) == 3
    library = files(work, "$PYTHON_STDLIB/json/*.py")
    assert {file.name for file in library} >= {"decoder.py", "encoder.py"}
    assert library[0].path.parent == Path(sysconfig.get_path("stdlib")) / "json"


@pytest.mark.parametrize("path", ["missing.txt", "none/*.txt", "$UNSET_VARIABLE/a.txt", "sub/none", "*.rst"])
def test_a_path_where_nothing_is_names_its_key_and_the_place_looked_at(work, tree, path):
    with pytest.raises(DataError, match=r"data\.sources\[1\]: nothing is at .*looked at /"):
        files(work, str(tree / "a.txt"), f"{tree}/{path}")


def test_an_empty_directory_and_one_that_is_all_excluded_are_refused(work, tmp_path, tree):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no file"):
        files(work, str(tmp_path / "empty"))
    with pytest.raises(DataError, match="holds no file that is not excluded"):
        files(work, {"path": str(tree), "exclude": ["*"]})


def test_a_file_name_that_is_not_utf_8_is_refused_by_name(work, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    with pytest.raises(DataError, match=r"caf\\xe9.txt.*not UTF-8. Rename or exclude it"):
        files(work, str(tmp_path / "odd"))


def test_a_moved_directory_has_the_same_identity_and_a_changed_file_another(work, tree, tmp_path):
    before = [file.identity() for file in files(work, str(tree))]
    tree.rename(tmp_path / "moved")
    assert [file.identity() for file in files(work, str(tmp_path / "moved"))] == before
    make(tmp_path / "moved" / "a.txt", "A.TXT")
    after = [file.identity() for file in files(work, str(tmp_path / "moved"))]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True, True, True]


# --- what is in them -----------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict]) -> None:
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def write_arrow(path: Path, rows: list[dict], make_writer: Callable = pa.ipc.new_file) -> None:
    table = pa.Table.from_pylist(rows)
    with make_writer(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, list[dict]], Any]] = {
    "lines.jsonl": lambda path, rows: path.write_bytes(json_lines(rows)),
    "lines.ndjson": lambda path, rows: path.write_bytes(json_lines(rows)),
    "LINES.JSONL": lambda path, rows: path.write_bytes(json_lines(rows)),
    "lines.json": lambda path, rows: path.write_bytes(json_lines(rows)),
    "with-mark.jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf" + json_lines(rows)),
    "blank-lines.jsonl": lambda path, rows: path.write_bytes(b"\n\n" + json_lines(rows).replace(b"\n", b"\r\n\n")),
    "list.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "indented.json": lambda path, rows: path.write_text("\n" + json.dumps(rows, indent=2)),
    "list-with-mark.json": lambda path, rows: path.write_text("\ufeff" + json.dumps(rows), encoding="utf-8"),
    "table.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "stream.arrow": partial(write_arrow, make_writer=pa.ipc.new_stream),
    "lines.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(json_lines(rows))),
    "lines.jsonl.zst": lambda path, rows: path.write_bytes(pa.compress(json_lines(rows), "zstd", asbytes=True)),
    "lines.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(json_lines(rows))),
    "lines.jsonl.xz": lambda path, rows: path.write_bytes(lzma.compress(json_lines(rows))),
    "list.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "list.json.zst": lambda path, rows: path.write_bytes(pa.compress(json.dumps(rows).encode(), "zstd", asbytes=True)),
    "table.csv.zst": lambda path, rows: (
        write_csv(path, rows),
        path.write_bytes(pa.compress(path.read_bytes(), "zstd", asbytes=True)),
    ),
    "Table.csv.GZ": lambda path, rows: (write_csv(path, rows), path.write_bytes(gzip.compress(path.read_bytes()))),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_texts_byte_for_byte_and_names_their_place(work, tmp_path, name):
    WRITERS[name](tmp_path / name, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    assert texts(work, str(tmp_path / name)) == TEXTS
    named = [item.name for item in read(work, str(tmp_path / name))]
    assert len(set(named)) == len(TEXTS)
    assert all(item.startswith(f"{name}:") for item in named)


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_names_the_fields_there_are_where_none_has_the_text(work, tmp_path, name):
    WRITERS[name](tmp_path / name, [{"content": "a", "url": "b"}] * 3)
    with pytest.raises(DataError, match=r"no record has the field 'text' \(they have: content, url\).*data.text_field"):
        read(work, str(tmp_path / name))


def test_a_hub_data_set_is_streamed_by_datasets(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(json_lines([{"text": text, "id": n} for n, text in enumerate(TEXTS)]))
    (tmp_path / "test.jsonl").write_bytes(json_lines([{"text": "held out"}, {"text": None}]))
    for split, expected in (("train", TEXTS), ("test", ["held out"])):
        # `datasets` reads a directory as it reads a repository of the hub
        source = SourceConfig(dataset=str(tmp_path), split=split)
        found = list(read_documents(SourceFile(0, "some/set", None, "", 0, source), Reading()))
        assert [item.text for item in found if isinstance(item, Document)] == expected
        assert {item.name for item in found if isinstance(item, Document)} <= {f"set:{n}" for n in range(1, 5)}
    assert found[-1] == BadRecord("some/set", 2, "field 'text' is not a text")


def test_a_hub_data_set_that_cannot_be_reached_is_refused_by_key(work):
    with pytest.raises(
        DataError, match=r"data.sources\[0\]: hub data set 'no/such' cannot be reached .*Check its name"
    ):
        files(work, {"dataset": "no/such", "split": "train"})


def test_a_data_set_saved_by_datasets_is_read(work, tmp_path):
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    assert texts(work, f"{tmp_path}/saved/*.arrow") == TEXTS


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".zst", lambda content: pa.compress(content, "zstd", asbytes=True)),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "readme", "notes.json.txt", "x.csv.md", "code.py"])
def test_any_other_file_is_one_document_whole_and_unchanged(work, tmp_path, suffix, pack, name):
    text = "".join(TEXTS)
    make(tmp_path / (name + suffix), pack(text.encode()))
    assert read(work, str(tmp_path / (name + suffix))) == [Document(name + suffix, text)]


def test_a_byte_order_mark_is_no_part_of_the_text(work, tmp_path):
    assert texts(work, make(tmp_path / "a.txt", "\ufefftext")) == ["text"]


def test_the_field_is_that_of_the_source_before_that_of_the_data(work, tmp_path):
    path = make(tmp_path / "a.jsonl", json_lines([{"body": "b", "text": "t", "other": "o"}]))
    assert texts(work, path) == ["t"]
    assert texts(work, path, "other") == ["o"]
    assert texts(work, {"path": path, "text_field": "body"}, "other") == ["b"]


# --- what cannot be read -------------------------------------------------------------------------

DAMAGED: dict[str, tuple[bytes, str]] = {
    "not-utf-8.txt": (b"abc\xff", "not UTF-8 at byte 3"),
    "utf-16.txt": ("text".encode("utf-16"), "not UTF-8 at byte 0"),
    "empty.txt": (b"", "empty"),
    "mark-only.txt": (b"\xef\xbb\xbf", "empty"),
    "cut.txt.gz": (gzip.compress(os.urandom(2000))[:-500], "cannot be read"),
    "cut.txt.zst": (pa.compress(os.urandom(2000), "zstd", asbytes=True)[:-500], "cannot be read"),
    "cut.txt.xz": (lzma.compress(os.urandom(2000))[:-500], "cannot be read"),
    "cut.txt.bz2": (bz2.compress(os.urandom(2000))[:-500], "cannot be read"),
    "none.txt.gz": (b"no gzip at all", "cannot be read"),
    "none.txt.zst": (b"no zstandard at all", "cannot be read"),
    "none.txt.xz": (b"no xz at all", "cannot be read"),
    "none.txt.bz2": (b"no bzip2 at all", "cannot be read"),
    "none.txt.zip": (b"no zip at all", "cannot be read"),
    "cut.jsonl.gz": (gzip.compress(os.urandom(2000))[:20], "cannot be read further"),
    "none.jsonl.xz": (b"no xz at all", "cannot be read further"),
    "none.parquet": (b"no parquet at all", "cannot be read further"),
    "empty.parquet": (b"", "cannot be read further"),
    "none.arrow": (b"no arrow at all", "cannot be read further"),
    "empty.arrow": (b"", "cannot be read further"),
    "cut.json": (b'[{"te', "cannot be read further: value 1 of the list is not JSON"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_bad_record_with_its_reason(work, tmp_path, name):
    content, reason = DAMAGED[name]
    path = make(tmp_path / name, content)
    (found,) = read(work, path)
    assert isinstance(found, BadRecord)
    assert found.file == path
    assert found.reason.startswith(reason)


BAD_LINES: dict[bytes, str] = {
    b'{"text": "a"': "not JSON",
    b'{"text": "a\xff"}': "not JSON",
    b"text": "not JSON",
    b"[" * 100_000: "not JSON",
    b'{"no": 1}': "no field 'text'",
    b'{"text": null}': "field 'text' is not a text",
    b'{"text": 5}': "field 'text' is not a text",
    b'{"text": ["a"]}': "field 'text' is not a text",
    b'{"text": ""}': "field 'text' is empty",
    b'{"text": "a\\ud800"}': "field 'text' is not valid Unicode at character 1",
    b"5": "not an object with fields",
    b"null": "not an object with fields",
    b'"text"': "not an object with fields",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:20].decode("ascii", "replace"))
def test_a_bad_line_is_one_bad_record_and_its_neighbours_are_read(work, tmp_path, line):
    path = make(tmp_path / "a.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, found, after = read(work, path)
    assert (before.text, after.text) == ("before", "after")
    assert found.line == 2
    assert found.reason.startswith(BAD_LINES[line])


def test_a_bad_row_of_a_table_is_one_bad_record_and_its_neighbours_are_read(work, tmp_path):
    path = make(tmp_path / "a.csv", b"id,text\n1,before\n2,a\xff\n3\n4,a,b,c\n5,\n6,after\n")
    assert bad(work, path) == [
        (3, "field 'text' is not valid Unicode at character 1"),
        (4, "field 'text' is not a text"),
        (6, "field 'text' is empty"),
    ]
    assert [item.text for item in read(work, path) if isinstance(item, Document)] == ["before", "a", "after"]


def test_rows_longer_than_their_head_do_not_hide_which_fields_there_are(work, tmp_path):
    with pytest.raises(DataError, match="they have: None, a, b"):
        read(work, make(tmp_path / "a.csv", "a,b\n1,2,3\n"))


def test_what_came_before_the_damage_is_read(work, tmp_path):
    whole = gzip.compress(json_lines([{"text": "x" * 1000 + str(n)} for n in range(3000)]), compresslevel=0)
    found = read(work, make(tmp_path / "a.jsonl.gz", whole[: len(whole) // 2]))
    assert len(found) > 1000
    assert [item.reason for item in found if isinstance(item, BadRecord)] == [found[-1].reason]


@pytest.mark.parametrize("end", [b"", b",", b', {"te', b', {"text": x}]', b'; {"text": "c"}]', b",]", b"] x"])
def test_of_a_list_that_does_not_end_well_what_came_before_is_read(work, tmp_path, end):
    *good, last = read(work, make(tmp_path / "a.json", b'[{"text": "a"}, {"text": "b"}' + end))
    assert [item.text for item in good] == ["a", "b"]
    assert last.reason.startswith("cannot be read further: ")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=6), st.integers(1, 40), st.sampled_from([None, 1]))
def test_a_list_is_read_in_pieces_of_any_size_as_json_reads_it_whole(values, size, indent):
    content = io.BytesIO(json.dumps(values, indent=indent, ensure_ascii=False).encode())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tasks.streams.BLOCK_BYTES", size)
        assert list(_json_list(content)) == values


MEMORY = """
import re, sys
from pathlib import Path
from tasks.home import Home
from tasks.reading import Reading, read_documents
from tasks.sources import SourceConfig, resolve

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

(file,) = resolve(Home(Path(sys.argv[1])), [SourceConfig(path=sys.argv[2])], "s")
peak = before = None
for number, item in enumerate(read_documents(file, Reading()), 1):
    if number % 1000 == 1:
        peak = max(peak or 0, anonymous())
        before = before or peak
print(number, type(item).__name__, max(peak, anonymous()) - before)
"""
ROWS = 50_000
LONG = "A line of text that is repeated. " * 64  # 2 kB


def write_repeated(path: Path, before: bytes, row: bytes, after: bytes) -> None:
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else open(path, "wb") as file:
        file.write(before)
        for _ in range(0, ROWS, 1000):
            file.write(row * 1000)
        file.write(after)


def write_one_batch(path: Path) -> None:
    table = pa.table({"text": [LONG] * ROWS + ["end"]})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def write_one_row_group(path: Path) -> None:
    table = pa.table({"text": [LONG + str(n) for n in range(ROWS)] + ["end"]})
    pyarrow.parquet.write_table(table, path, row_group_size=2**30, compression=None, use_dictionary=False)


BIG: dict[str, Callable[[Path], Any]] = {
    "a.json": lambda path: write_repeated(path, b"[", json_lines([{"text": LONG}])[:-1] + b",", b'{"text": "end"}]'),
    "a.csv": lambda path: write_repeated(path, b"id,text\n", f"1,{LONG}\n".encode(), b"1,end"),
    "a.jsonl.gz": lambda path: write_repeated(path, b"", json_lines([{"text": LONG}]), b'{"text": "end"}'),
    "a.parquet": write_one_row_group,
    "a.arrow": lambda path: write_one_batch(path),
}


@pytest.mark.parametrize("name", BIG)
def test_what_is_read_as_a_whole_is_not_in_memory_as_a_whole(work, tmp_path, name):
    BIG[name](tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(work.path), str(tmp_path / name)],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    count, kind, kibibytes = done.stdout.split()
    assert (int(count), kind) == (ROWS + 1, "Document")
    assert int(kibibytes) < 25 * 1024, "more than after the first document, for 100 MB of text"


def test_a_quote_that_never_ends_does_not_take_the_rest_of_the_file_into_memory(work, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.records.RECORD_BYTES", 1000)
    first, last = read(work, make(tmp_path / "a.csv", 'text\nfirst\n"' + "x\n" * 5000))
    assert (first.text, last.reason) == ("first", "cannot be read further: field larger than field limit (1000)")


def test_the_first_file_of_a_zip_is_read(work, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.jsonl.zip", "w") as archive:
        archive.writestr("a.jsonl", json_lines([{"text": "zipped"}]))
    assert texts(work, str(tmp_path / "a.jsonl.zip")) == ["zipped"]


# --- remembered hashes ---------------------------------------------------------------------------


def test_an_unchanged_file_is_not_read_again_and_a_changed_one_is(work, tmp_path):
    path = Path(make(tmp_path / "a.txt", "one"))
    before = work.hashes()(path)
    status = path.stat()
    path.write_text("two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert work.hashes()(path) == before, "same size, time and inode: it was not read"
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert work.hashes()(path) != before


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_memory_of_hashes_stops_nobody(tmp_path, content):
    (tmp_path / "hashes").write_bytes(content)
    path = Path(make(tmp_path / "a.txt", "one"))
    remembered = FileHashes(tmp_path / "hashes")
    assert remembered(path) == remembered(path) == FileHashes(tmp_path / "hashes")(path)


def test_a_memory_of_hashes_that_cannot_be_written_stops_nobody(tmp_path):
    path = Path(make(tmp_path / "a.txt", "one"))
    assert len(FileHashes(tmp_path / "nowhere" / "hashes")(path)) == 64


def test_links_in_a_circle_give_every_file_once(work, tmp_path):
    make(tmp_path / "text" / "deep" / "zoo.txt", "one")
    (tmp_path / "text" / "deep" / "a-loop").symlink_to(".")
    (tmp_path / "text" / "around").symlink_to("deep")
    assert [file.name for file in files(work, str(tmp_path / "text"))] == ["around/zoo.txt"]


@pytest.mark.parametrize("name", ["two.zip", "a.tar", "a.tar.gz", "a.tgz"])
def test_an_archive_of_files_is_refused_and_never_read_in_part(work, tmp_path, name):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    if name == "two.zip":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(tmp_path / "a.txt", "a.txt")
            archive.write(tmp_path / "b.txt", "b.txt")
    else:
        with tarfile.open(tmp_path / name, "w:gz" if name != "a.tar" else "w") as archive:
            archive.add(tmp_path / "a.txt", "a.txt")
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / name))], "s")
    (bad,) = read_documents(file, Reading())
    assert isinstance(bad, BadRecord) and "unpack it" in bad.reason


@pytest.mark.parametrize("offset", [0x7F000000, -5])
def test_an_arrow_file_whose_lengths_lead_out_of_it_is_a_bad_record(work, tmp_path, offset):
    texts = pa.array([f"text {number}" for number in range(900)])
    offsets = np.frombuffer(texts.buffers()[1], np.int32).copy()
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch([texts], ["text"]))
    content = (tmp_path / "a.arrow").read_bytes()
    place = content.index(offsets[400:420].tobytes())
    (tmp_path / "a.arrow").write_bytes(content[:place] + np.int32(offset).tobytes() + content[place + 4 :])
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / "a.arrow"))], "s")
    *_, last = read_documents(file, Reading())
    assert isinstance(last, BadRecord) and last.cuts_off


def test_fields_of_a_template_that_are_all_empty_are_no_document(work, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "", "b": ""}\n{"a": "x", "b": ""}\n')
    (file,) = resolve(work, [SourceConfig(path=str(tmp_path / "a.jsonl"))], "s")
    empty, kept = read_documents(file, Reading(template="{a}: {b}"))
    assert (empty.reason, kept.text) == ("all its fields are empty", "x: ")

"""Tokenizers and shard sets: exact text in, exact text out, each split clean, each set built once and whole."""

import gzip
import json
import logging
import os
import random
import shutil
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterTaskRunId
from transformers import AutoTokenizer

from tasks import tokenizer as tokenizer_stage
from tasks.encoding import CANARY
from tasks.home import Home
from tasks.reading import Reading, text_digest, text_share
from tasks.sources import SourceFile, resolve
from tasks.stage import Reference
from tasks.tokenize import DataConfig, tokenize, tokenize_task
from tasks.tokenizer import END_OF_TEXT, TokenizerConfig, build_tokenizer
from tests.conftest import DAMAGE, python_process
from trainer.data.shards import ShardSet
from trainer.durable import faults
from trainer.errors import ConfigError, DataError

REPOSITORY = Path(__file__).parents[2]
PLAY = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak! $3 & 'tis-3\n" * 40
AWKWARD = [
    CANARY,
    END_OF_TEXT,
    f"a{END_OF_TEXT}{END_OF_TEXT} b <|endoftext|",
    "\x00\x01\r\n\t  \u00a0\u2028 trailing ",
    "e\u0301 é ﬁ Å 🏳️‍🌈 मनीष 中文 𝔘",
    " ",
    "\n",
]
SCRIPT = """
import json, logging, sys
from pathlib import Path
from tasks.home import Home
from tasks.progress import watcher
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer

home, config, slow = Home(Path(sys.argv[1])), DataConfig.model_validate_json(sys.argv[2]), len(sys.argv) > 3
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s", force=True)
files = resolve(home, config.sources, "data.sources")
tokenizer = build_tokenizer(home, config.tokenizer, config.reading, files)

def watch(progress):
    print(f"{progress.stage} {progress.done}", flush=True)
    sys.stdin.readline()

if slow:
    watcher.set(watch)
print(tokenize(home, config, files, [], tokenizer).model_dump_json(), flush=True)
"""


def lines(path: Path, texts: list[str]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def words(count: int, seed: int = 0) -> list[str]:
    """Documents that are all different."""
    chosen = random.Random(seed)
    return [f"{number} {' '.join(chosen.choices(PLAY.split(), k=12))}" for number in range(count)]


def data(*sources: Any, **settings: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"sources": list(sources), "tokenizer": "byte", "validation_fraction": 0.3, **settings}
    )


def found(home: Home, config: DataConfig) -> tuple[list[SourceFile], list[SourceFile]]:
    return resolve(home, config.sources, "s"), resolve(home, config.validation_sources, "v")


def tokenizer_of(home: Home, config: DataConfig) -> Reference:
    return build_tokenizer(home, config.tokenizer, config.reading, found(home, config)[0])


def shards_of(home: Home, config: DataConfig) -> Reference:
    files, validation_files = found(home, config)
    return tokenize(home, config, files, validation_files, tokenizer_of(home, config))


def rows(shards: Path, split: str) -> list[dict[str, Any]]:
    manifest = ShardSet.open(shards).manifest
    paths = [shards / shard["path"] for shard in manifest["shards"] if shard["split"] == split]
    return [row for path in paths for row in pa.ipc.open_file(str(path)).read_all().to_pylist()]


def documents(home: Home, config: DataConfig, shards: Path, split: str) -> list[str]:
    """The texts of a split, decoded by transformers; each document ends with the end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(home, config).path)
    ids = [row["tokens"] for row in rows(shards, split)]
    assert all(document[-1] == tokenizer.eos_token_id for document in ids)
    assert all(tokenizer.eos_token_id not in document[:-1] for document in ids), "text never makes the control token"
    return [tokenizer.decode(document[:-1]) for document in ids]


# --- tokenizers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokenizer", ["byte", "char", {"type": "bpe", "vocabulary_size": 300}], ids=["byte", "char", "bpe"]
)
def test_any_text_comes_back_from_the_shards_as_it_was(work, tmp_path, tokenizer):
    config = data(lines(tmp_path / "a.jsonl", [*AWKWARD, PLAY, *words(30)]), tokenizer=tokenizer)
    shards = shards_of(work, config).path
    back = documents(work, config, shards, "train") + documents(work, config, shards, "validation")
    assert sorted(back) == sorted([*AWKWARD, PLAY, *words(30)])


@pytest.mark.parametrize(
    "tokenizer", ["byte", "char", {"type": "bpe", "vocabulary_size": 300}], ids=["byte", "char", "bpe"]
)
def test_transformers_loads_the_tokenizer_and_agrees_with_the_shards_canary(work, tmp_path, tokenizer):
    config = data(lines(tmp_path / "a.jsonl", [PLAY, *words(30)]), tokenizer=tokenizer)
    shards = ShardSet.open(shards_of(work, config).path)
    loaded = AutoTokenizer.from_pretrained(tokenizer_of(work, config).path)
    shards.check_canary(lambda text: loaded.encode(text, add_special_tokens=False, split_special_tokens=True))
    assert loaded.eos_token == END_OF_TEXT
    assert shards.manifest["tokenizer"]["end_id"] == loaded.eos_token_id
    assert shards.vocabulary_size == len(loaded)
    assert max(id for row in rows(shards.directory, "train") for id in row["tokens"]) < len(loaded)


def test_a_char_tokenizer_has_one_id_a_character_of_the_text_in_sorted_order(work, tmp_path):
    (tmp_path / "play.txt").write_text(PLAY)
    config = data(str(tmp_path / "play.txt"), tokenizer="char")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(work, config).path)
    symbols = sorted(set(PLAY))
    expected = [symbols.index(symbol) for symbol in PLAY]
    assert tokenizer.encode(PLAY) == tokenizer(PLAY)["input_ids"] == expected
    assert tokenizer.decode(expected) == PLAY
    assert len(tokenizer) == len(symbols) + 1


def test_a_byte_tokenizer_has_one_id_a_byte_and_needs_no_text(work):
    tokenizer = AutoTokenizer.from_pretrained(build_tokenizer(work, TokenizerConfig(type="byte"), Reading(), []).path)
    text = "".join(AWKWARD).replace(END_OF_TEXT, "")
    assert len(tokenizer.encode(text)) == len(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 257


def test_a_character_that_training_text_lacks_is_refused_by_document(work, tmp_path):
    config = data(
        lines(tmp_path / "a.jsonl", words(20)),
        tokenizer="char",
        validation_sources=[lines(tmp_path / "v.jsonl", ["with a 🦊"])],
    )
    with pytest.raises(DataError, match=r"v.jsonl:1 .*cannot encode it"):
        shards_of(work, config)


def test_a_bpe_vocabulary_is_the_same_whenever_it_is_trained(tmp_path):
    texts = lines(tmp_path / "a.jsonl", words(200))
    config = data(texts, tokenizer={"type": "bpe", "vocabulary_size": 400})
    contents = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        built = tokenizer_of(Home(tmp_path / name), config)
        contents.append((built.fingerprint, (built.path / "tokenizer.json").read_bytes()))
    assert contents[0] == contents[1]


def test_a_bpe_vocabulary_has_exactly_the_size_asked_for_and_compresses(work, tmp_path):
    config = data(lines(tmp_path / "a.jsonl", words(200)), tokenizer={"type": "bpe", "vocabulary_size": 400})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(work, config).path)
    assert len(tokenizer) == 400
    assert len(tokenizer.encode(PLAY)) < len(PLAY) / 2


def test_a_bpe_vocabulary_larger_than_the_text_allows_is_refused_with_the_number_it_allows(work, tmp_path):
    source = lines(tmp_path / "a.jsonl", ["abab", "ab ab"])
    with pytest.raises(ConfigError, match=r"data.tokenizer.vocabulary_size: 8192 .* yields (\d+)") as refused:
        tokenizer_of(work, data(source, tokenizer="bpe"))
    size = int(str(refused.value).split("yields ")[1].split()[0])
    assert 257 < size < 270
    tokenizer_of(work, data(source, tokenizer={"type": "bpe", "vocabulary_size": size}))


def test_a_pretrained_tokenizer_is_taken_from_a_directory_or_a_file(work, tmp_path):
    source = lines(tmp_path / "a.jsonl", words(200))
    ours = tokenizer_of(work, data(source, tokenizer={"type": "bpe", "vocabulary_size": 400}))
    shutil.copytree(ours.path, tmp_path / "taken")
    for path in (tmp_path / "taken", tmp_path / "taken" / "tokenizer.json"):
        config = data(source, tokenizer=str(path))
        assert sorted(
            documents(work, config, shards_of(work, config).path, "train")
            + documents(work, config, shards_of(work, config).path, "validation")
        ) == sorted(words(200))


@pytest.mark.parametrize("path", ["nothing-here", "/nothing/here", "directory", "broken.json"])
def test_a_pretrained_tokenizer_that_cannot_be_loaded_is_refused_by_key(work, tmp_path, monkeypatch, path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "directory").mkdir()
    (tmp_path / "broken.json").write_text("{")
    config = TokenizerConfig(type="pretrained", path=str(tmp_path / path))
    with pytest.raises(ConfigError, match=r"data.tokenizer.path: .*cannot be loaded"):
        build_tokenizer(work, config, Reading(), [])


def test_a_tokenizer_that_needs_no_text_has_the_same_identity_whatever_the_text(work, tmp_path):
    one, two = data(lines(tmp_path / "a.jsonl", words(5))), data(lines(tmp_path / "b.jsonl", words(6)), text_field="x")
    assert tokenizer_of(work, one).fingerprint == tokenizer_of(work, two).fingerprint
    assert tokenizer_of(work, one).cached


# --- splits --------------------------------------------------------------------------------------


def test_the_same_text_is_on_the_same_side_whatever_file_it_came_in(work, tmp_path):
    texts = words(400)
    shuffled = random.Random(1).sample(texts, 250)
    config = data(lines(tmp_path / "a.jsonl", texts), lines(tmp_path / "b.jsonl", shuffled))
    shards = shards_of(work, config).path
    train, validation = (documents(work, config, shards, split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 650
    assert not set(train) & set(validation)
    assert set(train) | set(validation) == set(texts)
    assert {text for text in texts if text_share(text_digest(text), "validation") < 0.3} == set(validation)
    assert 80 < len(set(validation)) < 160, "about 120"


def test_a_larger_fraction_keeps_held_out_what_was_held_out(work, tmp_path):
    source = lines(tmp_path / "a.jsonl", words(200))
    held_out = []
    for fraction in (0.1, 0.2, 0.5):
        config = data(source, validation_fraction=fraction)
        held_out.append(set(documents(work, config, shards_of(work, config).path, "validation")))
    assert held_out[0] < held_out[1] < held_out[2]


@pytest.mark.parametrize(
    ("characters", "fraction", "cut"),
    [(1000, 0.1, 900), (1_115_394, 0.1, 1_003_854), (10, 0.9, 1), (5, 0.8, 1), (100, 0.07, 93), (7, 0.5, 3)],
)
def test_a_position_split_cuts_exactly_at_a_character(work, tmp_path, characters, fraction, cut):
    """1,115,394 characters are tiny Shakespeare's, of which nanoGPT trains on int(n * 0.9)."""
    text = ("é🦊ab\r\n" * (characters // 5))[:characters]
    (tmp_path / "a.txt").write_bytes(text.encode())
    config = data(str(tmp_path / "a.txt"), validation_split="position", validation_fraction=fraction, tokenizer="char")
    shards = shards_of(work, config).path
    assert documents(work, config, shards, "train") == [text[:cut]]
    assert documents(work, config, shards, "validation") == [text[cut:]]
    assert ShardSet.open(shards).total("validation", "text_bytes") == len(text[cut:].encode())


def test_a_position_split_makes_no_documents_of_nothing(work, tmp_path):
    config = data(lines(tmp_path / "a.jsonl", ["ab", "x" * 100]), validation_split="position", validation_fraction=0.6)
    shards = shards_of(work, config).path
    assert documents(work, config, shards, "train") == ["x" * 40]
    assert documents(work, config, shards, "validation") == ["ab", "x" * 60]
    nothing = data(lines(tmp_path / "b.jsonl", words(9)), validation_split="position", validation_fraction=0.0)
    with pytest.raises(DataError, match="fell into the validation split"):
        shards_of(work, nothing)


def test_documents_of_the_validation_sources_are_dropped_from_training(work, tmp_path):
    texts = words(60)
    config = data(
        lines(tmp_path / "a.jsonl", texts[:30]),
        lines(tmp_path / "b.jsonl", texts[20:50]),
        validation_sources=[lines(tmp_path / "v.jsonl", texts[25:35]), lines(tmp_path / "w.jsonl", texts[50:])],
    )
    shards = shards_of(work, config).path
    assert documents(work, config, shards, "validation") == texts[25:35] + texts[50:]
    assert documents(work, config, shards, "train") == texts[:25] + texts[20:25] + texts[35:50]


def test_an_empty_validation_split_is_refused_with_three_ways_out(work, tmp_path):
    config = data(lines(tmp_path / "a.jsonl", words(3)), validation_fraction=1e-9)
    with pytest.raises(DataError, match=r"no document of 3 .*Raise it, .*position, or .*validation_sources"):
        shards_of(work, config)


def test_a_source_without_a_document_for_training_is_refused_by_number(work, tmp_path):
    config = data(
        lines(tmp_path / "a.jsonl", words(9)),
        lines(tmp_path / "b.jsonl", words(1)),
        validation_sources=[lines(tmp_path / "v.jsonl", words(1))],
    )
    with pytest.raises(DataError, match=r"data.sources\[1\]: no document of it is left for training"):
        shards_of(work, config)


# --- bad records ---------------------------------------------------------------------------------


def some_bad(path: Path, good: int, bad: int) -> str:
    lines(path, words(good))
    with open(path, "a") as file:
        file.write("".join(f'{{"text": {number}}}\n' for number in range(bad)))
    return str(path)


def test_bad_records_under_the_limit_are_listed_in_the_set(work, tmp_path):
    source = some_bad(tmp_path / "a.jsonl", 98, 2)
    config = data(source, bad_record_limit=0.02)
    shards = shards_of(work, config).path
    listed = [json.loads(line) for line in (shards / "quarantine.jsonl").read_text().splitlines()]
    assert listed == [
        {"file": source, "line": line, "reason": "field 'text' is not a text", "cuts_off": False} for line in (99, 100)
    ]
    manifest = ShardSet.open(shards).manifest
    assert {name: manifest["records"][name] for name in ("read", "bad")} == {"read": 100, "bad": 2}
    assert manifest["records"]["first_bad"] == [f"{source}:{line}: field 'text' is not a text" for line in (99, 100)]
    assert "quarantine.jsonl" in [entry["path"] for entry in manifest["files"]]
    assert len(rows(shards, "train") + rows(shards, "validation")) == 98


def test_bad_records_over_the_limit_fail_with_the_first_examples_and_leave_nothing(work, tmp_path):
    source = some_bad(tmp_path / "a.jsonl", 97, 5)
    with pytest.raises(DataError, match=r"5 of 102 records .*bad_record_limit=0.02") as refused:
        shards_of(work, data(source, bad_record_limit=0.02))
    assert [f"{source}:{line}: " in str(refused.value) for line in (98, 99, 100, 101)] == [True, True, True, False]
    assert list((work.path / "shards").iterdir()) == []


def test_bad_records_are_counted_where_prefect_shows_the_stage(prefect_server, work, tmp_path):
    source = some_bad(tmp_path / "a.jsonl", 98, 2)
    config = data(source, bad_record_limit=0.02)
    files, tokenizer = found(work, config)[0], tokenizer_of(work, config)
    shown = []

    @flow(name="tokenize-only")
    def tokenize_only() -> None:
        shown.append(tokenize_task(work, config, files, [], tokenizer, return_state=True).state_details.task_run_id)

    for _ in range(2):  # the second finds the set, and shows the same
        tokenize_only()
    with get_client(sync_client=True) as client:
        for run in shown:
            of_run = ArtifactFilter(task_run_id=ArtifactFilterTaskRunId(any_=[run]))
            (artifact,) = client.read_artifacts(artifact_filter=of_run)
            assert (artifact.key, artifact.description) == ("shards", "100 records read, 2 bad")
            assert "| bad | 2 |" in artifact.data
            assert f"{source}:99: field 'text' is not a text" in artifact.data


# --- identity and caching ------------------------------------------------------------------------


def test_a_finished_set_is_found_and_nothing_is_written(work, tmp_path):
    config = data(lines(tmp_path / "a.jsonl", words(40)))
    first, second = shards_of(work, config), shards_of(work, config)
    assert (first.cached, second.cached) == (False, True)
    assert (first.path, first.fingerprint) == (second.path, second.fingerprint)


def test_settings_that_do_not_change_the_tokens_keep_the_set(work, tmp_path):
    source = lines(tmp_path / "a.jsonl", words(40))
    before = shards_of(work, data(source))
    for config in (data(source, sequence_length=77), data({"path": source, "weight": 3.0, "exclude": ["*.md"]})):
        assert shards_of(work, config).cached
        assert shards_of(work, config).fingerprint == before.fingerprint


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_fraction": 0.5},
        {"validation_split": "position"},
        {"shard_tokens": 100},
        {"tokenizer": "char"},
    ],
    ids=str,
)
def test_settings_that_change_the_shards_make_another_set(work, tmp_path, settings):
    source = lines(tmp_path / "a.jsonl", words(40))
    assert shards_of(work, data(source, **settings)).fingerprint != shards_of(work, data(source)).fingerprint


def test_a_changed_text_makes_another_set_and_a_touched_one_does_not(work, tmp_path):
    source = lines(tmp_path / "a.jsonl", words(40))
    before = shards_of(work, data(source))
    os.utime(source, (1e9, 1e9))
    assert shards_of(work, data(source)).cached
    lines(tmp_path / "a.jsonl", words(41))
    assert shards_of(work, data(source)).fingerprint != before.fingerprint


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["manifest.json", "train/source-000-shard-00000.arrow"])
def test_a_damaged_set_is_never_trusted_and_built_again_the_same(work, tmp_path, caplog, kind, name):
    config = data(lines(tmp_path / "a.jsonl", words(40)))
    whole = shards_of(work, config)
    contents = {path.name: path.read_bytes() for path in whole.path.rglob("*.arrow")}
    DAMAGE[kind](whole.path / name)
    caplog.set_level(logging.WARNING, "forgeline")
    again = shards_of(work, config)
    assert not again.cached
    assert again.path == whole.path
    assert faults(again.path) == []
    assert {path.name: path.read_bytes() for path in again.path.rglob("*.arrow")} == contents
    assert "building it again" in caplog.text


def test_shards_of_several_sources_keep_their_order_and_number(work, tmp_path):
    sources = [lines(tmp_path / f"{name}.jsonl", words(30, seed)) for seed, name in enumerate("ab")]
    shards = ShardSet.open(shards_of(work, data(*sources, shard_tokens=300)).path)
    numbers = [(shard["split"], shard["source"]) for shard in shards.manifest["shards"]]
    assert set(numbers) == {(split, source) for split in ("train", "validation") for source in (0, 1)}
    assert len(shards.stream("train")) == len(shards.stream("train", 0)) + len(shards.stream("train", 1))
    assert [item["path"] for item in shards.manifest["inputs"]] == sources


# --- two at once, and kills ----------------------------------------------------------------------


def building(home: Home, config: DataConfig, *slow: str) -> AbstractContextManager[subprocess.Popen]:
    return python_process(SCRIPT, home.path, config.model_dump_json(), *slow)


def line_of(process: subprocess.Popen, beginning: str) -> str:
    """The next line with this beginning."""
    return next(line for line in process.stdout if line.startswith(beginning))


def test_a_kill_in_the_middle_leaves_nothing_under_the_final_name_and_the_next_run_builds_it(work, tmp_path):
    sources = [lines(tmp_path / f"{name}.jsonl", words(40, seed)) for seed, name in enumerate("ab")]
    config = data(*sources, shard_tokens=200)
    tokenizer_of(work, config)
    with building(work, config, "slow") as builder:
        line_of(builder, "tokenize 0")
        assert list((work.path / "units").glob("[!.]*/train/*.arrow")), "it is in the middle of its work"
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    assert [path for path in (work.path / "shards").iterdir() if not path.name.startswith(".")] == []
    built = shards_of(work, config)
    assert not built.cached
    assert faults(built.path) == []
    assert [path for path in (work.path / "shards").iterdir()] == [built.path]


def test_a_second_builder_waits_for_the_first_and_takes_its_set(work, tmp_path):
    config = data(lines(tmp_path / "a.jsonl", words(40)))
    tokenizer_of(work, config)
    with building(work, config, "slow") as first:
        line_of(first, "tokenize 0")
        with building(work, config) as second:
            line_of(second, f"{work.path}/shards")
            first.stdin.close()
            built, taken = (json.loads(line_of(one, "{")) for one in (first, second))
    assert (built["cached"], taken["cached"]) == (False, True)
    assert built["path"] == taken["path"]


def json_list_cut_off(path: Path) -> None:
    values = [json.dumps({"text": text}) for text in words(400)]
    path.with_suffix(".json").write_text(f"[{', '.join(values[:300])} {', '.join(values[300:])}]")


def json_lines_cut_off(path: Path) -> None:
    lines(tmp := path.with_suffix(".jsonl"), [os.urandom(20).hex() for _ in range(3000)])
    packed = gzip.compress(tmp.read_bytes())
    tmp.unlink()
    path.with_suffix(".jsonl.gz").write_bytes(packed[: len(packed) // 2])


def quote_that_never_ends(path: Path) -> None:
    rows = words(400)
    rows[300] = f'"{rows[300]}'
    path.with_suffix(".csv").write_text("\n".join(["text", *rows]))


@pytest.mark.parametrize("write", [json_list_cut_off, json_lines_cut_off, quote_that_never_ends], ids=str)
def test_a_file_that_breaks_off_is_refused_however_few_bad_records_that_is(work, tmp_path, write):
    (tmp_path / "text").mkdir()
    write(tmp_path / "text" / "a")
    with pytest.raises(DataError, match="1 of 1 files cannot be read to their end"):
        shards_of(work, data(str(tmp_path / "text")))
    for number in range(150):  # one of so many may
        (tmp_path / "text" / f"{number}.txt").write_text(words(1, number)[0])
    assert ShardSet.open(shards_of(work, data(str(tmp_path / "text"))).path).manifest["records"]["cut_off"] == 1


def test_a_damaged_manifest_of_another_set_stops_no_run(work, tmp_path):
    lines(tmp_path / "a.jsonl", words(40))
    first = shards_of(work, data(str(tmp_path / "*.jsonl")))
    manifest = first.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"inputs"', '"inputz"'))
    lines(tmp_path / "b.jsonl", words(40, 1))
    assert not faults(shards_of(work, data(str(tmp_path / "*.jsonl"))).path)


def test_a_source_that_is_all_duplicates_stops_only_a_mixture(work, tmp_path):
    lines(tmp_path / "a.jsonl", words(40))
    lines(tmp_path / "b.jsonl", words(40))
    twice = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert not faults(shards_of(work, data(*twice, deduplicate=True)).path)
    weighted = [{"path": path, "weight": 1} for path in twice]
    with pytest.raises(DataError, match=r"data.sources\[1\]: no document of it is left for training.*duplicates"):
        shards_of(work, data(*weighted, deduplicate=True, minimum_length=1))


@pytest.mark.parametrize("seed", range(6))
def test_a_vocabulary_is_trained_on_a_part_of_one_large_document(work, tmp_path, seed, monkeypatch):
    monkeypatch.setattr(tokenizer_stage, "_PIECE_CHARACTERS", 500)
    (tmp_path / "a.txt").write_text(" ".join(words(3000, seed)))
    config = data(
        str(tmp_path / "a.txt"), tokenizer={"type": "bpe", "vocabulary_size": 300, "training_bytes": 4000},
        validation_split="position",
    )  # fmt: skip
    assert tokenizer_of(work, config).path.exists()

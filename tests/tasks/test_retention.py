"""Cleaning: what killed processes left and units that no set holds go, and never what somebody works with."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from tasks.home import Home
from tasks.retention import UNUSED_SECONDS
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer
from tests.conftest import eventually, python_process
from trainer.durable import faults, read_manifest

TOKENIZE = """
import sys
from pathlib import Path
from tasks.home import Home
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer

home, config = Home(Path(sys.argv[1])), DataConfig.model_validate_json(sys.argv[2])
files = resolve(home, config.sources, "s")
print(tokenize(home, config, files, [], build_tokenizer(home, config.tokenizer, config.reading, files)).path)
"""


def data(*names: Path, documents: int = 40) -> DataConfig:
    for path in names:
        path.write_text("".join(json.dumps({"text": f"{path.name} {n} " * 20}) + "\n" for n in range(documents)))
    common = {"tokenizer": "byte", "validation_fraction": 0.3, "processes": 1}
    return DataConfig.model_validate({"sources": [str(path) for path in names], **common})


def built(home: Home, config: DataConfig) -> Path:
    files = resolve(home, config.sources, "s")
    return tokenize(home, config, files, [], build_tokenizer(home, config.tokenizer, config.reading, files)).path


def units(home: Home) -> set[str]:
    return {path.name for path in (home.path / "units").glob("[!.]*")}


def leftovers(home: Home) -> list[Path]:
    return [path for kind in ("units", "shards") for path in (home.path / kind).glob(".*")]


def in_the_middle_of_a_unit(home: Home, process: subprocess.Popen) -> None:
    """Stop a process while it writes."""
    eventually(lambda: list((home.path / "units").glob(".*.partial")), "a unit being written")
    process.send_signal(signal.SIGSTOP)
    assert list((home.path / "units").glob(".*.partial"))


def test_what_a_killed_process_left_goes_with_the_next_set(work, tmp_path):
    big = data(tmp_path / "big.jsonl", documents=60_000)
    with python_process(TOKENIZE, work.path, big.model_dump_json()) as process:
        in_the_middle_of_a_unit(work, process)
        process.kill()
        process.wait()
    assert len(leftovers(work)) == 2, "of the unit and of the set"
    built(work, data(tmp_path / "small.jsonl"))
    assert leftovers(work) == []


def test_what_a_living_process_works_with_stays(work, tmp_path):
    shared = data(tmp_path / "small.jsonl")
    old = built(work, shared)
    os.rename(old, tmp_path / "taken away")
    for name in units(work):
        os.utime(work.path / "units" / name, (1e9, 1e9))
    big = data(tmp_path / "big.jsonl", documents=60_000)
    with python_process(TOKENIZE, work.path, big.model_dump_json()) as process:
        in_the_middle_of_a_unit(work, process)
        before, held = leftovers(work), units(work)
        assert len(before) == 2
        built(work, data(tmp_path / "other.jsonl"))
        assert leftovers(work) == before
        assert held < units(work), "a run may be about to link the old units"
        process.send_signal(signal.SIGCONT)
        made = Path(process.stdout.readline().strip())
        assert process.wait() == 0
    assert faults(made) == []
    assert not held & units(work), "with the last run of all the old units went"


def test_a_unit_that_no_set_holds_goes_when_it_is_old_and_the_sets_stay_whole(work, tmp_path):
    first = built(work, data(tmp_path / "a.jsonl"))
    second = built(work, data(tmp_path / "b.jsonl"))
    third = built(work, data(tmp_path / "c.jsonl"))
    of = {path: set(read_manifest(path)["units"]) for path in (first, second, third)}
    assert units(work) == set.union(*of.values())
    for path in (second, third):
        os.rename(path, tmp_path / path.name)
    old = time.time() - UNUSED_SECONDS - 60
    for name in of[first] | of[second]:
        os.utime(work.path / "units" / name, (old, old))
    fourth = built(work, data(tmp_path / "d.jsonl"))
    assert units(work) == of[first] | of[third] | set(read_manifest(fourth)["units"])
    assert faults(first) == faults(fourth) == faults(tmp_path / second.name) == []


def test_the_units_behind_removed_duplicates_stay_with_their_set(work, tmp_path):
    config = data(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text() + '{"text": "new"}\n')
    config = config.model_copy(
        update={"deduplicate": True, "sources": DataConfig(sources=[str(tmp_path / "[ab].jsonl")]).sources}
    )
    made = built(work, config)
    for name in units(work):
        os.utime(work.path / "units" / name, (1e9, 1e9))
    before = units(work)
    built(work, data(tmp_path / "c.jsonl"))
    assert before < units(work)
    assert set(read_manifest(made)["units"]) == before

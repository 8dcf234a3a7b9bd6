"""A damaged shard set: the command line and the loader name the file, and the stage rebuilds just that."""

import json
from pathlib import Path

import numpy as np
import pytest

from flows.cli import main
from tasks.home import Home
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer
from tests.conftest import DAMAGE
from trainer.data.loader import Sequences
from trainer.data.shards import ShardSet
from trainer.errors import DataError


def built(home: Home, config: DataConfig) -> Path:
    files = resolve(home, config.sources, "s")
    return tokenize(home, config, files, [], build_tokenizer(home, config.tokenizer, config.reading, files)).path


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for name in "abc":
        texts = [{"text": f"{name}{n} is one of the texts. " * 3} for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts) + "no JSON\n")
    return DataConfig.model_validate(
        {
            "sources": [str(tmp_path / "[abc].jsonl")],
            "tokenizer": "byte",
            "validation_fraction": 0.3,
            "unit_bytes": 2000,
            "bad_record_limit": 0.1,
        }
    )


def read_all(shards: Path) -> None:
    """What a training run reads, and what an evaluation does."""
    sequences = Sequences.open(ShardSet.open(shards), 64, None, 1)
    sequences.gather(np.arange(len(sequences)))
    stream = ShardSet.open(shards).stream("validation")
    stream.read(0, np.empty(len(stream), dtype=np.int64))


@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_file_is_damaged_it_is_named_and_rebuilt_alone(work, config, kind, capsys):
    shards = built(work, config)
    content = {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()}
    assert {path.parent.name for path in content if path.suffix == ".arrow"} == {"train", "validation"}
    assert main(["data", "verify", str(shards)]) == 0
    for victim in [path for path in content if path.name != "manifest.json"]:
        capsys.readouterr()
        inodes = {path: path.stat().st_ino for path in (work.path / "units").rglob("*.arrow")}
        DAMAGE[kind](victim)
        assert main(["data", "verify", str(shards)]) == 1
        (said,) = capsys.readouterr().out.splitlines()
        assert said.startswith(f"{victim}: ")
        if victim.suffix == ".arrow" and kind != "flipped":
            with pytest.raises(DataError, match=f"{victim}: "):
                read_all(shards)
        assert built(work, config) == shards
        assert {path: path.read_bytes() for path in shards.rglob("*") if path.is_file()} == content
        assert main(["data", "verify", str(shards)]) == 0
        again = {
            path.parents[1] for path in (work.path / "units").rglob("*.arrow") if path.stat().st_ino != inodes[path]
        }
        assert len(again) == (1 if victim.suffix == ".arrow" and kind != "gone" else 0), "units that were built again"
        read_all(shards)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_manifest_is_named(work, config, kind, capsys):
    shards = built(work, config)
    DAMAGE[kind](shards / "manifest.json")
    assert main(["data", "verify", str(shards)]) > 0
    said = capsys.readouterr()
    assert str(shards) in said.out + said.err
    assert "manifest.json" in said.out + said.err
    assert built(work, config) == shards
    assert main(["data", "verify", str(shards)]) == 0

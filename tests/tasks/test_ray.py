"""Units on Ray: a real local cluster of two workers writes the same bytes."""

import json
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from tasks.home import Home
from tasks.ray import build_on_ray
from tasks.sources import resolve
from tasks.tokenize import DataConfig, tokenize
from tasks.tokenizer import build_tokenizer
from trainer.errors import ConfigError


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def built(place: Path, config: DataConfig) -> dict[str, bytes]:
    place.mkdir()
    home = Home(place)
    files = resolve(home, config.sources, "s")
    tokenizer = build_tokenizer(home, config.tokenizer, config.reading, files)
    return content(tokenize(home, config, files, [], tokenizer).path)


def test_a_cluster_of_two_workers_writes_the_same_bytes(tmp_path):
    pytest.importorskip("prefect_ray", reason="the extra forgeline[ray] is not installed")
    import ray

    for number in range(6):
        texts = (f"{number}-{n} some text é 🦊" for n in range(50))
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = DataConfig.model_validate(
        {"sources": [f"{tmp_path}/*.jsonl"], "tokenizer": "byte", "validation_fraction": 0.3, "unit_bytes": 2000}
    )
    root = str(Path(__file__).parents[2])
    with prefect_test_harness():
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": root}})
        try:
            on_ray = built(tmp_path / "ray", config.model_copy(update={"runner": "ray"}))
        finally:
            ray.shutdown()
    assert on_ray == built(tmp_path / "local", config)


def test_ray_without_a_prefect_server_is_refused_with_its_remedy(tmp_path):
    pytest.importorskip("prefect_ray", reason="the extra forgeline[ray] is not installed")
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError, match="set PREFECT_API_URL"),
    ):
        build_on_ray(Home(tmp_path), [], lambda unit: None)

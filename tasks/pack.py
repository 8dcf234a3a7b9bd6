"""The pack stage: a shard set in, the plan of which documents share a sequence out."""

from pathlib import Path
from typing import Any

from prefect import task

from tasks.home import Home
from tasks.stage import Reference, build_once, shown, timed
from tasks.tokenize import DataConfig
from trainer.data.packing import FORMAT_VERSION, plan_name, write_plan
from trainer.data.shards import ShardSet
from trainer.durable import read_manifest
from trainer.settings import fingerprint


@timed
def pack(home: Home, data: DataConfig, shards: Reference) -> Reference:
    """Write the best-fit plans of the training text, `HOME/packing/<fingerprint>/`: one a source where they are mixed.

    Raises:
        DataError: a shard cannot be read.
    """
    sources = [None] if data.weights is None else list(range(len(data.weights)))
    name = fingerprint(
        "pack",
        FORMAT_VERSION,
        shards=shards.fingerprint,
        sequence_length=data.sequence_length,
        sources=sources,
    )

    def build(directory: Path) -> dict[str, Any]:
        shard_set = ShardSet.open(shards.path)
        plans = {}
        for source in sources:
            lengths = shard_set.stream("train", source).document_lengths()
            plans[plan_name(source)] = write_plan(directory / plan_name(source), lengths, data.sequence_length)
        return {
            "kind": "packing",
            "format_version": FORMAT_VERSION,
            "fingerprint": name,
            "sequence_length": data.sequence_length,
            "shards": {"fingerprint": shards.fingerprint, "path": str(shards.path)},
            "plans": plans,
        }

    path, cached = build_once(home, "packing", name, build)
    return Reference(path=path, fingerprint=name, cached=cached)


def sequences_and_tokens(directory: Path) -> tuple[int, int]:
    """How many sequences one epoch has, and how many tokens are trained in them."""
    plans = (read_manifest(directory) or {})["plans"].values()
    return sum(plan["sequences"] for plan in plans), sum(plan["tokens"] for plan in plans)


@task(name="pack", task_run_name="pack")
def pack_task(home: Home, data: DataConfig, shards: Reference) -> Reference:
    """Plan which documents share a sequence."""
    return shown(pack(home, data, shards))

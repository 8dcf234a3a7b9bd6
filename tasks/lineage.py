"""`forgeline why`: the way back from a model to the bytes that it was made of."""

from pathlib import Path
from typing import Any

import yaml

from tasks.home import Home
from tasks.register import locate_model
from trainer.durable import faults, read_manifest
from trainer.errors import DataError
from trainer.tracking import read_tracking


def why(home: Home, model: str) -> dict[str, Any]:
    """Checkpoint, run, configuration, tokenizer, shards and raw files behind a model.

    Args:
        model: an export directory, `models:/name@alias` or `models:/name/version`.

    Raises:
        DataError: the model or its manifest is missing.
    """
    export = locate_model(home, model)
    manifest = read_manifest(export)
    if manifest is None or manifest.get("kind") != "export":
        raise DataError(f"{export}: has no manifest of an export, so nothing is known about where it came from.")
    lineage = manifest["lineage"]
    shards_dir = Path(lineage["shards"]["path"])
    shards = read_manifest(shards_dir) or {}
    run_dir = Path(manifest["run"]["run_dir"])
    return {
        "model": model,
        "export": {"path": str(export), "faults": faults(export), "files": manifest["files"]},
        "checkpoint": str(run_dir / "checkpoints" / manifest["checkpoint"]),
        "run": {**manifest["run"], "mlflow": read_tracking(run_dir)},
        "config": yaml.safe_load((export / "training.yaml").read_text()),
        "tokenizer": lineage["tokenizer"],
        "shards": {**lineage["shards"], "shards": shards.get("shards", []), "present": bool(shards)},
        "sources": lineage["sources"],
        "raw_files": shards.get("inputs", []),
    }

"""The register stage: makes the export a version of a registered model and decides who is champion."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from prefect import task
from pydantic import Field

from tasks.evaluate import Evaluated
from tasks.home import Home
from tasks.stage import Reference, shown, timed
from tasks.train import Trained
from trainer.durable import exclusive
from trainer.settings import Settings, fingerprint
from trainer.tracking import mlflow_client, reachable

logger = logging.getLogger("forgeline")

_DECIDED = "forgeline.alias_decided"
CHAMPION, CHALLENGER = "champion", "challenger"


class RegisterConfig(Settings):
    """The model registry."""

    name: Annotated[str | None, Field(pattern=r"^[^/:'\"`]+$", max_length=200)] = None
    """Registered model that gets the new version. Unset: the run's name."""


class Registered(Reference):
    """A version in the registry; `path` is the export behind it."""

    name: str
    version: str
    aliases: list[str]


@timed
def register(
    home: Home, name: str, trained: Trained, evaluated: Evaluated, tokenizer: Reference, sources: str
) -> Registered:
    """Register the export as a version of model ``name``; a run is registered once.

    It becomes `champion` where there is none, or where its bits per byte are lower than the
    champion's; otherwise `challenger`.
    """
    lock = home.lock("models", fingerprint("model", 1, name=name))
    with exclusive(lock), reachable(home.tracking_uri):
        return _register(home, name, trained, evaluated, tokenizer, sources)


def _register(
    home: Home, name: str, trained: Trained, evaluated: Evaluated, tokenizer: Reference, sources: str
) -> Registered:
    client = mlflow_client(home.tracking_uri)
    version = _find_version(client, name, trained.fingerprint)
    cached = version is not None
    if version is None:
        tags = {
            "forgeline.run": trained.fingerprint,
            "forgeline.run_dir": str(trained.path),
            "forgeline.export_dir": str(trained.export_dir),
            "forgeline.sources": sources,
            "forgeline.tokenizer": tokenizer.fingerprint,
            "forgeline.validation": evaluated.validation,
            "forgeline.bits_per_byte": repr(evaluated.metrics["eval/bits_per_byte"]),
        }
        version = _create_version(home, client, name, trained, tags)
    if _DECIDED not in client.get_model_version(name, version).tags:  # also after a kill between the two
        client.set_registered_model_alias(name, _alias_for(client, name, evaluated), version)
        client.set_model_version_tag(name, version, _DECIDED, "true")
    aliases = sorted(client.get_model_version(name, version).aliases)
    return Registered(
        path=trained.export_dir,
        fingerprint=trained.fingerprint,
        cached=cached,
        name=name,
        version=str(version),
        aliases=aliases,
    )


def champion_of(client: Any, name: str) -> Any:
    """The version with the alias champion, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException:
        return None


def _find_version(client: Any, name: str, run: str) -> str | None:
    """The newest version made from this run whose files are there, if there is one."""
    from mlflow.utils.file_utils import local_file_uri_to_path

    found = client.search_model_versions(f"name = '{name}' and tag.`forgeline.run` = '{run}'")
    for version in found:
        kept = local_file_uri_to_path(client.get_model_version_download_uri(name, version.version))
        if "://" in kept or Path(kept, "MLmodel").is_file():
            return version.version
        logger.warning("%s version %s: its files are gone; registering the run again", name, version.version)
    return None


def _create_version(home: Home, client: Any, name: str, trained: Trained, tags: dict[str, str]) -> str:
    import mlflow
    import mlflow.transformers
    from mlflow.exceptions import MlflowException

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a local model needs no look at the hub for a model card
    logging.getLogger("mlflow").setLevel(logging.ERROR)  # it would warn that it found no card and no licence
    _resolve_pipeline_class()
    with _default_store(home.tracking_uri):
        with mlflow.start_run(run_id=trained.mlflow_run_id):
            model = mlflow.transformers.log_model(
                str(trained.export_dir),
                name="model",
                task="text-generation",
                pip_requirements=_requirements(),
                step=trained.steps,
            )
        with contextlib.suppress(MlflowException):  # it is there already
            client.create_registered_model(name)
        version = client.create_model_version(
            name, model.model_uri, run_id=trained.mlflow_run_id, tags=tags, model_id=model.model_id
        )
    return version.version


@contextlib.contextmanager
def _default_store(tracking_uri: str) -> Iterator[None]:
    """Let MLflow's functions use a store inside the block; MLflow puts it into the environment too."""
    import mlflow

    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(tracking_uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # which is how it is unset
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def _resolve_pipeline_class() -> None:
    """Let MLflow find the pipeline's class.

    transformers since 5.2x names it by a string in its registry; MLflow up to 3.17 reads the
    class's name from there when it logs a directory.
    """
    from transformers import TextGenerationPipeline, pipelines

    task = pipelines.check_task("text-generation")[1]
    if isinstance(task["impl"], str):
        task["impl"] = TextGenerationPipeline


def _requirements() -> list[str]:
    from importlib.metadata import version

    return [f"{package}=={version(package).split('+')[0]}" for package in ("mlflow", "torch", "transformers")]


def _alias_for(client: Any, name: str, evaluated: Evaluated) -> str:
    champion = champion_of(client, name)
    if champion is None:
        return CHAMPION
    rival = float(champion.tags.get("forgeline.bits_per_byte", "inf"))
    return CHAMPION if evaluated.metrics["eval/bits_per_byte"] < rival else CHALLENGER


@task(name="register", task_run_name="register-{name}")
def register_task(
    home: Home, name: str, trained: Trained, evaluated: Evaluated, tokenizer: Reference, sources: str
) -> Registered:
    """Register the model and decide who is champion."""
    return shown(register(home, name, trained, evaluated, tokenizer, sources))


def locate_model(home: Home, model: str) -> Path:
    """The export directory that `models:/name@alias`, `models:/name/version` or a path means.

    Raises:
        DataError: there is no such model, or its export is gone.
    """
    from mlflow.exceptions import MlflowException

    from trainer.errors import DataError

    if not model.startswith("models:/"):
        path = Path(model).absolute()
        if not (path / "config.json").is_file():
            raise DataError(
                f"{model}: no model is there (no config.json). Give an export directory or models:/NAME@ALIAS."
            )
        return path
    client = mlflow_client(home.tracking_uri)
    reference = model.removeprefix("models:/")
    try:
        if "@" in reference:
            version = client.get_model_version_by_alias(*reference.split("@", 1))
        else:
            version = client.get_model_version(*reference.split("/", 1))
    except (MlflowException, TypeError) as error:
        known = ", ".join(found.name for found in client.search_registered_models()) or "none"
        reason = getattr(error, "message", "write models:/NAME@ALIAS or models:/NAME/VERSION")
        raise DataError(f"{model}: {reason} (store {home.tracking_uri}; registered models: {known})") from None
    path = Path(version.tags.get("forgeline.export_dir", ""))
    if not (path / "config.json").is_file():
        raise DataError(f"{model}: version {version.version} has no export at {path}; was it made on another machine?")
    return path

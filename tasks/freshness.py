"""Whether the champion has seen the text as it is now."""

from typing import Any

from tasks.home import Home
from tasks.register import champion_of
from trainer.tracking import mlflow_client


def champion_is_fresh(home: Home, model: str, sources: str) -> str | None:
    """The champion's version, where it was trained on text with the fingerprint ``sources``; else None."""
    champion = champion_of(mlflow_client(home.tracking_uri), model)
    return champion.version if champion and champion.tags.get("forgeline.sources") == sources else None


def skipped(reason: str) -> Any:
    """A finished Prefect state named Skipped."""
    from prefect.states import Completed

    return Completed(name="Skipped", message=reason)

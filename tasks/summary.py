"""The end of a run: what happened, as one object for programs and as a page in Prefect."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.evaluate import Evaluated
from tasks.home import Home
from tasks.register import Registered
from tasks.stage import Reference
from tasks.train import Trained


class ModelVersion(BaseModel):
    """A version in the registry."""

    name: str
    version: str
    aliases: list[str]


class StageResult(BaseModel):
    """What one stage did."""

    name: str
    state: str
    """ran or cached."""
    seconds: float


class Summary(BaseModel):
    """What `forgeline run --json` prints. Its keys are an interface."""

    model_config = ConfigDict(frozen=True)

    name: str
    run_dir: str
    shards_dir: str
    export_dir: str
    mlflow_run_id: str
    tracking_uri: str
    model: ModelVersion
    metrics: dict[str, float]
    sample: str
    stages: list[StageResult]


def summarise(
    home: Home,
    name: str,
    tokenizer: Reference,
    shards: Reference,
    trained: Trained,
    evaluated: Evaluated,
    registered: Registered,
) -> Summary:
    """Gather the stages' references into one object."""
    stages = {
        "tokenizer": tokenizer,
        "tokenize": shards,
        "train": trained,
        "evaluate": evaluated,
        "register": registered,
    }
    return Summary(
        name=name,
        run_dir=str(trained.path),
        shards_dir=str(shards.path),
        export_dir=str(trained.export_dir),
        mlflow_run_id=trained.mlflow_run_id,
        tracking_uri=home.tracking_uri,
        model=ModelVersion(name=registered.name, version=registered.version, aliases=registered.aliases),
        metrics={
            **evaluated.metrics,
            "train/loss": trained.loss,
            "train/steps": float(trained.steps),
            "train/tokens": float(trained.tokens),
            "train/tokens_per_second": trained.tokens_per_second,
        },
        sample=evaluated.sample,
        stages=[
            StageResult(name=stage, state="cached" if r.cached else "ran", seconds=round(r.seconds, 3))
            for stage, r in stages.items()
        ],
    )


def publish(summary: Summary) -> Any:
    """Put the summary on the flow run's page in Prefect."""
    from prefect.artifacts import create_markdown_artifact

    model = summary.model
    rows = [f"| {key} | {value:,.6g} |" for key, value in summary.metrics.items()]
    stages = [f"| {stage.name} | {stage.state} | {stage.seconds:,.1f} |" for stage in summary.stages]
    text = "\n".join(
        [
            f"# {model.name} version {model.version} ({', '.join(model.aliases) or 'no alias'})",
            "",
            "| metric | value |",
            "|---|---|",
            *rows,
            "",
            "| stage | state | seconds |",
            "|---|---|---|",
            *stages,
            "",
            f"MLflow run `{summary.mlflow_run_id}` in `{summary.tracking_uri}`, export `{summary.export_dir}`",
            "",
            "```",
            summary.sample.replace("```", "'''"),
            "```",
        ]
    )
    return create_markdown_artifact(text, key="summary", description=f"{summary.name}: what came out")

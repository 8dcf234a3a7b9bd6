"""The flow `train`: raw text in, a registered, evaluated model out."""

from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows.config import RunConfig, load_config
from tasks.evaluate import evaluate_task
from tasks.home import Home
from tasks.pack import pack_task
from tasks.plan import Plan, plan_task
from tasks.register import register_task
from tasks.stage import retried
from tasks.summary import Summary, publish, summarise
from tasks.tokenize import tokenize_task
from tasks.tokenizer import tokenizer_task
from tasks.train import train_task

Preset = Annotated[str, Field(description="A YAML file, or the name of a preset in configs/.")]
Overrides = Annotated[
    dict[str, Any], Field(description='Settings over the preset\'s, by dotted key: {"train.learning_rate": 0.001}.')
]
Name = Annotated[str | None, Field(description="Another name for the run.")]


def run_name() -> str:
    """The name of a flow run in Prefect: the flow's, and the run's name or the preset's."""
    parameters = flow_run.parameters
    return f"{flow_run.flow_name}-{parameters['name'] or PurePath(parameters['preset']).stem}"


@flow(name="train", flow_run_name=run_name, description="Text in, registered model out.", log_prints=False)
def train(preset: Preset = "quickstart", overrides: Overrides = {}, name: Name = None) -> Summary:  # noqa: B006
    """Run the whole line; what is already done is shown as Cached."""
    config = load_config(preset, overrides, name)
    home = Home.locate()
    return stages(config, home, plan_task(home, config.data, config.model, config.train))


def stages(config: RunConfig, home: Home, plan: Plan) -> Summary:
    """Every stage after the plan, in order."""
    data, name = config.data, config.name

    def stage(task: Any) -> Callable[..., Any]:
        return retried(task, config.retry.limit, config.retry.delay_seconds)

    tokenizer = stage(tokenizer_task)(home, data.tokenizer, data.reading, plan.files)
    shards = stage(tokenize_task)(home, data, plan.files, plan.validation_files, tokenizer)
    packing = stage(pack_task)(home, data, shards) if data.packing == "best_fit" else None
    trained = stage(train_task)(
        home, name, config.model, config.train, data, tokenizer, shards, packing, config.parameters(), plan.sources
    )
    evaluated = stage(evaluate_task)(home, config.evaluate, data.sequence_length, trained, shards)
    registered = stage(register_task)(home, config.model_name, trained, evaluated, tokenizer, plan.sources)
    summary = summarise(home, name, tokenizer, shards, trained, evaluated, registered)
    publish(summary)
    return summary

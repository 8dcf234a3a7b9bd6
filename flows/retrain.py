"""The flow `retrain`: on a schedule, train again when the text has changed since the champion was made."""

from typing import Any

from prefect import flow

from flows.config import load_config
from flows.train import Name, Overrides, Preset, run_name, stages
from tasks.freshness import champion_is_fresh, skipped
from tasks.home import Home
from tasks.plan import plan_task


@flow(name="retrain", flow_run_name=run_name, description="Train again when the text has changed.")
def retrain(preset: Preset = "quickstart", overrides: Overrides = {}, name: Name = None) -> Any:  # noqa: B006
    """Run the whole line, or end at once in the state Skipped where the champion has seen this very text."""
    config = load_config(preset, overrides, name)
    home = Home.locate()
    plan = plan_task(home, config.data, config.model, config.train)
    if champion := champion_is_fresh(home, config.model_name, plan.sources):
        return skipped(f"{config.model_name} version {champion} was trained on this very text")
    return stages(config, home, plan)

"""Units of tokenization as Prefect tasks on a Ray cluster, for corpora beyond one machine.

The cluster's machines share the work directory. Needs the extra `forgeline[ray]`.
"""

from collections.abc import Callable

from prefect import flow, task
from prefect.futures import as_completed
from prefect.settings import get_current_settings

from tasks.home import Home
from tasks.units import Unit, build
from trainer.errors import ConfigError


@task(name="unit", task_run_name="unit-{unit.name}", persist_result=False)
def unit_task(home: Home, unit: Unit) -> str:
    """Build one unit of text."""
    build(home, unit)
    return unit.name


def build_on_ray(home: Home, units: list[Unit], done: Callable[[Unit], None]) -> None:
    """Build units on the cluster that Ray finds (`RAY_ADDRESS`), or on one of this machine alone.

    Args:
        done: called after each unit.

    Raises:
        ConfigError: prefect-ray is missing, or there is no Prefect server that the cluster could reach.
    """
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise ConfigError("data.runner: ray needs prefect-ray: pip install 'forgeline[ray]'") from None
    if not get_current_settings().api.url:
        raise ConfigError("data.runner: ray needs a Prefect server that the cluster reaches: set PREFECT_API_URL")
    named = {unit.name: unit for unit in units}

    @flow(name="units", task_runner=RayTaskRunner(), persist_result=False, validate_parameters=False)
    def on_ray() -> None:
        for future in as_completed([unit_task.submit(home, unit) for unit in units]):
            done(named[future.result()])

    if units:
        on_ray()

"""Imports point one way, flows → tasks → trainer, and each outside thing is talked to in one place."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
LAYERS = ("flows", "tasks", "trainer")
HEAVY = ("torch", "prefect", "mlflow", "transformers", "deepspeed", "datasets", "pyarrow", "numpy", "pydantic", "yaml")
PROCESS_CALLS = {("os", "fork"), ("os", "system"), ("os", "popen"), ("os", "posix_spawn"), ("os", "execv")}


def modules(layer: str) -> list[str]:
    return sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / layer).rglob("*.py"))


def tree(module: str) -> ast.AST:
    return ast.parse((REPOSITORY / module).read_text(encoding="utf-8"))


def imported(module: str) -> set[str]:
    """The dotted name of everything that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def importers(layer: str, package: str) -> set[str]:
    """The modules of a layer that import a package or something in it."""
    return {
        module
        for module in modules(layer)
        if any(name == package or name.startswith(f"{package}.") for name in imported(module))
    }


def calls(module: str) -> Iterator[tuple[str, str]]:
    """Every call of an attribute of a plain name: (name, attribute)."""
    for node in ast.walk(tree(module)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            yield node.func.value.id, node.func.attr


def callers(layer: str, *wanted: tuple[str, str]) -> set[str]:
    return {module for module in modules(layer) if set(wanted) & set(calls(module))}


@pytest.mark.parametrize(
    ("layer", "package"),
    [
        ("trainer", "prefect"),
        ("trainer", "tasks"),
        ("trainer", "flows"),
        ("tasks", "flows"),
        ("flows", "torch"),
        ("flows", "deepspeed"),
        ("tasks", "deepspeed"),
        *((layer, "tests") for layer in LAYERS),
    ],
)
def test_a_layer_never_imports(layer, package):
    assert importers(layer, package) == set()


@pytest.mark.parametrize(
    ("package", "owners"),
    [
        ("deepspeed", {f"trainer/{name}.py" for name in ("background_saving", "engine", "experts", "ulysses")}),
        ("mlflow", {"trainer/tracking.py"}),
        ("pyarrow", {"trainer/data/packing.py", "trainer/data/shards.py"}),
        ("fcntl", {"trainer/durable.py"}),
    ],
)
def test_inside_the_trainer_each_outside_thing_has_one_owner(package, owners):
    assert importers("trainer", package) == owners


def test_inside_the_trainer_only_the_launcher_and_its_helper_start_processes():
    starters = importers("trainer", "subprocess") | importers("trainer", "multiprocessing")
    starters |= callers("trainer", *PROCESS_CALLS)
    assert "trainer/launcher.py" in starters or "trainer/processes.py" in starters
    assert starters <= {"trainer/launcher.py", "trainer/processes.py"}


def test_only_the_checkpoint_module_writes_seals_and_loads_checkpoints():
    assert callers("trainer", ("engine", "save_checkpoint"), ("engine", "load_checkpoint")) == {"trainer/checkpoint.py"}
    assert callers("trainer", ("torch", "save")) == {"trainer/background_saving.py"}
    assert callers("trainer", ("torch", "load")) == {"trainer/background_saving.py"}
    assert importers("trainer", "trainer.durable.seal") == {"trainer/checkpoint.py"}
    for layer in ("tasks", "flows"):
        assert callers(layer, ("torch", "save"), ("torch", "load")) == set()


def test_no_module_starts_prefect_outside_tasks_and_flows_and_none_uses_wildcards():
    for layer in LAYERS:
        for module in modules(layer):
            assert not any(name.endswith(".*") for name in imported(module)), module


def test_every_module_says_what_it_is():
    for layer in LAYERS:
        for module in modules(layer):
            assert ast.get_docstring(tree(module)), f"{module} has no docstring"


def loaded_by(code: str) -> set[str]:
    """The heavy packages in memory after a program ran."""
    program = f"{code}\nimport json, sys\nsys.stderr.write(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in json.loads(done.stderr)} & set(HEAVY)


@pytest.mark.parametrize(
    "code",
    [
        "import flows.cli",
        "import contextlib, flows.cli\nwith contextlib.suppress(SystemExit):\n    flows.cli.main(['--help'])",
        "import contextlib, flows.cli\nwith contextlib.suppress(SystemExit):\n    flows.cli.main(['run', '--help'])",
        "import trainer.errors, trainer.durable, trainer.journal",
    ],
    ids=["import", "--help", "run --help", "plain modules"],
)
def test_help_answers_at_once_because_nothing_heavy_is_loaded(code):
    assert loaded_by(code) == set()


def test_the_configuration_is_read_without_the_heaviest_packages():
    loaded = loaded_by("from flows.config import load_config\nload_config('quickstart')")
    assert not loaded & {"torch", "mlflow", "transformers", "deepspeed", "datasets"}

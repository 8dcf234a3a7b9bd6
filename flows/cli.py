"""The command line. Everything heavy is imported inside the commands, so that --help answers at once."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 75


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 all worked, 2 the user can mend it, 1 anything else."""
    # unattended and offline use is the rule here: nothing calls home unless the user says so
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "forgeline")  # the run's page shows what its stages log
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except KeyboardInterrupt as interruption:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return EXIT_TERMINATED if isinstance(interruption, _Terminated) else EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except Exception as error:
        from trainer.errors import ForgelineError

        if not isinstance(error, ForgelineError):
            raise
        print(f"forgeline: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forgeline", description="From raw text to a registered, evaluated language model."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=run)
        return added

    def takes_config(added: argparse.ArgumentParser) -> None:
        added.add_argument("config", metavar="CONFIG", help="a YAML file, or the name of a preset in configs/")
        added.add_argument(
            "--set",
            dest="overrides",
            metavar="SECTION.KEY=VALUE",
            action="append",
            default=[],
            help="set a value over the file's (the value is YAML); may be repeated",
        )
        added.add_argument("--name", help="another name for the run")

    def prints_json(added: argparse.ArgumentParser) -> None:
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")

    run = command("run", _run, "run the pipeline; the same name with the same settings resumes, or is found finished")
    takes_config(run)
    prints_json(run)
    plan = command("plan", _plan, "check everything that can be checked, and say what the run will cost")
    takes_config(plan)
    prints_json(plan)
    data = command("data", _data, "look into a shard set")
    data.add_argument(
        "action", choices=["info", "verify"], help="info: what is in it; verify: is every byte as recorded"
    )
    data.add_argument("directory", metavar="DIR")
    prints_json(data)
    why = command("why", _why, "the way back from a model: checkpoint, run, config, tokenizer, shards, raw files")
    why.add_argument("model", metavar="MODEL", help="an export directory, models:/NAME@ALIAS or models:/NAME/VERSION")
    prints_json(why)
    generate = command("generate", _generate, "let a model continue a text")
    generate.add_argument(
        "model", metavar="MODEL", help="an export directory, models:/NAME@ALIAS or models:/NAME/VERSION"
    )
    generate.add_argument("--prompt", required=True, metavar="TEXT")
    generate.add_argument("--tokens", type=_positive, default=100, help="most tokens to add (default 100)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    generate.add_argument("--seed", type=int, default=0)
    config = command("config", _config, "print every configuration key with its default, unit and meaning")
    config.add_argument("--json-schema", action="store_true", help="the same as a JSON schema, for editors")
    up = command("up", _up, "start Prefect, MLflow and a worker on 127.0.0.1, deploy, and run until Ctrl-C")
    up.add_argument("--prefect-port", type=int, default=4200, help="port of the Prefect server (default 4200)")
    up.add_argument("--mlflow-port", type=int, default=5000, help="port of the MLflow server (default 5000)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _load(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    from flows.config import load_config

    overrides = {}
    for item in options.overrides:
        key, value = _override(item)
        overrides[key] = value
    return load_config(options.config, overrides, options.name), overrides


def _override(item: str) -> tuple[str, Any]:
    import yaml

    from flows.config import parse_yaml
    from trainer.errors import ConfigError

    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {item}: write it as section.key=value.")
    try:
        return key, parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {item}: the value is not valid YAML ({error}).") from None


def _run(options: argparse.Namespace) -> int:
    from flows.display import display

    with display(options.json) as show:
        _, overrides = _load(options)
        from tasks.home import Home
        from tasks.services import ensure_prefect_server

        ensure_prefect_server(Home.locate(), meanwhile=_import_what_a_run_needs)
        signal.signal(signal.SIGTERM, _terminate)
        from flows.train import train

        summary = train(options.config, overrides, options.name)
    if options.json:
        print(summary.model_dump_json())
    else:
        show.summary(summary)
    return 0


def _import_what_a_run_needs() -> None:
    import mlflow  # noqa: F401  # needed at the end of every run

    import flows.train  # noqa: F401


class _Terminated(KeyboardInterrupt):
    """SIGTERM: ends a run as Ctrl-C does, with an exit code of its own."""


def _terminate(*_: Any) -> None:
    raise _Terminated


def _plan(options: argparse.Namespace) -> int:
    config, _ = _load(options)
    from tasks.home import Home
    from tasks.plan import plan

    facts = plan(Home.locate(), config.data, config.model, config.train).facts
    if options.json:
        print(json.dumps({"name": config.name, **facts}))
    else:
        from flows.display import plan_table

        plan_table(config.name, facts)
    return 0


def _data(options: argparse.Namespace) -> int:
    from pathlib import Path

    from trainer.data.shards import ShardSet
    from trainer.durable import faults, read_manifest

    directory = Path(options.directory)
    if options.action == "info":
        from tasks.tokenize import describe

        return _print(describe(directory), options.json)
    found = faults(directory)
    manifest = read_manifest(directory)
    if manifest is None or not found:
        manifest = ShardSet.open(directory).manifest
    files = len(manifest.get("files", []))
    if options.json:
        print(json.dumps({"directory": str(directory), "files": files, "valid": not found, "faults": found}))
    else:
        print("\n".join(found) if found else f"{directory}: all {files} files are as the manifest says")
    return 1 if found else 0


def _why(options: argparse.Namespace) -> int:
    from tasks.home import Home
    from tasks.lineage import why

    return _print(why(Home.locate(), options.model), options.json)


def _print(value: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(value))
    else:
        import yaml

        print(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), end="")
    return 0


def _generate(options: argparse.Namespace) -> int:
    from tasks.evaluate import load_export
    from tasks.home import Home
    from tasks.register import locate_model

    directory = locate_model(Home.locate(), options.model)
    from trainer.evaluation import generate
    from trainer.model import load_tokenizer

    model = load_export(directory)
    print(generate(model, load_tokenizer(directory), options.prompt, options.tokens, options.temperature, options.seed))
    return 0


def _config(options: argparse.Namespace) -> int:
    from flows.config import describe_config, json_schema

    print(json_schema() if options.json_schema else describe_config())
    return 0


def _up(options: argparse.Namespace) -> int:
    from tasks.home import Home
    from tasks.services import serve

    return serve(Home.locate(), options.prefect_port, options.mlflow_port)

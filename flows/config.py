"""The whole configuration: the stages' own sections composed, read from YAML, with errors that point to the line."""

import difflib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge
from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo

from tasks.evaluate import EvaluateConfig
from tasks.register import RegisterConfig
from tasks.tokenize import DataConfig
from trainer.config import ModelConfig, TrainConfig
from trainer.errors import ConfigError
from trainer.settings import OPERATIONAL, Settings, is_operational, nearest

PRESETS = Path(__file__).resolve().parent.parent / "configs"


class RetryConfig(Settings):
    """How often a stage whose failure can pass is tried again."""

    limit: Annotated[int, Ge(0), OPERATIONAL] = 3
    """Retries of a stage."""
    delay_seconds: Annotated[float, Ge(0), OPERATIONAL] = 10
    """Wait before the first retry; it doubles each time."""


class RunConfig(Settings):
    """One run, from text to registered model."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """The run's name: its directories, its MLflow experiment, and by default its registered model."""
    data: DataConfig
    """The text, and how it becomes training sequences."""
    model: ModelConfig = ModelConfig()
    """The model."""
    train: TrainConfig
    """The training."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """The evaluation."""
    register_: Annotated[RegisterConfig, Field(alias="register")] = RegisterConfig()
    """The registration."""
    retry: RetryConfig = RetryConfig()
    """Retries of failed stages."""

    @property
    def model_name(self) -> str:
        """The registered model's name."""
        return self.register_.name or self.name

    def parameters(self) -> dict[str, str]:
        """Every setting by its dotted key, for MLflow."""
        return {
            key: json.dumps(value) if isinstance(value, (list, dict)) else str(value)
            for key, value in _flat(self.model_dump(mode="json", by_alias=True))
        }


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            pairs += _flat(item, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, item))
    return pairs


def load_config(preset: str, overrides: dict[str, Any] | None = None, name: str | None = None) -> RunConfig:
    """Read a configuration.

    Args:
        preset: a YAML file, or the name of one in configs/.
        overrides: dotted keys to values, set over the file's.
        name: another name for the run.

    Raises:
        ConfigError: it cannot be read or is not valid; the message names file, line and key.
    """
    path = _locate(preset)
    content, lines = _parse(path)
    origin = _Origin(path, lines, {tuple(key.split(".")): "--set" for key in overrides or {}})
    for key, value in (overrides or {}).items():
        _set(content, key, value)
    if name is not None:
        content["name"], origin.overridden["name",] = name, "--name"
    _refuse_unplain(content, (), origin)
    try:
        return RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error, origin))) from None


@dataclass
class _Origin:
    """Where each key was set."""

    path: Path
    lines: dict[tuple[str, ...], int]
    overridden: dict[tuple[str, ...], str]

    def of(self, place: tuple[str, ...]) -> str:
        """The option or the file's line that set the key at ``place``, or the section around it."""
        around = [place[:length] for length in range(len(place), 0, -1)]
        options = (self.overridden[part] for part in around if part in self.overridden)
        lines = (f"{self.path}:{self.lines[part]}" for part in around if part in self.lines)
        return next(options, next(lines, str(self.path)))


def _locate(preset: str) -> Path:
    for path in (Path(preset), PRESETS / f"{preset}.yaml"):
        if os.path.isfile(path):  # no exception for a name that is too long
            return path
    if os.path.exists(preset):
        raise ConfigError(f"{preset}: is not a file of YAML.")
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    close = difflib.get_close_matches(preset, names, 1)
    hint = f"Did you mean {close[0]}?" if close else f"Presets: {', '.join(names)}."
    raise ConfigError(f"{preset}: no such file, and no preset of that name. {hint}")


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-3 is a number (as in YAML 1.2), and a date is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """The plain value that a YAML text means.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    return yaml.load(text, _Loader)


def _parse(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """The file's content, and the line of each key."""
    lines: dict[tuple[str, ...], int] = {}

    def visit(node: yaml.Node, where: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                place = (*where, str(key.value))
                if place in lines:
                    raise ConfigError(
                        f"{path}:{key.start_mark.line + 1}: {'.'.join(place)} is set a second time "
                        f"(first on line {lines[place]})."
                    )
                lines[place] = key.start_mark.line + 1
                visit(value, place)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                lines[(*where, str(number))] = value.start_mark.line + 1
                visit(value, (*where, str(number)))

    try:
        text = path.read_text(encoding="utf-8")
        visit(yaml.compose(text) or yaml.MappingNode("", []), ())
        content = parse_yaml(text) or {}
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: should hold sections such as data: and train:, not a {type(content).__name__}.")
    return content, lines


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        if content.get(section) is None:
            content[section] = {}
        inner = content[section]
        if isinstance(inner, str) and section == "tokenizer":
            inner = content[section] = {"type": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: {section} is no section.")
        content = inner
    content[last] = value


def _refuse_unplain(value: Any, place: tuple[str, ...], origin: _Origin) -> None:
    """Refuse what has no stable serialisation: it would only fail later, far from its line."""
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_unplain(item, (*place, str(key)), origin)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_unplain(item, (*place, str(number)), origin)
    elif not (value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))):
        raise ConfigError(f"{origin.of(place)}: {'.'.join(place)}: {value!r} is not a text or a finite number.")


def _explain(error: ValidationError, origin: _Origin) -> list[str]:
    messages = []
    for problem in error.errors():
        place = tuple(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "value_error" and text.partition(":")[0].isidentifier():
            field, _, text = text.partition(": ")  # our own validators begin with the field that is wrong
            place = (*place, field)
        key = ".".join(place)
        if problem["type"] == "extra_forbidden":
            known = _keys_of(place[:-1])
            close = difflib.get_close_matches(place[-1], known, 1)
            text = (
                f"unknown key. Did you mean {close[0]}?" if close else f"unknown key. Known here: {', '.join(known)}."
            )
        elif problem["type"] == "missing":
            text = "is required and not set."
        elif problem["type"] == "literal_error":
            allowed = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
            text = f"{text} (it is {problem['input']!r}).{nearest(str(problem['input']).lower(), allowed)}"
        elif problem["type"] != "value_error":
            text = f"{text} (it is {problem['input']!r})"
        messages.append(f"{origin.of(place)}: {key}: {text}")
    return messages


def _keys_of(place: tuple[str, ...]) -> list[str]:
    """The keys that the section at ``place`` knows."""
    model: type[Settings] = RunConfig
    for part in place:
        field = next((f for name, f in model.model_fields.items() if (f.alias or name) == part), None)
        if field is not None:
            model = _section_of(field) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_of(field: FieldInfo) -> type[Settings] | None:
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


def describe_config() -> str:
    """Every key with type, default and meaning, as Markdown."""
    introduction = [
        "# Configure",
        "",
        "Every key of a configuration, as `forgeline config` prints it. `forgeline config --json-schema` is the same "
        "for",
        "editors. Keys marked *changes no output* are no part of a run's fingerprint: a run goes on where they change.",
    ]
    return "\n".join([*introduction, *_describe(RunConfig, "", {})])


def _describe(model: type[Settings], prefix: str, described: dict[type[Settings], str]) -> list[str]:
    rows: list[str] = []
    sections: list[str] = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        section = _section_of(field)
        if section and section in described:
            rows.append(f"- `{key}`: {field.description} The same keys as `{described[section]}`.")
        elif section:
            described[section] = key
            listed = "list" in str(field.annotation)
            sections += [
                "",
                f"## {key}",
                "",
                (section.__doc__ or "").strip(),
                *_describe(section, f"{key}{'[]' if listed else ''}.", described),
            ]
        else:
            default = "required" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            cached = " *(changes no output)*" if is_operational(field) else ""
            rows.append(f"- `{key}` ({_type_name(field.annotation)}, default {default}): {field.description}{cached}")
    return ["", *rows, *sections] if rows else sections


def _type_name(kind: Any) -> str:
    """A type as a reader writes it: int or none, a choice of words, a list of str."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_name(inner[0])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " | ".join(_type_name(part) for part in inner)
    if origin is list:
        return f"list of {_type_name(inner[0])}"
    return "none" if kind is type(None) else "mapping" if origin is dict else kind.__name__


def json_schema() -> str:
    """The JSON schema, for editors."""
    return json.dumps(RunConfig.model_json_schema(by_alias=True), indent=2)

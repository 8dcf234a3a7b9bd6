"""The configuration: every mistake is named with file, line, key and remedy; every key is documented."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from flows.cli import main
from flows.config import PRESETS, RunConfig, describe_config, json_schema, load_config
from trainer.errors import ConfigError
from trainer.settings import Settings

BASE = """\
name: x
data:
  sources: [a.txt]
train:
  steps: 3
"""
SHIPPED = sorted(PRESETS.glob("*.yaml"))


@pytest.fixture
def load(tmp_path) -> Any:
    """Load a text as a configuration file."""

    def loaded(text: str | bytes, overrides: dict[str, Any] | None = None, name: str | None = None) -> RunConfig:
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config(str(path), overrides, name)

    return loaded


@pytest.fixture
def refusal(load, tmp_path) -> Any:
    """The message that refuses a configuration, with the directory of the file cut out."""

    def refused(text: str | bytes, overrides: dict[str, Any] | None = None, name: str | None = None) -> str:
        with pytest.raises(ConfigError) as error:
            load(text, overrides, name)
        return str(error.value).replace(f"{tmp_path}/", "")

    return refused


def test_the_smallest_configuration_needs_a_name_sources_and_a_length(load, refusal):
    assert load(BASE).train.steps == 3
    assert refusal("") == "\n".join(f"c.yaml: {key}: is required and not set." for key in ("name", "data", "train"))


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("  stepz: 4\n", "c.yaml:6: train.stepz: unknown key. Did you mean steps?"),
        ("trian: {}\n", "c.yaml:6: trian: unknown key. Did you mean train?"),
        ("registr: {}\n", "c.yaml:6: registr: unknown key. Did you mean register?"),
        ("  schedule: {wamup: 0.1}\n", "c.yaml:6: train.schedule.wamup: unknown key. Did you mean warmup?"),
        ("  checkpoint:\n    evry: 1\n", "c.yaml:7: train.checkpoint.evry: unknown key. Did you mean every?"),
        ("retry: {qqq: 1}\n", "c.yaml:6: retry.qqq: unknown key. Known here: limit, delay_seconds."),
        ("5: x\n", "c.yaml:6: 5: Keys should be strings"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_name_file_and_line(refusal, addition, message):
    assert refusal(BASE + addition).startswith(message)


def test_an_unknown_key_of_a_source_is_refused_at_its_line(refusal):
    text = BASE.replace("[a.txt]", "\n    - a.txt\n    - path: b.txt\n      wieght: 2")
    assert refusal(text) == "c.yaml:6: data.sources.1.wieght: unknown key. Did you mean weight?"


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("  steps: 4\n", "c.yaml:6: train.steps is set a second time (first on line 5)."),
        ("data: {}\n", "c.yaml:6: data is set a second time (first on line 2)."),
        (
            "  muon: {momentum: 1, momentum: 1}\n",
            "c.yaml:6: train.muon.momentum is set a second time (first on line 6).",
        ),
    ],
)
def test_a_key_that_is_set_twice_is_refused_with_both_lines(refusal, addition, message):
    assert refusal(BASE + addition) == message


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        ("  global_batch: many\n", "c.yaml:6: train.global_batch: Input should be a valid integer"),
        ("  global_batch: 0\n", "c.yaml:6: train.global_batch: Input should be greater than or equal to 1 (it is 0)"),
        ("  global_batch: 1.5\n", "c.yaml:6: train.global_batch: Input should be a valid integer"),
        ("  learning_rate: -1\n", "c.yaml:6: train.learning_rate: Input should be greater than 0 (it is -1)"),
        ("  learning_rate: .inf\n", "c.yaml:6: train.learning_rate: inf is not a text or a finite number."),
        ("  learning_rate: 1e999\n", "c.yaml:6: train.learning_rate: inf is not a text or a finite number."),
        ("  learning_rate: .nan\n", "c.yaml:6: train.learning_rate: nan is not a text or a finite number."),
        ("  optimizer: sgd\n", "c.yaml:6: train.optimizer: Input should be 'adamw'"),
        (
            "  optimizer: AdamW2\n",
            "c.yaml:6: train.optimizer: Input should be 'adamw', 'adafactor', 'lion' or 'muon' (it is 'AdamW2'). "
            "Did you mean adamw?",
        ),
        (
            "  schedule: {warmup: 0.1, warmup_steps: 5}\n",
            "c.yaml:6: train.schedule.warmup_steps: set at most one of warmup, warmup_steps and warmup_tokens",
        ),
        ("  precision: [fp32]\n", "c.yaml:6: train.precision: Input should be 'auto'"),
        ("  schedule: cosine\n", "c.yaml:6: train.schedule: Input should be a valid dictionary"),
        ("model: {config: {a: .inf}}\n", "c.yaml:6: model.config.a: inf is not a text or a finite number."),
        ("model: {config: {a: !!set {x, y}}}\n", "c.yaml:6: model.config.a: {"),
        ("model: {config: {a: !!binary aGk=}}\n", "c.yaml:6: model.config.a: b'hi' is not a text"),
        ("model: {config: {1: x}}\n", "c.yaml:6: model.config.1"),
        ("model: {pretrained: gpt2, config: {n_layer: 2}}\n", "c.yaml:6: model.config: cannot be set together"),
        ("model: {adapter: {rank: 4}}\n", "c.yaml:6: model.adapter: needs pretrained, the weights that it adapts"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_at_its_line(refusal, addition, message):
    assert refusal(BASE + addition).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "c.yaml:1: not valid YAML: mapping values are not allowed here"),
        (BASE + "model: {config: [\n", "c.yaml:7: not valid YAML"),
        (BASE + "\tmodel: {}\n", "c.yaml:6: not valid YAML"),
        (BASE + "model: \0\n", "c.yaml: not valid YAML: unacceptable character"),
        (BASE + "? {a: b}\n: x\n", "c.yaml:6: not valid YAML: found unhashable key"),
        ("a: &x {b: *x}\n", "c.yaml: not valid YAML"),
        ("a: *b\n", "c.yaml:1: not valid YAML: found undefined alias"),
        ("a: !!python/object:os.system x\n", "c.yaml:1: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "c.yaml:2: not valid YAML: but found another document"),
        ("[1, 2]", "c.yaml: should hold sections such as data: and train:, not a list."),
        ("text", "c.yaml: should hold sections such as data: and train:, not a str."),
        (b"\xff\xfe", "c.yaml: cannot be read: 'utf-8'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_with_its_line(refusal, text, message):
    assert refusal(text).startswith(message)


def test_every_mistake_of_a_file_is_named_at_once(refusal):
    assert refusal(BASE + "  stepz: 4\n  seed: x\nfoo: 1\n").count("\n") == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1.0e-3", 0.001), ("2E+1", 20.0), (".5e1", 5.0), ("0.001", 0.001), ("'3'", "3"), ("5", 5)],
)
def test_numbers_are_numbers_however_people_write_them(load, text, value):
    """PyYAML alone takes 1e-3 for a text, as YAML 1.1 does."""
    found = load(f"{BASE}  deepspeed: {{a: {text}}}\n").train.deepspeed["a"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["2024-01-01", "2024-13-45", "1e-3x", "v1e5", "1.2.3"])
def test_what_only_looks_like_a_date_or_a_number_is_a_text(load, text):
    assert load(f"{BASE}  deepspeed: {{a: {text}}}\n").train.deepspeed["a"] == text


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{}", "train.steps: set exactly one of steps, tokens and epochs (set: none)"),
        ("{steps: 1, tokens: 5}", "train.steps: set exactly one of steps, tokens and epochs (set: steps, tokens)"),
        ("{tokens: 5, epochs: 1}", "train.steps: set exactly one of steps, tokens and epochs (set: tokens, epochs)"),
        ("{steps: 1, ranks: 3}", "train.global_batch: 32 sequences do not divide over 3 data-parallel ranks"),
        (
            "{steps: 1, micro_batch: 5}",
            "train.micro_batch: each of 1 data-parallel ranks has 32 sequences of the global batch, which",
        ),
        ("{steps: 1, ranks: 2, micro_batch: 32}", "train.micro_batch: each of 2 data-parallel ranks has 16 sequences"),
        (
            "{steps: 1, optimizer: muon, precision: bf16}",
            "train.precision: bf16 shards or flattens the matrices that optimizer=muon updates whole; "
            "use precision auto or fp32 or autocast, or optimizer adamw or lion",
        ),
        (
            "{steps: 1, optimizer: muon, zero_stage: 1, offload: {optimizer: cpu}}",
            "train.optimizer: muon is sharded by whole parameters, without DeepSpeed's offload.optimizer",
        ),
        ("{steps: 1, optimizer: adafactor, zero_stage: 2}", "train.zero_stage: 2 shards or flattens the matrices"),
    ],
)
def test_settings_that_clash_are_refused_with_the_numbers_that_clash(refusal, train, message):
    assert refusal(f"name: x\ndata: {{sources: [a]}}\ntrain: {train}\n").startswith(f"c.yaml:3: {message}")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{sources: []}", "data.sources: List should have at least 1 item"),
        ("{sources: a.txt}", "data.sources: Input should be a valid list"),
        ("{sources: [{}]}", "data.sources.0.path: set either path or dataset"),
        ("{sources: [{path: a, dataset: b}]}", "data.sources.0.path: set either path or dataset"),
        (
            "{sources: [{path: a, weight: 1}, b]}",
            "data.sources: set a weight for all of them or for none (source 1 has",
        ),
        ("{sources: [{path: a, weight: 0}]}", "data.sources.0.weight: Input should be greater than 0"),
        ("{sources: [a], tokenizer: {type: pretrained}}", "data.tokenizer.path: set it for type: pretrained"),
        ("{sources: [a], tokenizer: {path: x}}", "data.tokenizer.path: set it for type: pretrained"),
        (
            "{sources: [a], tokenizer: {vocabulary_size: 256}}",
            "data.tokenizer.vocabulary_size: Input should be greater",
        ),
        ("{sources: [a], validation_fraction: 1}", "data.validation_fraction: Input should be less than 1"),
    ],
)
def test_data_settings_that_clash_are_refused_by_key(refusal, data, message):
    assert refusal(f"name: x\ndata: {data}\ntrain: {{steps: 1}}\n").startswith(f"c.yaml:2: {message}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.stepz": 5}, "--set: train.stepz: unknown key. Did you mean steps?"),
        ({"train.steps": "many"}, "--set: train.steps: Input should be a valid integer"),
        ({"train.schedule": {"wamup": 1}}, "--set: train.schedule.wamup: unknown key. Did you mean warmup?"),
        ({"data.sources": [{"pth": "a"}]}, "--set: data.sources.0.pth: unknown key. Did you mean path?"),
        ({"model.config.a": float("nan")}, "--set: model.config.a: nan is not a text or a finite number."),
        ({"model.config.a": {1}}, "--set: model.config.a: {1} is not a text"),
        ({"train.steps.x": 1}, "--set train.steps.x: steps is no section."),
        ({"data.sources.0.path": "x"}, "--set data.sources.0.path: sources is no section."),
        ({"train.micro_batch": 7}, "--set: train.micro_batch: each of 1 data-parallel ranks has 32"),
    ],
)
def test_a_mistake_in_an_override_points_to_set_and_not_to_the_file(refusal, overrides, message):
    assert refusal(BASE, overrides).startswith(message)


def test_a_name_that_cannot_be_one_points_to_the_option(refusal):
    assert refusal(BASE, None, "bad name!").startswith("--name: name: String should match")
    assert refusal(BASE.replace("name: x", "name: ../x")).startswith("c.yaml:1: name: String should match")


def test_overrides_win_and_reach_into_sections_that_the_file_lacks(load):
    config = load(BASE, {"train.steps": 9, "train.schedule.warmup": 0.5, "model.config.hidden_size": 64}, "y")
    assert (config.name, config.train.steps, config.train.schedule.warmup) == ("y", 9, 0.5)
    assert config.model.config == {"hidden_size": 64}
    assert load("name: x\ndata: {sources: [a]}\ntrain:\n", {"train.steps": 2}).train.steps == 2
    assert load(BASE, {"train.steps": None, "train.epochs": 1}).train.epochs == 1


def test_short_forms_of_sources_and_tokenizers_mean_the_long_ones(load):
    assert load(BASE).data.sources[0].path == "a.txt"
    for text, kind, path in [("byte", "byte", None), ("./tokenizer.json", "pretrained", "./tokenizer.json")]:
        tokenizer = load(BASE.replace("train:", f"  tokenizer: {text}\ntrain:")).data.tokenizer
        assert (tokenizer.type, tokenizer.path) == (kind, path)
    short = BASE.replace("train:", "  tokenizer: bpe\ntrain:")
    assert load(short, {"data.tokenizer.vocabulary_size": 500}).data.tokenizer.vocabulary_size == 500


def test_an_unknown_preset_suggests_the_nearest_or_lists_them(tmp_path):
    with pytest.raises(ConfigError, match=r"quickstrat: no such file.* Did you mean quickstart\?"):
        load_config("quickstrat")
    with pytest.raises(ConfigError, match=r"zzz: no such file.* Presets: .*quickstart"):
        load_config("zzz")
    with pytest.raises(ConfigError, match="is not a file of YAML"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_preset_is_valid_by_path_and_by_name(path):
    assert load_config(str(path)) == load_config(path.stem)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_json_schema_accepts_every_shipped_preset(path):
    jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(json_schema()))


def test_the_json_schema_is_one_and_refuses_what_the_loader_refuses():
    schema = json.loads(json_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    good = {"name": "x", "data": {"sources": ["a.txt"], "tokenizer": "byte"}, "train": {"steps": 3}}
    jsonschema.validate(good, schema)
    for bad in ({**good, "trian": {}}, {**good, "name": "a b"}, {**good, "train": {"steps": "x"}}, {"name": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def keys(model: type[BaseModel], prefix: str = "") -> list[tuple[str, str | None]]:
    """Every key of the configuration, and its description."""
    found: list[tuple[str, str | None]] = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        found.append((key, field.description))
        for part in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Settings):
                found += keys(part, f"{key}{'[]' if typing.get_origin(field.annotation) is list else ''}.")
    return found


def test_every_key_has_a_description_and_is_listed_by_the_config_command(capsys):
    assert main(["config"]) == 0
    listed = capsys.readouterr().out
    assert listed == describe_config() + "\n"
    for key, description in keys(RunConfig):
        assert description, f"{key} has no docstring"
    listed_keys = set(re.findall(r"^(?:## |- `)([a-z0-9_.\[\]]+)", listed, re.MULTILINE))
    assert {key for key, _ in keys(RunConfig) if not key.startswith("data.validation_sources[]")} == listed_keys
    assert "None" not in [line.split(": ")[-1] for line in listed.splitlines()]


def test_every_section_says_what_it_is():
    schema = json.loads(json_schema())
    assert all(section.get("description") for section in schema["$defs"].values())


def test_the_config_command_says_which_keys_change_no_output(capsys):
    main(["config"])
    marked = {
        line.split("`")[1] for line in capsys.readouterr().out.splitlines() if line.endswith("*(changes no output)*")
    }
    assert {"train.micro_batch", "train.threads", "train.ranks", "retry.limit"} <= marked
    assert not {"train.steps", "train.seed", "data.sequence_length"} & marked


def test_the_parameters_for_mlflow_name_every_key_once(load):
    parameters = load(BASE, {"model.config.hidden_size": 64}).parameters()
    assert parameters["train.steps"] == "3"
    assert parameters["model.config.hidden_size"] == "64"
    assert parameters["register.name"] == "None"
    assert json.loads(parameters["data.sources"])[0]["path"] == "a.txt"


def test_the_shipped_presets_are_the_ones_that_are_found():
    assert Path(__file__).parents[2] / "configs" == PRESETS
    assert "quickstart" in [path.stem for path in SHIPPED]

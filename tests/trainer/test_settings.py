"""Fingerprints: stable, strict, and of exactly those settings that change what comes out."""

import datetime
import json
import math
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotated_types import Ge
from pydantic import ValidationError

from flows.config import RunConfig
from trainer.settings import OPERATIONAL, Settings, fingerprint, is_operational, nearest

OPERATIONAL_KEYS = {
    "data.bad_record_limit",
    "data.processes",
    "data.runner",
    "evaluate.batch",
    "model.attention",
    "retry.delay_seconds",
    "retry.limit",
    "train.activation_checkpointing.every",
    "train.activation_checkpointing.mode",
    "train.activation_checkpointing.offload",
    "train.checkpoint.every",
    "train.checkpoint.keep",
    "train.checkpoint.keep_every",
    "train.checkpoint.keep_best",
    "train.evaluation.every",
    "train.evaluation.batches",
    "train.compile",
    "train.cross_entropy",
    "train.hang_timeout",
    "train.launcher",
    "train.micro_batch",
    "train.parallel.expert",
    "train.parallel.pipeline",
    "train.parallel.sequence",
    "train.parallel.tensor",
    "train.profile",
    "train.flops_profile_step",
    "train.ranks",
    "train.tensorboard",
    "train.threads",
}
"""What changes only how the work is done. Everything else re-addresses the outputs: add to this list with care."""
BASE = RunConfig.model_validate({"name": "x", "data": {"sources": ["a.txt"]}, "train": {"steps": 3}})


def leaves(section: Settings, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every field that is no section itself, through every section of a configuration."""
    paths: list[tuple[str | int, ...]] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Settings):
            paths += leaves(value, (*prefix, name))
        elif isinstance(value, list) and value and isinstance(value[0], Settings):
            paths += leaves(value[0], (*prefix, name, 0))
        else:
            paths.append((*prefix, name))
    return paths


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """A copy of a section with another value at ``path``; validators do not run, for they would couple fields."""
    if not path:
        return new
    first, *rest = path
    if isinstance(first, int):
        return [*value[:first], replaced(value[first], tuple(rest), new), *value[first + 1 :]]
    return value.model_copy(update={first: replaced(getattr(value, first), tuple(rest), new)})


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        value = value[part] if isinstance(part, int) else getattr(value, part)
    return value


def key(path: tuple[str | int, ...]) -> str:
    return ".".join(str(part).removesuffix("_") for part in path if isinstance(part, str))


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "another"]
    if isinstance(value, dict):
        return {**value, "another": 1}
    return "set"


@pytest.mark.parametrize("path", leaves(BASE), ids=key)
def test_a_setting_changes_the_identity_unless_it_only_changes_how_the_work_is_done(path):
    other = replaced(BASE, path, changed(at(BASE, path)))
    assert other != BASE
    assert (other.identity() == BASE.identity()) == (key(path) in OPERATIONAL_KEYS)
    same = fingerprint("s", 1, config=other.identity()) == fingerprint("s", 1, config=BASE.identity())
    assert same == (key(path) in OPERATIONAL_KEYS)


def test_the_list_of_operational_settings_names_only_settings_that_exist():
    assert {key(path) for path in leaves(BASE)} >= OPERATIONAL_KEYS


class Marked(Settings):
    plain: typing.Annotated[int, Ge(0), OPERATIONAL] = 0
    optional: typing.Annotated[int, Ge(0), OPERATIONAL] | None = None
    optional_outside: typing.Annotated[int | None, OPERATIONAL] = None
    unmarked: typing.Annotated[int, Ge(0)] | None = None


def test_the_mark_counts_wherever_in_the_type_it_stands():
    marked = {name for name, field in Marked.model_fields.items() if is_operational(field)}
    assert marked == {"plain", "optional", "optional_outside"}
    assert Marked().identity() == {"unmarked": None}


def test_the_fingerprint_is_the_one_that_existing_work_directories_are_named_by():
    content = {"config": {"rate": 1e-3, "name": "Zoë", "on": True, "none": None}, "files": [["a", 1], ["b", 2]]}
    assert fingerprint("tokenize", 1, **content) == "1fcbde59854a5982"


def test_the_fingerprint_is_the_same_in_every_process_and_for_every_order_of_keys():
    code = "from trainer.settings import fingerprint; print(fingerprint('s', 1, a={'x': 1, 'y': [2.5, None]}, b='é'))"
    ours = fingerprint("s", 1, b="é", a={"y": (2.5, None), "x": 1})
    for seed in ("0", "1"):
        theirs = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        )
        assert theirs.stdout.strip() == ours


def test_the_stage_the_version_and_every_value_are_part_of_the_fingerprint():
    different = [
        fingerprint("a", 1, x=1),
        fingerprint("b", 1, x=1),
        fingerprint("a", 2, x=1),
        fingerprint("a", 1, x=2),
        fingerprint("a", 1, y=1),
        fingerprint("a", 1, x="1"),
        fingerprint("a", 1, x=1.0),
        fingerprint("a", 1, x=True),
        fingerprint("a", 1, x=None),
        fingerprint("a", 1, x=[1]),
        fingerprint("a", 1, x={"x": 1}),
    ]
    assert len(set(different)) == len(different)
    assert all(len(name) == 16 and set(name) <= set("0123456789abcdef") for name in different)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        {1, 2},
        frozenset(),
        object(),
        Path("/x"),
        b"bytes",
        datetime.date(2024, 1, 1),
        np.int64(3),
        np.float32(3),
        len,
        int,
        1j,
        iter([]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"key": (1, v)}], ids=["bare", "list", "dict"])
def test_a_value_without_a_stable_serialisation_is_refused_and_its_place_named(value, wrap):
    with pytest.raises(TypeError, match=r"fingerprint of stage\.config"):
        fingerprint("stage", 1, config=wrap(value))


@pytest.mark.parametrize("odd", [1, None, True, 1.5, ("a",)])
def test_a_key_that_is_no_text_is_refused(odd):
    with pytest.raises(TypeError, match="is not a string"):
        fingerprint("stage", 1, config={"a": {odd: 1}})


def test_settings_refuse_unknown_keys_changes_and_numbers_that_are_not_finite():
    class Section(Settings):
        rate: float = 1.0
        """A rate."""

    for bad in ({"rat": 1}, {"rate": math.inf}, {"rate": math.nan}, {"rate": "fast"}):
        with pytest.raises(ValidationError):
            Section.model_validate(bad)
    with pytest.raises(ValidationError):
        Section().rate = 2.0


def test_an_identity_is_plain_data():
    assert json.loads(json.dumps(BASE.identity())) == BASE.identity()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("hiden_size", " Did you mean hidden_size?"), ("zzz", ""), ("vocab_size", " Did you mean vocab_size?")],
)
def test_the_nearest_name_is_a_hint_where_one_is_near(name, hint):
    assert nearest(name, ["hidden_size", "vocab_size"]) == hint

"""The base of every configuration section: strict, immutable, and clear about identity.

A field either changes the bytes that a stage produces (the default) or is marked ``OPERATIONAL``:
it changes how the work is done (processes, retention, retries) and stays out of fingerprints.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema


class _Operational:
    """Marks a field that never changes the bytes of a stage's output."""

    def __repr__(self) -> str:
        return "OPERATIONAL"


OPERATIONAL = _Operational()


def is_operational(field: FieldInfo) -> bool:
    """Whether a field is marked ``OPERATIONAL``, on itself or inside an optional type."""
    return OPERATIONAL in field.metadata or any(
        OPERATIONAL in getattr(part, "__metadata__", ()) for part in get_args(field.annotation)
    )


class Settings(BaseModel):
    """A section of the configuration. The text under each field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def identity(self) -> dict[str, Any]:
        """The fields that change a stage's output, nested sections included, as plain data."""
        return {
            name: _identity_of(getattr(self, name))
            for name, field in type(self).model_fields.items()
            if not is_operational(field)
        }


class ShortSettings(Settings):
    """A section that a plain string is short for: its JSON schema says so."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        section = handler.resolve_ref_schema(handler(core_schema))
        described = {"description": section["description"]}
        return {**described, "anyOf": [{"type": "string"}, section]}


def _identity_of(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.identity()
    if isinstance(value, (list, tuple)):
        return [_identity_of(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _identity_of(item) for key, item in value.items()}
    return value


def fingerprint(stage: str, format_version: int, **content: Any) -> str:
    """The name of a stage's output: 16 hexadecimal digits (64 bits of SHA-256).

    Args:
        stage: the stage's name.
        format_version: raised whenever the same inputs give other bytes than before.
        content: plain data only: the identity of the configuration, fingerprints of the inputs.

    Raises:
        TypeError: a value has no stable serialisation (it is refused, never turned into a string).
    """
    _refuse_unstable(content, stage)
    text = json.dumps([stage, format_version, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _refuse_unstable(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"fingerprint of {where}: key {key!r} is not a string")
            _refuse_unstable(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _refuse_unstable(item, f"{where}[{position}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"fingerprint of {where}: {value!r} is not a finite number")
    elif not (value is None or isinstance(value, (str, int, bool))):
        raise TypeError(f"fingerprint of {where}: a {type(value).__name__} has no stable serialisation")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint naming the known name most like ``name``, beginning with a space; empty where none is like it."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {close[0]}?" if close else ""

"""Sources: from what the configuration names to files with content hashes."""

import fnmatch
import glob
import os
import string
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Gt
from pydantic import Field, model_validator

from tasks.home import FileHashes, Home
from tasks.remote import fetch
from trainer.errors import DataError
from trainer.settings import ShortSettings


class SourceConfig(ShortSettings):
    """One source of text. Set `path` or `dataset`; a plain string is short for `path`."""

    path: str | None = None
    """Path or URL of a file, directory or glob. `$NAME` is of the environment; `$PYTHON_STDLIB` is Python's library."""
    dataset: str | None = None
    """Hugging Face data set, by hub name; streamed."""
    subset: str | None = None
    """The data set's configuration."""
    split: str = "train"
    """The data set's split."""
    revision: str | None = None
    """The data set's branch, tag or commit. Unset: the newest commit at planning."""
    exclude: list[str] = Field(default_factory=list)
    """Patterns of paths to leave out, matched against the whole path or URL (`*` also matches `/`)."""
    text_field: str | None = None
    """Field that holds the text, for this source; unset, `data.text_field`."""
    weight: Annotated[float | None, Gt(0)] = None
    """Share of this source in training, relative to the others. Set for all sources or for none."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_origin(self) -> "SourceConfig":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("path: set either path or dataset")
        return self


@dataclass(frozen=True)
class SourceFile:
    """One input of a source: a local file, or a whole hub data set."""

    source: int
    """Position of its source in `data.sources`."""
    name: str
    """Its name in shards and manifests: the path below the source's fixed part, or the data set's name."""
    path: Path | None
    """Where the file is; None for a hub data set."""
    sha256: str
    """Content hash, or the data set's commit."""
    size: int
    """Bytes on disk; 0 where unknown."""
    config: SourceConfig

    def identity(self) -> list[Any]:
        """What of it changes the documents that come out."""
        return [self.source, self.name, self.sha256, self.config.text_field, self.config.subset, self.config.split]


def resolve(home: Home, sources: Iterable[SourceConfig], key: str) -> list[SourceFile]:
    """The files behind the sources, sorted within each, with their content hashes.

    Args:
        key: the configuration key, for messages.

    Raises:
        DataError: a source is missing or empty.
    """
    hashes = home.hashes()
    files: list[SourceFile] = []
    for number, source in enumerate(sources):
        found = [_hub_data_set(number, source)] if source.dataset else _files(home, hashes, number, source, key)
        files.extend(found)
    return files


def _files(home: Home, hashes: FileHashes, number: int, source: SourceConfig, key: str) -> list[SourceFile]:
    assert source.path is not None
    where = f"{key}[{number}]"
    pattern = string.Template(source.path).safe_substitute(
        {"PYTHON_STDLIB": sysconfig.get_path("stdlib"), **os.environ}
    )
    if "://" in pattern:
        found = fetch(home, pattern, source.exclude, where)
    else:
        found = _local(os.path.abspath(os.path.expanduser(pattern)), source, where)
    if not found:
        raise DataError(f"{where}: {source.path!r} holds no file{' that is not excluded' if source.exclude else ''}.")
    for path in found.values():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise DataError(f"{where}: the name of {os.fsencode(path)!r} is not UTF-8. Rename or exclude it.") from None
    try:
        return [
            SourceFile(number, name, path, digest, path.stat().st_size, source)
            for (name, path), digest in zip(found.items(), hashes.of(list(found.values())), strict=True)
        ]
    except OSError as error:
        raise DataError(f"{where}: {error.filename} cannot be read ({error.strerror}).") from None


def _local(pattern: str, source: SourceConfig, where: str) -> dict[str, Path]:
    """The files at an absolute path or pattern, by their names below its fixed part."""
    if os.path.isdir(pattern):
        paths, root = glob.glob(f"{glob.escape(pattern)}/**", recursive=True), pattern
    elif os.path.exists(pattern):
        paths, root = [pattern], os.path.dirname(pattern)
    else:
        paths = glob.glob(pattern, recursive=True)
        root = os.path.dirname(pattern[: min((pattern.find(c) for c in "*?[" if c in pattern), default=0)])
        if not paths:
            raise DataError(f"{where}: nothing is at {source.path!r} (looked at {pattern}). Check the path.")
    kept = {Path(path) for path in paths if not any(fnmatch.fnmatch(path, p) for p in source.exclude)}
    # of links that lead to one file, as in a loop, the shortest way
    files = {
        os.path.realpath(path): path for path in sorted(kept, key=lambda path: (len(path.parts), path), reverse=True)
    }
    return {str(path.relative_to(root)): path for path in sorted(files.values()) if path.is_file()}


def _hub_data_set(number: int, source: SourceConfig) -> SourceFile:
    from huggingface_hub import HfApi

    assert source.dataset is not None
    try:
        info = HfApi().dataset_info(source.dataset, revision=source.revision, timeout=30)
    except Exception as error:  # hub errors, connection errors and time-outs alike
        raise DataError(
            f"data.sources[{number}]: hub data set {source.dataset!r} cannot be reached ({type(error).__name__}). "
            "Check its name and the network, or name local files."
        ) from None
    return SourceFile(number, source.dataset, None, info.sha or "", 0, source)

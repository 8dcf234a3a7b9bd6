"""Remote files: local copies of what a URL names, fetched again when it has changed.

`HOME/downloads/<url>/<version>/<file>`: a version is the file's address and what its server says of its state, so that
a copy that is there is whole and current. `origin.json` beside them lists those of the last time.
"""

import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tasks.home import Home
from trainer.durable import exclusive, explained, fsync, write_json
from trainer.errors import DataError, ForgelineError, MachineError

logger = logging.getLogger("forgeline")

_VERSION_KEYS = (
    "ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime", "created", "generation", "updated",
    "md5Hash", "content_md5", "Content-MD5", "Digest", "blob_id",
)  # fmt: skip
"""What fsspec's file systems say about the version of a file, beside its size."""
_AT_ONCE = 8
"""Files that are fetched at the same time."""


def fetch(home: Home, url: str, exclude: list[str], where: str) -> dict[str, Path]:
    """Local copies of the files that a URL names: one, those below a directory, or those that a pattern matches.

    Over HTTP a directory is a page of links, and its URL ends with a slash; `?` begins a query there.

    Args:
        exclude: patterns of whole URLs to leave out.
        where: the configuration key, for messages.

    Returns:
        The copies by their names below the URL's fixed part.

    Raises:
        DataError: they cannot be had, and there are no copies from before.
        MachineError: the disk has no room for them.
    """
    place = home.directory("downloads", _digest([url, exclude]))
    with exclusive(home.lock("downloads", place.name)):
        with explained(place):
            place.mkdir(exist_ok=True)
        note = place / "origin.json"
        try:
            copies = _fetched(place, url, exclude)
        except ForgelineError:
            raise
        except ImportError as error:
            raise DataError(f"{where}: {url}: {error}") from None
        except Exception as error:  # every file system has its own errors
            before = json.loads(note.read_text())["files"] if note.exists() else {}
            if not before or not all((place / copy).exists() for copy in before.values()):
                raise DataError(
                    f"{where}: {url} cannot be fetched ({type(error).__name__}: {str(error) or 'no answer'}). Check "
                    "the address, the network and the credentials, or name a copy: --set 'data.sources=[\"PATH\"]'."
                ) from None
            logger.warning("%s cannot be reached; using the copy from before", url)
            return {name: place / copy for name, copy in before.items()}
        write_json(note, {"url": url, "files": {name: str(copy.relative_to(place)) for name, copy in copies.items()}})
        kept = {note, *(copy.parent for copy in copies.values())}
        for old in set(place.iterdir()) - kept:
            shutil.rmtree(old, ignore_errors=True)
        return copies


def _fetched(place: Path, url: str, exclude: list[str]) -> dict[str, Path]:
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    files = {
        name: info
        for name, info in _listed(filesystem, root).items()
        if not any(fnmatch(filesystem.unstrip_protocol(info["name"]), pattern) for pattern in exclude)
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        infos = list(pool.map(lambda info: info if _version(info) else filesystem.info(info["name"]), files.values()))
        copies = {
            name: place / _digest([info["name"], info.get("size"), _version(info)]) / _basename(name)
            for name, info in zip(files, infos, strict=True)
        }
        missing = {copy: info for copy, info in zip(copies.values(), infos, strict=True) if not copy.exists()}
        needed = sum(info.get("size") or 0 for info in missing.values())
        if needed > (free := shutil.disk_usage(place).free):
            raise MachineError(
                f"{place}: copies of {url} need {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free. "
                "Free space, set FORGELINE_HOME, or name less."
            )
        if missing:
            logger.info("fetching files=%d MB=%.1f from %s", len(missing), needed / 1e6, url)
        list(pool.map(lambda item: _copy(filesystem, item[1]["name"], item[0]), missing.items()))
    return copies


def _version(info: dict[str, Any]) -> list[str]:
    return [str(info[key]) for key in _VERSION_KEYS if info.get(key)]


def _listed(filesystem: Any, root: str) -> dict[str, dict[str, Any]]:
    """What is known of the files at a path of a file system, by their names below its fixed part."""
    links = "http" in filesystem.protocol  # where `?` begins a query, and a directory is a page of links
    address = root.partition("?")[0].partition("#")[0] if links else root
    star = min((address.find(sign) for sign in "*?[" if sign in address), default=-1)
    if star >= 0 and (links or not filesystem.exists(root)):
        base, found = address[:star].rpartition("/")[0], filesystem.glob(root, detail=True)
    elif address.endswith("/") if links else filesystem.isdir(root):
        base, found = address.rstrip("/"), filesystem.find(root, detail=True)
    else:
        return {_basename(address): {**filesystem.info(root), "name": root}}
    if not found:
        raise FileNotFoundError("nothing is there")
    names = {path.removeprefix(base).lstrip("/"): info for path, info in found.items() if info["type"] == "file"}
    # a page of links has some to itself, otherwise sorted
    return {name: names[name] for name in sorted(names) if not (links and name.startswith("?"))}


def _copy(filesystem: Any, path: str, copy: Path) -> None:
    aside = copy.parent.with_name(f".{copy.parent.name}.partial")
    with explained(copy):
        aside.mkdir(exist_ok=True)
        filesystem.get_file(path, str(aside / copy.name))
        fsync(aside / copy.name)
        os.rename(aside, copy.parent)


def _basename(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()

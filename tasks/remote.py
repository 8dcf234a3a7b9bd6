"""Remote files: local copies of what a URL names, fetched again when it has changed."""

import json
import logging
import os
import zlib
from pathlib import Path

from tasks.home import Home
from trainer.durable import exclusive, explained, write_json
from trainer.errors import DataError, ForgelineError

logger = logging.getLogger("forgeline")

_VERSION_KEYS = ("size", "ETag", "etag", "LastModified", "Last-Modified", "mtime", "Content-MD5", "Digest")
"""What fsspec's file systems say about the version of a file."""


def basename(url: str) -> str:
    """The file name in a URL, without a query, so that its suffix says what it is."""
    return url.partition("?")[0].partition("#")[0].rstrip("/").rsplit("/", 1)[-1]


def downloaded(home: Home, url: str, where: str) -> Path:
    """A local copy of a remote file, fetched again when the remote one has changed."""
    place = home.directory("downloads", f"{zlib.crc32(url.encode()):08x}-{basename(url)}")
    with exclusive(home.lock("downloads", place.name)):
        return _fetched(url, place, where)


def _fetched(url: str, place: Path, where: str) -> Path:
    import fsspec

    note = place.with_name(place.name + ".origin.json")
    try:
        filesystem, remote = fsspec.core.url_to_fs(url)
        info = filesystem.info(remote)
        state = {key: str(info[key]) for key in _VERSION_KEYS if key in info}
        if place.exists() and note.exists() and json.loads(note.read_text()) == {"url": url, **state}:
            return place
        aside = place.with_name(f".{place.name}.partial")
        with explained(place):
            filesystem.get_file(remote, str(aside))
            os.replace(aside, place)
        write_json(note, {"url": url, **state})
    except ForgelineError:
        raise
    except ImportError as error:
        raise DataError(f"{where}: {url}: {error}") from None
    except Exception as error:  # every file system has its own errors
        if place.exists():
            logger.warning("%s cannot be reached; using the copy from before", url)
            return place
        raise DataError(
            f"{where}: {url} cannot be fetched ({type(error).__name__}: {str(error) or 'no answer'}). "
            "Check the address and the network, or name a local copy: --set 'data.sources=[\"PATH\"]'."
        ) from None
    return place

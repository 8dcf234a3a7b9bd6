"""Cleaning the work directory: units of text that no set holds any more, and what killed processes left behind.

Shards share their bytes with units by hard links, so that a unit can go and the set stays.
"""

import logging
import re
import shutil
import time
from pathlib import Path

from tasks.home import Home
from trainer.durable import discard, if_free, read_manifest

logger = logging.getLogger("forgeline")

UNUSED_SECONDS = 7 * 86_400
"""Age from which a unit that no set holds is removed: until then, a run that failed goes on from it."""
_LEFTOVER = re.compile(r"\.(.+?)(\.\d+)?\.(partial|discarded)")


def in_use(home: Home) -> Path:
    """The lock that every run shares while it relies on units."""
    return home.lock("units", "in-use")


def clean(home: Home) -> None:
    """Remove leftovers of killed processes, and old units that are in no set, unless somebody is at work with them."""
    for kind in ("units", "shards"):
        for path in (home.path / kind).glob(".*"):
            if found := _LEFTOVER.fullmatch(path.name):
                _remove(home, kind, found[1], path)
    with if_free(in_use(home)) as free:
        if not free:
            return
        held = {name for path in (home.path / "shards").glob("[!.]*") for name in _units_of(path)}
        for path in (home.path / "units").glob("[!.]*"):
            if path.name not in held and time.time() - path.stat().st_mtime > UNUSED_SECONDS:
                _remove(home, "units", path.name, path)


def _remove(home: Home, kind: str, name: str, path: Path) -> None:
    with if_free(home.lock(kind, name)) as free:
        if free and path.exists():
            logger.info("removing %s, which nothing uses", path)
            shutil.rmtree(path, ignore_errors=True) if path.name.startswith(".") else discard(path)


def _units_of(shards: Path) -> list[str]:
    return (read_manifest(shards) or {}).get("units", [])

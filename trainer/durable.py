"""Durable files: what is visible under its final name is complete, and a manifest can prove it.

Owns the write-aside, fsync, rename protocol, manifests with checksums, and locks that end with
their owner. Never decides what is written.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import MachineError

MANIFEST = "manifest.json"


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Force a file's or directory's content to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str) -> None:
    """Replace ``path`` by ``content`` so that a reader sees the old or the new file, never a part."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with explained(path):
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            fsync(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Durably write ``value`` as indented JSON."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Durably write a JSON object with a checksum of itself, for :func:`read_record`."""
    write_json(path, {**record, "checksum": _checksum(record)})


def read_record(path: Path) -> dict[str, Any] | None:
    """What :func:`write_record` wrote, or None where there is nothing or it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        return None
    return record


def seal(directory: Path, final: Path, content: dict[str, Any], hash_of: Callable[[Path], str] = hash_file) -> None:
    """Give a finished directory its manifest and its final name.

    The manifest holds ``content``, ``files`` (path, size in bytes and SHA-256 of every file) and a
    ``checksum`` of itself.
    Everything is on the disk before the rename makes it visible.

    Args:
        hash_of: gives the SHA-256 of a file; callers may pass one that knows it already.
    """
    files = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        fsync(path)
        files.append({"path": str(path.relative_to(directory)), "size": path.stat().st_size, "sha256": hash_of(path)})
    manifest = {**content, "files": files}
    write_json(directory / MANIFEST, {**manifest, "checksum": _checksum(manifest)})
    for path in sorted(path for path in directory.rglob("*") if path.is_dir()):
        fsync(path)
    fsync(directory)
    discard(final)
    os.rename(directory, final)
    fsync(final.parent)


def _checksum(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest's content, its own ``checksum`` left out."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def complete_directory(
    final: Path, content: dict[str, Any], hash_of: Callable[[Path], str] = hash_file
) -> Iterator[Path]:
    """Yield an empty directory that becomes ``final`` when the block ends well, and vanishes otherwise.

    The caller may add to ``content`` inside the block; it becomes the manifest.
    """
    aside = final.with_name(f".{final.name}.partial")
    with explained(final):
        discard(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            seal(aside, final, content, hash_of)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def discard(path: Path) -> None:
    """Remove a directory so that a kill half-way leaves nothing under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.{os.getpid()}.discarded")
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of ``directory``, or None where there is none or it cannot be parsed."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def read_sealed(directory: Path) -> dict[str, Any] | None:
    """The manifest of ``directory`` where it is as it was written, or None."""
    manifest = read_manifest(directory)
    return manifest if manifest and manifest.get("checksum") == _checksum(manifest) else None


def faults(directory: Path, hash_of: Callable[[Path], str] = hash_file) -> list[str]:
    """What is wrong with a sealed directory, one sentence each; empty when every byte is as recorded.

    Args:
        hash_of: gives the SHA-256 of a file; callers may pass one that remembers unchanged files.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return [f"{directory / MANIFEST}: missing or unreadable"]
    if manifest.get("checksum") != _checksum(manifest):
        return [f"{directory / MANIFEST}: content differs from its checksum"]
    found = []
    for entry in manifest["files"]:
        path = directory / entry["path"]
        try:
            size = path.stat().st_size
            if size != entry["size"]:
                found.append(f"{path}: {size} bytes, the manifest says {entry['size']}")
            elif hash_of(path) != entry["sha256"]:
                found.append(f"{path}: content differs from its checksum")
        except OSError as error:
            found.append(f"{path}: {error.strerror}")
    return found


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Hold the lock file ``path``; wait while another process holds it.

    Yields its descriptor: a child that inherits it holds the lock too, until it ends. It is an
    ``flock``: the kernel releases it when its owners die, so a dead owner blocks nobody.
    """
    with _lock_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` together with all who share it; wait while somebody holds it alone."""
    with _lock_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock file ``path`` alone where nobody holds it now; yields whether that is so."""
    with _lock_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn a full disk or a refused write into a message that says where and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"{path}: the disk is full. Free space there, then run again: it goes on from here."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise MachineError(
                f"{path}: cannot be written ({error.strerror}). Set FORGELINE_HOME to a directory you can write."
            ) from error
        raise

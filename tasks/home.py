"""The work directory: where everything that runs make lives, and what is remembered about files."""

import contextlib
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from trainer.durable import MANIFEST, explained, hash_file, read_manifest
from trainer.errors import MachineError


@dataclass(frozen=True)
class Home:
    """The work directory, as an absolute path, so that it means the same in every process."""

    path: Path

    @classmethod
    def locate(cls) -> "Home":
        """`FORGELINE_HOME`, or `.forgeline` where the user stands; created if need be.

        Raises:
            MachineError: it cannot be written.
        """
        path = Path(os.path.abspath(os.environ.get("FORGELINE_HOME") or ".forgeline"))
        with explained(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except FileNotFoundError:  # such as below /proc
                message = f"{path}: cannot be made. Set FORGELINE_HOME to a directory you can write."
                raise MachineError(message) from None
            probe = path / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
        return cls(path)

    @property
    def tracking_uri(self) -> str:
        """`MLFLOW_TRACKING_URI`, or the SQLite store in the work directory."""
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.path / 'mlflow.db'}"

    def directory(self, kind: str, name: str) -> Path:
        """The place of an output, `HOME/<kind>/<name>`; its parent exists."""
        with explained(self.path / kind):
            (self.path / kind).mkdir(exist_ok=True)
        return self.path / kind / name

    def lock(self, kind: str, name: str) -> Path:
        """The lock file of an output."""
        return self.directory("locks", f"{kind}-{name}")

    def hashes(self) -> "FileHashes":
        """What is remembered about files that were read before."""
        return FileHashes(self.path / "file-hashes.sqlite")


def content_of(home: Home, name: str, beginnings: tuple[str, ...] = ("",)) -> dict[str, str]:
    """What identifies a model or tokenizer named by a directory, a file, or a hub name.

    Args:
        beginnings: of a directory, only files whose names begin with one of these count.

    Returns:
        The content hash of each file; for a hub name its commit, where the hub answers.
    """
    path = Path(name)
    if path.exists():
        hashes = home.hashes()
        inside = [] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and p.name != MANIFEST)
        files = [path] if path.is_file() else [p for p in inside if p.name.startswith(beginnings)]
        return {file.name: hashes(file) for file in files}
    from huggingface_hub import HfApi

    try:
        return {name: HfApi().model_info(name, timeout=30).sha or ""}
    except Exception:  # offline: a copy in the hub's cache may still do, and has one name only
        return {name: ""}


class FileHashes:
    """Content hashes remembered by path, size, modification time and inode: an unchanged file is not read again."""

    def __init__(self, database: Path) -> None:
        # losing it costs a second reading, nothing else: so no fault of the database may stop a run
        try:
            self._connection = _database(str(database))
        except sqlite3.OperationalError:  # a full disk, say
            self._connection = _database(":memory:")
        except sqlite3.DatabaseError:  # it is damaged
            for suffix in ("", "-wal", "-shm"):
                Path(f"{database}{suffix}").unlink(missing_ok=True)
            self._connection = _database(str(database))

    def __call__(self, path: Path) -> str:
        """SHA-256 of the file's content."""
        return self.of([path])[0]

    def of(self, paths: list[Path]) -> list[str]:
        """SHA-256 of each file's content; those that have to be read are read in threads."""
        states = [_state(path) for path in paths]
        found: dict[Path, str] = {}
        for path, state in zip(paths, states, strict=True):
            with contextlib.suppress(sqlite3.Error):
                select = "SELECT sha256 FROM hashes WHERE path = ? AND state = ?"
                found.update((path, row[0]) for row in self._connection.execute(select, (str(path), state)))
        unknown = [(path, state) for path, state in zip(paths, states, strict=True) if path not in found]
        if unknown:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                digests = list(threads.map(hash_file, [path for path, _ in unknown]))
            found.update((path, digest) for (path, _), digest in zip(unknown, digests, strict=True))
            self._keep([(str(path), state, found[path]) for path, state in unknown])
        return [found[path] for path in paths]

    def remember(self, directory: Path) -> None:
        """Take the hashes of a directory's files from the manifest that has just been written."""
        manifest = read_manifest(directory) or {"files": []}
        files = [(directory / entry["path"], entry["sha256"]) for entry in manifest["files"]]
        self._keep([(str(path), _state(path), digest) for path, digest in files])

    def _keep(self, rows: list[tuple[str, str, str]]) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", rows)
            self._connection.execute("COMMIT")


def _state(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"


def _database(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("CREATE TABLE IF NOT EXISTS hashes (path PRIMARY KEY, state, sha256)")
    return connection

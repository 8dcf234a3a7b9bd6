"""Saving beside training: what is to be saved is copied into host memory at once, and a thread writes it.

Owns the copies, the thread, and the sizes and checksums of what it wrote. Never decides what is saved, nor when
a checkpoint is complete.
"""

import hashlib
import io
import mmap
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from trainer.durable import explained, write_record
from trainer.errors import ForgelineError, TrainerDiedError


class BackgroundSaving(CheckpointEngine):
    """DeepSpeed's way to the disk: `save` copies, and training may go on; `start` has all that was copied written.

    One save is in flight at most: `ended` must be waited for before anything is copied again, for the host
    memory is used again too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.in_flight = False
        """Whether there is a save of which the end was not waited for."""
        self.directory = Path()
        """Where it writes."""
        self.error: ForgelineError | None = None
        """Why it could not be written."""
        self.written = threading.Event()
        """Set when all files of this rank are on the disk, or cannot be."""
        self.ended = threading.Event()
        """Set when the thread has no more to do."""
        self.abandoned = threading.Event()
        """Set when there is no use in waiting for other ranks any more."""
        self._snapshots: list[_Snapshot] = []
        self._memory: list[_HostMemory] = []

    def create(self, info: Any) -> None:
        """DeepSpeed begins to save: nothing is to be done."""

    def commit(self, info: Any) -> bool:
        """DeepSpeed has handed over all that it saves."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """No: a copy is as large as the tensor, so that DeepSpeed need not copy one that is a part of another."""
        return False

    def save(self, state_dict: Any, path: str | Path) -> None:
        """Copy what is to be in the file ``path``: tensors into host memory, everything else by pickling it."""
        if len(self._memory) == len(self._snapshots):
            self._memory.append(_HostMemory())
        self._snapshots.append(_Snapshot(state_dict, Path(path), self._memory[len(self._snapshots)]))

    def load(self, path: str | Path, map_location: Any = None) -> Any:
        """Read a file that was saved."""
        return torch.load(path, map_location=map_location, weights_only=False)

    def start(self, record: Path, complete: Callable[[], None]) -> None:
        """Write in a thread what was copied, then ``record``, with the size and SHA-256 of every file by its path.

        Args:
            complete: called in the thread at the end.
        """
        snapshots, self._snapshots = self._snapshots, []
        self.in_flight, self.directory = True, record.parent
        self.written.clear()
        self.ended.clear()
        thread = threading.Thread(target=self._write, args=(snapshots, record, complete), daemon=True, name="saving")
        thread.start()

    def _write(self, snapshots: "list[_Snapshot]", record: Path, complete: Callable[[], None]) -> None:
        if sys.platform == "linux":  # there, a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            files = {str(snapshot.path.relative_to(record.parent)): snapshot.write() for snapshot in snapshots}
            write_record(record, {"files": files})
            self.written.set()
            complete()
        except ForgelineError as error:
            self.error = error
        except Exception as error:
            traceback.print_exc()
            self.error = TrainerDiedError(f"{record.parent}: could not be written: {error!r}")
        finally:
            self.written.set()
            self.ended.set()

    def wait_briefly(self) -> None:
        """Let a save in flight end when training ends by an error; other ranks may never do their part."""
        if self.in_flight:
            self.written.wait()
            self.ended.wait(2.0)
            self.abandoned.set()
            self.ended.wait()


class _HostMemory:
    """Memory for one file's tensors, which the next save uses again."""

    def __init__(self) -> None:
        self._memory: Any = b""

    def of(self, size: int, pinned: bool) -> Any:
        """A writable buffer of ``size`` bytes."""
        if len(self._memory) != size:
            if pinned:
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            else:
                self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    self._memory.madvise(mmap.MADV_HUGEPAGE)  # the first touch of small pages costs as much as writing
        return self._memory


class _Snapshot:
    """What is to be in one file, as it is now."""

    def __init__(self, state: Any, path: Path, memory: _HostMemory) -> None:
        self.path = path
        pickled = io.BytesIO()
        pickler = _SetTensorsAside(pickled)
        pickler.dump(state)
        self._pickled = pickled.getvalue()
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in pickler.tensors]
        buffer = memory.of(sum(sizes), pinned=any(tensor.is_cuda for tensor in pickler.tensors))
        self._tensors, begin = [], 0
        for tensor, size in zip(pickler.tensors, sizes, strict=True):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            if tensor.numel():
                copy = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
                copy = copy.view(tensor.shape).copy_(tensor.detach())
            self._tensors.append(copy)
            begin += size

    def write(self) -> dict[str, Any]:
        """Write and fsync the file; returns its size in bytes and its SHA-256."""
        state = _PutTensorsBack(self._pickled, self._tensors).load()
        with explained(self.path), open(self.path, "wb") as file:
            counted: Any = _Counted(file)
            sums = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)  # they cost more than all else, and SHA-256 says more
            try:
                torch.save(state, counted)
            except RuntimeError as error:
                raise counted.error or error from None  # torch hides what went wrong with the file
            finally:
                torch.serialization.set_crc32_options(sums)
            file.flush()
            os.fsync(file.fileno())
        return {"size": counted.size, "sha256": counted.sha256.hexdigest()}


_ALIGNMENT = 64


class _SetTensorsAside(pickle.Pickler):
    """Pickles everything but tensors, which it lists: each once, however often it is met."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[Any, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """A tensor's number."""
        if not isinstance(value, torch.Tensor):
            return None
        same = (value.data_ptr() if value.numel() else None, value.shape, value.stride(), value.dtype, value.device)
        number = self._numbers.setdefault(same, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _PutTensorsBack(pickle.Unpickler):
    """Reads what was pickled, with the tensors' copies in their places."""

    def __init__(self, pickled: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        """The copy of the tensor with this number."""
        return self._tensors[number]


class _Counted:
    """A file that knows the size and the checksum of what was written, and what went wrong."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(data)
        self.size += written
        return written

    def flush(self) -> None:
        """It is flushed at its end."""

"""Where an expert's bytes come from: the pack on disk, or a copy of it in memory.

Owns the open file, the choice between direct and buffered reads, and the loop over short reads.  Knows no
threads, no slots and no time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tqdm import tqdm

from executor.errors import FetchError, PackError
from executor.geometry import ALIGNMENT_BYTES
from executor.store import ExpertStore
from policies.core.types import ExpertId

DIRECT = "direct"
DROPPED = "buffered, dropped from the page cache after each read"
BUFFERED = "buffered"
MEMORY = "memory"

LOADERS = 8
"""Threads that bring a pack into memory."""

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
_MAX_EMPTY_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class IoOps:
    """The system calls of a disk source; tests put failures here."""

    open: Callable[[Path, int], int] = os.open
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How a pack is read: what was asked for, what it came to, and why they differ."""

    requested: str
    effective: str
    reason: str
    file_system: str

    @property
    def measures_disk(self) -> bool:
        """Whether read times are those of a disk and not of the page cache or of memory."""
        return self.effective == DIRECT and self.file_system not in _MEMORY_FILE_SYSTEMS

    def describe(self) -> dict[str, str | bool]:
        """For a run's summary."""
        return {
            "requested": self.requested,
            "effective": self.effective,
            "reason": self.reason,
            "file_system": self.file_system,
            "measures_disk": self.measures_disk,
        }


class ExpertSource(Protocol):
    """Gives an expert's bytes to any reader thread."""

    store: ExpertStore
    mode: ReadMode

    def read(self, expert: ExpertId, into: memoryview) -> int:
        """Fill ``into`` (``stride`` bytes, page-aligned); returns the bytes that were read for it.

        Raises:
            FetchError: not all of them could be read.
        """
        ...

    def close(self) -> None:
        """Release what is held; no read is in progress."""
        ...


def page_aligned(n_bytes: int) -> memoryview:
    """Zeroed private memory that begins on a page."""
    return memoryview(mmap.mmap(-1, max(n_bytes, 1)))


class DiskSource:
    """Positioned reads from ``experts.bin``; all threads share one file descriptor."""

    def __init__(self, store: ExpertStore, buffered: bool = False, ops: IoOps | None = None) -> None:
        """``buffered``: do not try direct reads.

        Whether direct reads work is found out by reading (some file systems accept the flag at open and refuse
        the read).

        Raises:
            PackError: the file cannot be opened or read in any mode.
        """
        self.store = store
        self._ops = ops or IoOps()
        self._step = 1  # a direct read goes on from a multiple of this
        requested = BUFFERED if buffered else DIRECT
        self._fd, effective, reason = self._open(requested)
        self.mode = ReadMode(requested, effective, reason, file_system_of(store.experts_path))
        if effective == DIRECT:
            self._step = ALIGNMENT_BYTES

    def _open(self, requested: str) -> tuple[int, str, str]:
        path = self.store.experts_path
        reason = "asked for"
        if requested == DIRECT:
            flag = getattr(os, "O_DIRECT", 0)
            reason = self._probe(path, os.O_RDONLY | flag) if flag else "this platform has no O_DIRECT"
            if not reason:
                return self._ops.open(path, os.O_RDONLY | flag), DIRECT, ""
        if broken := self._probe(path, os.O_RDONLY):
            raise PackError(f"{path} cannot be read: {broken}")
        effective = DROPPED if hasattr(os, "posix_fadvise") else BUFFERED
        return self._ops.open(path, os.O_RDONLY), effective, reason

    def _probe(self, path: Path, flags: int) -> str:
        """Read the last expert once; empty if that works, otherwise why not."""
        buffer = page_aligned(self.store.stride)
        try:
            fd = self._ops.open(path, flags)
        except OSError as error:
            return f"open: {error.strerror}"
        try:
            got = self._ops.preadv(fd, [buffer], self.store.offset(self.store.n_total - 1))
        except OSError as error:
            return f"read: {error.strerror}"
        finally:
            os.close(fd)
        return "" if got else "read: the file ends early"

    def read(self, expert: ExpertId, into: memoryview) -> int:
        """See :class:`ExpertSource`."""
        store = self.store
        offset, stride = store.offset(expert), store.stride
        done = total = empty_rounds = 0
        while done < stride:
            try:
                got = self._ops.preadv(self._fd, [into[done:stride]], offset + done)
            except OSError as error:
                raise FetchError(expert, store.label(expert), offset, f"{error.strerror} at byte {done}") from error
            total += got
            end = done + got
            if end < stride:
                end -= end % self._step  # a direct read may only go on from an aligned place
                empty_rounds += end == done
            if got == 0 or empty_rounds > _MAX_EMPTY_ROUNDS:
                reason = f"short read, {done + got} of {stride} bytes; run python -m executor.verify {store.path}"
                raise FetchError(expert, store.label(expert), offset, reason)
            done = end
        if self.mode.effective == DROPPED:
            os.posix_fadvise(self._fd, offset, stride, os.POSIX_FADV_DONTNEED)
        return total

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemorySource:
    """The whole pack in host memory (``store=ram``): a fetch is a copy."""

    def __init__(self, store: ExpertStore, arena: memoryview, ops: IoOps | None = None) -> None:
        """Load the pack into ``arena``: ``n_total * stride`` bytes, page-aligned (pinned, for a GPU).

        Raises:
            PackError: another size.
            FetchError: the pack cannot be read.
        """
        if arena.nbytes != store.n_total * store.stride:
            raise PackError(f"an arena of {arena.nbytes} bytes for a pack of {store.n_total * store.stride}")
        self.store = store
        self.arena = arena
        self.mode = ReadMode(MEMORY, MEMORY, "", "memory")
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(arena, dtype=np.uint8)
        with (
            contextlib.closing(DiskSource(store, ops=ops)) as disk,
            ThreadPoolExecutor(LOADERS) as pool,
            tqdm(total=arena.nbytes, desc="pack to memory", unit="B", unit_scale=True, disable=None) as bar,
        ):
            loading = [pool.submit(disk.read, expert, self.view(expert)) for expert in range(store.n_total)]
            try:
                for each in loading:
                    each.result()
                    bar.update(store.stride)
            finally:
                for each in loading:
                    each.cancel()

    def view(self, expert: ExpertId) -> memoryview:
        """An expert's bytes in the arena."""
        offset = self.store.offset(expert)
        return self.arena[offset : offset + self.store.stride]

    def read(self, expert: ExpertId, into: memoryview) -> int:
        """See :class:`ExpertSource`."""
        offset, stride = self.store.offset(expert), self.store.stride
        # numpy copies without the interpreter's lock; a memoryview's assignment would hold it
        np.copyto(np.frombuffer(into, dtype=np.uint8, count=stride), self._bytes[offset : offset + stride])
        return stride

    def close(self) -> None:
        """Nothing is open; the arena is its owner's."""


def file_system_of(path: Path) -> str:
    """The type of the file system that holds ``path``, or "unknown"."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        device = os.stat(path).st_dev
    except OSError:
        return "unknown"
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        fields = line.split()
        if fields[2] == number and "-" in fields:
            return fields[fields.index("-") + 1]
    return "unknown"

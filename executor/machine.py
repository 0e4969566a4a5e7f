"""The parts of this machine that a run uses: its link from pack to slots, its threads, its clock.

Owns which reader serves which combination of source and device.  Knows neither the core nor the model.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from executor.backend import Reader
from executor.direct import DirectReader
from executor.errors import PackError
from executor.host import Probe
from executor.inbox import Poll
from executor.pace import PacedLink
from executor.reader import Completions, ReadCounters, ReaderPool, SlotLanding
from executor.settings import MachineSettings
from executor.slots import PinnedArena, SlotArena
from executor.sources import DiskSource, ExpertSource, IoOps, MemorySource, ReadMode, page_aligned
from executor.store import ExpertStore
from policies.core.messages import Command, Event
from policies.core.types import UserError


class ClosableReader(Reader, Protocol):
    """A reader that counts and can be closed."""

    counters: ReadCounters

    def close(self) -> None:
        """Join its threads."""
        ...


@dataclass(slots=True)
class Link:
    """Everything between the pack and the slots."""

    reader: ClosableReader
    mode: ReadMode
    _source: ExpertSource | None
    _paced: PacedLink | None
    _memory: tuple[PinnedArena | MemoryPack, ...] = ()

    @property
    def counters(self) -> ReadCounters:
        """What was read."""
        return self.reader.counters

    @property
    def late_share(self) -> float | None:
        """Share of the reads that a paced link could not hold to its rate; None for a raw link."""
        if self._paced is None:
            return None
        return self._paced.late / max(1, self.counters.reads)

    @property
    def poll(self) -> Poll | None:
        """What the driver must ask for completions; None if they are posted on its queue."""
        return self.reader.poll if isinstance(self.reader, DirectReader) else None

    def close(self) -> None:
        """Join the readers, then close the source, then free the memory that belongs to this link."""
        self.reader.close()
        if self._source is not None:
            self._source.close()
        for memory in self._memory:
            memory.close()


def open_link(
    store: ExpertStore,
    arena: SlotArena,
    machine: MachineSettings,
    done: Completions,
    *,
    paced: PacedLink | None = None,
    pack: MemoryPack | None = None,
    polls: bool = False,
    ops: IoOps | None = None,
) -> Link:
    """Start the readers that ``machine`` asks for.  ``pack``: with ``store=ram``, the pack that is in memory already.

    ``polls``: the driver never blocks while something is in flight, so that it may start and follow copies itself.

    Raises:
        UserError: reads would not come from the device, and ``allow_buffered`` is false.
    """
    cuda = arena.device.type == "cuda"
    own: tuple[MemoryPack, ...] = ()
    if machine.store == "ram" and pack is None:
        pack = MemoryPack(store, pinned=cuda)
        own = (pack,)
    if pack is not None and pack.pinned is not None:
        begin = partial(paced.begin, store.expert_bytes) if paced else None
        reader: ClosableReader
        if polls:
            from executor.copy_stream import CopyStream  # noqa: PLC0415

            reader = DirectReader(CopyStream(pack.pinned, arena), store.stride, begin)
        else:
            from executor.copier import CudaCopier, MemoryReader  # noqa: PLC0415

            reader = MemoryReader(pack.pinned, CudaCopier(arena, None, done), begin)
        return Link(reader, pack.source.mode, None, paced, own)
    source: ExpertSource
    if pack is not None:
        source = pack.source
    else:
        source = DiskSource(store, ops=ops)
        if not source.mode.measures_disk and not machine.allow_buffered:
            mode = source.mode
            source.close()
            why = mode.reason or f"the pack lies on {mode.file_system}, which is memory"
            raise UserError(
                f"direct reads from {store.experts_path} are not possible ({why}), so times would not be a disk's; "
                "put the pack on a disk, or add allow_buffered=true for a run that is marked invalid"
            )
    pinned: tuple[PinnedArena, ...] = ()
    landing: Any = SlotLanding(arena.buffers, done)
    if cuda:
        from executor.copier import CudaCopier  # noqa: PLC0415

        pinned = (PinnedArena(machine.readers, store.stride),)
        landing = CudaCopier(arena, pinned[0], done)
    reader = ReaderPool(source, landing, done, readers=machine.readers, link=paced, verify=machine.verify_reads)
    return Link(reader, source.mode, source, paced, (*pinned, *own))


class MemoryPack:
    """A whole pack in host memory (``store=ram``), read once; several runs may fetch from it.

    ``pinned``: the same memory as a GPU's copy engine wants it, or None.
    """

    def __init__(self, store: ExpertStore, *, pinned: bool) -> None:
        """Read all of it.  Raises PackError if there is not enough memory."""
        n_bytes = store.n_total * store.stride
        self.pinned = PinnedArena(store.n_total, store.stride) if pinned else None
        try:
            memory = self.pinned.memory if self.pinned else page_aligned(n_bytes)
        except OSError as error:
            raise PackError(
                f"store=ram needs {n_bytes / 1e9:.1f} GB of memory: {error.strerror}; use store=disk"
            ) from error
        try:
            self.source = MemorySource(store, memory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free it; no fetch is in flight."""
        if self.pinned is not None:
            self.pinned.close()


def set_threads(threads: int | None) -> int:
    """Set torch's threads; None: one for each CPU, or one where the CPUs are so busy that this is faster.

    Must come before the compute thread starts.  Returns the number.
    """
    if threads is None:
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        taken_s = {}
        probe = Probe(megabytes=16)
        for count in sorted({1, cpus}):
            torch.set_num_threads(count)
            probe.run(1)
            taken_s[count] = probe.run(3)
        threads = min(taken_s, key=lambda count: taken_s[count])
    torch.set_num_threads(threads)
    return threads


class OwnClock:
    """A Backend whose clock stands while others have their turn, and that measures the driver's own time.

    ``busy_s``: seconds between an event's arrival and the next wait: core, journal, submission; ``calls`` of them.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lost_s = 0.0
        self._paused_at = inner.now()
        self._asked: float | None = None
        self.busy_s = 0.0
        self.calls = 0

    def resume(self) -> None:
        """The turn begins."""
        self._lost_s += self._inner.now() - self._paused_at

    def pause(self) -> None:
        """The turn is over."""
        self._paused_at = self._inner.now()

    def now(self) -> float:
        """Seconds of own turns so far."""
        self._asked = time.perf_counter()
        return float(self._inner.now() - self._lost_s)

    def submit(self, command: Command) -> None:
        """Start a command."""
        self._inner.submit(command)

    def wait(self) -> list[Event]:
        """The inner backend's next events."""
        if self._asked is not None:
            self.busy_s += time.perf_counter() - self._asked
            self.calls += 1
            self._asked = None
        events: list[Event] = self._inner.wait()
        return events

    def idle(self, until_s: float) -> None:
        """Sleep until ``until_s`` of this clock."""
        self._inner.idle(until_s + self._lost_s)

"""The last leg of a fetch on a GPU: from pinned host memory into the device slot.

Owns one thread, one copy stream and the use of the staging buffers, each free again only after its copy's event.
One thread issues all copies: several would gain nothing (one copy engine) and would fight for the interpreter's lock.
On a paced link another one waits until they are due, so that the next copies move meanwhile.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executor.reader import JOIN_S, Completions, Due, LandingClosed, ReadCounters
from executor.slots import PinnedArena, SlotArena
from policies.core.messages import Fetch, FetchDone


@dataclass(frozen=True, slots=True)
class _Copy:
    fetch: Fetch
    source: torch.Tensor  # pinned, uint8 [stride]
    staging: int | None
    due: Due | None


class Holder:
    """A thread in which copies that are done wait until they are due; the one that issues copies must not wait.

    First in, first out: experts have one size, so that they are due in the order in which they were asked for.  Of
    reads that overtook one another one may be posted late, but with its own time.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._held: queue.SimpleQueue[tuple[Fetch, float, Due] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copier-holder", daemon=True)
        self._thread.start()

    def hold(self, fetch: Fetch, there_s: float, due: Due) -> None:
        """Post ``FetchDone`` when it is due; ``there_s``: when its bytes were there.  Does not block."""
        self._held.put((fetch, there_s, due))

    @property
    def alive(self) -> bool:
        """False if the thread has ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Post what is held, each when it is due, and join the thread."""
        self._held.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while (item := self._held.get()) is not None:
                fetch, there_s, due = item
                self._completions.put((FetchDone(fetch.fetch), due(there_s)))
        except BaseException as error:  # the driver must hear of it, or it waits for ever
            self._completions.put(error)


class CudaCopier:
    """A ``Landing`` whose buffers are pinned staging memory and whose completions are copy events."""

    def __init__(
        self, slots: SlotArena, staging: PinnedArena | None, completions: Completions, *, in_flight: int = 8
    ) -> None:
        """``in_flight``: copies queued on the stream; no ``staging``: only ``copy`` is used.

        The copier does not own the arenas: close it, then them.
        """
        self._slots = slots
        self._staging = staging
        self._completions = completions
        self._in_flight = in_flight
        self._used_by: dict[int, int] = {}  # fetch -> staging buffer
        self._free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        for index in range(len(staging.buffers) if staging else 0):
            self._free.put(index)
        self._copies: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self.stream = torch.cuda.Stream(device=slots.device)  # type: ignore[no-untyped-call]
        self._holder = Holder(completions)
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
        self._thread.start()

    def acquire(self, fetch: Fetch) -> memoryview:
        """A staging buffer; blocks until one is free."""
        index = self._free.get()
        if index is None or self._staging is None:
            self._free.put(None)  # for the next one that waits
            raise LandingClosed
        self._used_by[fetch.fetch] = index
        return self._staging.buffers[index]

    def landed(self, fetch: Fetch, buffer: memoryview, due: Due | None) -> None:
        """Copy the fetch's staging buffer to its slot."""
        assert self._staging is not None
        index = self._used_by.pop(fetch.fetch)
        self._copies.put(_Copy(fetch, self._staging.pieces[index], index, due))

    def copy(self, fetch: Fetch, source: torch.Tensor, due: Due | None = None) -> None:
        """Copy from pinned memory that stays as it is (the pack in memory): no reader, no staging."""
        self._copies.put(_Copy(fetch, source, None, due))

    def unblock(self) -> None:
        """See ``Landing``."""
        self._free.put(None)

    @property
    def alive(self) -> bool:
        """See ``Landing``."""
        return self._thread.is_alive() and self._holder.alive

    def close(self) -> None:
        """Finish the copies that were asked for and join the threads."""
        self.unblock()
        self._copies.put(None)
        self._thread.join(JOIN_S)
        self._holder.close()

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        flying: deque[tuple[_Copy, torch.cuda.Event]] = deque()
        try:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                while True:
                    if flying and (len(flying) >= self._in_flight or self._copies.empty()):
                        self._finish(*flying.popleft())
                    elif (item := self._copies.get()) is not None:
                        flying.append((item, self._start(item)))
                    else:
                        break
                while flying:
                    self._finish(*flying.popleft())
        except BaseException as error:  # the driver must hear of it, or it waits for ever
            self._completions.put(error)

    def _start(self, item: _Copy) -> torch.cuda.Event:
        self._slots.slots[item.fetch.slot].copy_(item.source, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def _finish(self, item: _Copy, event: torch.cuda.Event) -> None:
        event.synchronize()
        there_s = time.perf_counter()
        if item.staging is not None:
            self._free.put(item.staging)
        if item.due is None:
            self._completions.put((FetchDone(item.fetch.fetch), there_s))
        else:
            self._holder.hold(item.fetch, there_s, item.due)


class MemoryReader:
    """Fetches from a pack in pinned memory (``store=ram``): no reader threads, the copies are the fetches."""

    def __init__(self, pack: PinnedArena, copier: CudaCopier, begin: Callable[[], Due] | None = None) -> None:
        """``pack.pieces[expert]``; owns the copier but not the arena.  ``begin``: asks a paced link for an expert."""
        self.counters = ReadCounters()
        self._pack = pack
        self._copier = copier
        self._begin = begin

    def submit(self, fetch: Fetch) -> None:
        """Copy an expert into its slot; the completion is posted later."""
        piece = self._pack.pieces[fetch.expert]
        self.counters.copied(piece.numel())
        self._copier.copy(fetch, piece, self._begin() if self._begin else None)

    @property
    def alive(self) -> bool:
        """False if the copy thread has ended."""
        return self._copier.alive

    def close(self) -> None:
        """Finish the copies and join the thread."""
        self._copier.close()

"""Reader threads: fetches in, completions out.

Owns the threads, the order in which fetches are taken up, and what was read.  Knows neither where bytes come from
(``executor.sources``) nor where they go (a :class:`Landing`), nor what an expert means.

All completions go to one ``queue.SimpleQueue`` that the driver blocks on and that the compute thread shares.
A failure is posted there too, in the event's place, so that the driver raises it at once.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executor.errors import FetchError
from executor.pace import PacedLink
from executor.sources import ExpertSource
from policies.core.messages import Event, Fetch, FetchDone
from policies.core.types import UserError

Posted = tuple[Event, float] | BaseException
"""An event and when it happened (``time.perf_counter``), or what went wrong."""

Completions = queue.SimpleQueue[Posted]

Due = Callable[[float], float]
"""Of a fetch on a paced link: given when its bytes were there, waits until it counts as complete; returns that time."""

JOIN_S = 5.0
"""How long ``close`` waits for a read in progress."""


class Landing(Protocol):
    """Where reads go: the cache slot itself, or a staging buffer on the way to a GPU."""

    def acquire(self, fetch: Fetch) -> memoryview:
        """The page-aligned buffer for this fetch; may block until one is free."""
        ...

    def landed(self, fetch: Fetch, buffer: memoryview, due: Due | None) -> None:
        """All bytes are in ``buffer``: post ``FetchDone`` when it is due and in the slot; None: it is due at once."""
        ...

    @property
    def alive(self) -> bool:
        """False if a thread behind it has ended."""
        ...

    def unblock(self) -> None:
        """Make every blocked or later ``acquire`` raise ``LandingClosed``."""
        ...

    def close(self) -> None:
        """Finish what has landed; nothing else will."""
        ...


class LandingClosed(Exception):
    """No buffer will become free: the run is over."""


class SlotLanding:
    """Reads go straight into the cache slots, and are complete when they are read."""

    alive = True

    def __init__(self, slots: Iterable[memoryview], completions: Completions) -> None:
        """``slots[i]``: page-aligned, at least one stride long."""
        self._slots = tuple(slots)
        self._completions = completions

    def acquire(self, fetch: Fetch) -> memoryview:
        """See :class:`Landing`; never blocks."""
        return self._slots[fetch.slot]

    def landed(self, fetch: Fetch, buffer: memoryview, due: Due | None) -> None:
        """See :class:`Landing`."""
        there_s = time.perf_counter()
        self._completions.put((FetchDone(fetch.fetch), due(there_s) if due else there_s))

    def unblock(self) -> None:
        """Nothing blocks here."""

    def close(self) -> None:
        """Nothing is in flight here."""


@dataclass(slots=True)
class ReadCounters:
    """``bytes_requested``: of fetches submitted; ``bytes_read``: delivered by the source, repeats included."""

    fetches: int = 0
    reads: int = 0
    bytes_requested: int = 0
    bytes_read: int = 0

    def copied(self, n_bytes: int) -> None:
        """A fetch from host memory: its copy is the read."""
        self.fetches += 1
        self.reads += 1
        self.bytes_requested += n_bytes
        self.bytes_read += n_bytes


@dataclass(frozen=True, slots=True)
class _Order:
    fetch: Fetch
    due: Due | None


class ReaderPool:
    """``readers`` threads that take fetches in the order of submission."""

    def __init__(
        self,
        source: ExpertSource,
        landing: Landing,
        completions: Completions,
        *,
        readers: int = 8,
        link: PacedLink | None = None,
        verify: bool = False,
    ) -> None:
        """``link``: hold completions to a fixed rate; ``verify``: compare the checksum of every read.

        The pool owns ``landing`` but not ``source``: close the pool, then the source.
        """
        if readers < 1:
            raise UserError(f"readers is {readers}, expected at least 1")
        self.counters = ReadCounters()
        self._source = source
        self._landing = landing
        self._completions = completions
        self._link = link
        self._verify = verify
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name=f"reader-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def submit(self, fetch: Fetch) -> None:
        """Read an expert into its slot; the completion is posted later."""
        stride = self._source.store.stride
        due = self._link.begin(self._source.store.expert_bytes) if self._link else None
        with self._lock:
            self.counters.fetches += 1
            self.counters.bytes_requested += stride
        self._orders.put(_Order(fetch, due))

    @property
    def alive(self) -> bool:
        """False if a thread has ended although the pool is open: its fetch would never complete."""
        return self._landing.alive and all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Drop what is queued, let reads in progress end, and join every thread.  May be called twice."""
        try:
            while True:
                self._orders.get_nowait()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._orders.put(None)
        self._landing.unblock()
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._landing.close()

    # ---------------------------------------------------------------- in the threads

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._serve(order)
            except LandingClosed:
                return
            except FetchError as error:
                self._completions.put(error)
            except BaseException as error:  # anything else ends the thread: say so, or the driver waits for ever
                self._completions.put(self._caused(order.fetch, error))
                return

    def _serve(self, order: _Order) -> None:
        fetch = order.fetch
        buffer = self._landing.acquire(fetch)
        store = self._source.store
        n_bytes = self._source.read(fetch.expert, buffer)
        if self._verify and zlib.crc32(buffer[: store.stride]) != store.checksum(fetch.expert):
            raise self._error(fetch, f"its checksum differs; run python -m executor.verify {store.path}")
        with self._lock:
            self.counters.reads += 1
            self.counters.bytes_read += n_bytes
        self._landing.landed(fetch, buffer, order.due)

    def _error(self, fetch: Fetch, reason: str) -> FetchError:
        store = self._source.store
        return FetchError(fetch.expert, store.label(fetch.expert), store.offset(fetch.expert), reason)

    def _caused(self, fetch: Fetch, cause: BaseException) -> FetchError:
        error = self._error(fetch, f"the reader ended with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error


def process_read_bytes() -> int | None:
    """Bytes that this process has made the storage layer read so far, or None where the kernel does not tell.

    The difference over a run, divided by ``ReadCounters.bytes_read``, is near 1 if the disk was really read.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)

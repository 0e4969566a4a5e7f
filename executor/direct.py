"""Fetches from a pack in pinned memory that the driver starts and asks for itself: no thread, no queue, no lock.

A fetch from host memory takes tens of microseconds.  Threads that pass it on take as long again, and more where they
wait for the interpreter; so a driver that never blocks (``executor.fast``) does without them.

Owns what is in flight, in order.  Does not know how bytes are copied (:class:`Copies`), nor who waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from executor.pace import Transfer
from executor.reader import Posted, ReadCounters
from policies.core.messages import Fetch, FetchDone


class Copies(Protocol):
    """Copies that end in the order in which they were started."""

    def start(self, piece: int, slot: int) -> None:
        """Queue a copy of an expert into a slot."""
        ...

    def ended(self) -> int:
        """How many more have ended since this was asked last."""
        ...

    def close(self) -> None:
        """Let what was started end."""
        ...


class DirectReader:
    """``expert_bytes``: of one copy.  ``begin``: asks a paced link for an expert; None: an ended copy counts at once.

    Everything happens on the caller's thread.  Experts have one size, so on a paced link, too, they are due in order.
    """

    alive = True

    def __init__(
        self,
        copies: Copies,
        expert_bytes: int,
        begin: Callable[[], Transfer] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters = ReadCounters()
        self._copies, self._bytes, self._begin, self._clock = copies, expert_bytes, begin, clock
        self._flying: deque[tuple[int, Transfer | None]] = deque()
        self._there: deque[tuple[int, Transfer, float]] = deque()  # bytes are there, and since when; not yet due

    def submit(self, fetch: Fetch) -> None:
        """Start a copy; ``poll`` tells when it has ended."""
        self.counters.copied(self._bytes)
        self._flying.append((fetch.fetch, self._begin() if self._begin else None))
        self._copies.start(fetch.expert, fetch.slot)

    def poll(self) -> list[Posted]:
        """What has ended, and is due, since the last call; does not wait."""
        posted: list[Posted] = []
        if self._flying and (count := self._copies.ended()):
            now_s = self._clock()
            for _ in range(count):
                fetch, transfer = self._flying.popleft()
                if transfer is None:
                    posted.append((FetchDone(fetch), now_s))
                else:
                    self._there.append((fetch, transfer, now_s))
        while self._there and (end_s := self._there[0][1].ended(self._there[0][2])) is not None:
            posted.append((FetchDone(self._there.popleft()[0]), end_s))
        return posted

    def close(self) -> None:
        """Let the copies end."""
        self._copies.close()

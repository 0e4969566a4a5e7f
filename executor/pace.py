"""Time as another device would pass it: when a transfer is due, and from when the driver's decisions count.

Real reads and real work go on beneath; what is early waits.  Owns the due times.  Knows neither what is read nor by
whom.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from threading import Lock

from conf.sharing import FairShare
from policies.core.types import UserError

SLACK_S = 1e-3
"""A driver that is further behind than this has stalled, and the device would not have waited for it."""


class Instant:
    """The instant that the driver's decisions belong to: that of the last event it took.

    What a thread takes to wake up, and the driver to decide, is not part of a paced device.  Transfers and batches that
    begin at this instant instead of at the clock's time let those delays show once, instead of adding up; the journal
    of a paced run has these times too.

    ``slack_s``: how far the instant may lie behind the clock; 0 where nothing is paced, and it is the clock's time.
    ``owed``: how many transfers have ended by this instant whose threads have not said so yet; set by a paced link.
    """

    def __init__(self, slack_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.owed: Callable[[], int] = lambda: 0
        self._slack_s, self._clock = slack_s, clock
        self._seen_s = -inf

    def saw(self, done_s: float) -> None:
        """The driver has taken an event of that time."""
        self._seen_s = max(self._seen_s, done_s)

    def now(self) -> float:
        """The last event's time, or at most ``slack_s`` ago."""
        return max(self._seen_s, self._clock() - self._slack_s)


class PacedLink:
    """Reads that share a model link as ``sharing`` says, each held back until it is due there.

    ``late`` and ``late_s``: transfers whose real read took longer than the link allowed, and by how much in all; a
    result with many of them was not held to the rate.
    """

    def __init__(
        self,
        sharing: FairShare,
        instant: Instant | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raises UserError for a rate that is no positive number."""
        if not 0 < sharing.bytes_per_s < inf:
            raise UserError(f"paced link of {sharing.bytes_per_s!r} bytes/s; expected a positive number")
        self.sharing = sharing
        self.late = 0
        self.late_s = 0.0
        self._instant = instant or Instant(SLACK_S, clock)
        self._instant.owed = self._owed
        self._clock, self._sleep = clock, sleep
        self._lock = Lock()
        self._transfers = _Transfers(sharing)
        self._count = 0

    def begin(self, n_bytes: int) -> Transfer:
        """A transfer is asked for.

        Transfers that are asked for later share the link and may move its due time, never to an earlier one.
        """
        with self._lock:
            number = self._count = self._count + 1
            self._transfers.add(number, n_bytes, self._instant.now())
        return Transfer(self, number)

    def _hold(self, number: int, there_s: float) -> float:
        due_s = self._due_s(number)
        while (left_s := due_s - self._clock()) > 0:
            self._sleep(left_s)
            due_s = self._due_s(number)
        return self._end(number, there_s, due_s)

    def _ended(self, number: int, there_s: float) -> float | None:
        due_s = self._due_s(number)
        return self._end(number, there_s, due_s) if due_s <= self._clock() else None

    def _end(self, number: int, there_s: float, due_s: float) -> float:
        with self._lock:
            self._transfers.forget(number)
            if there_s > due_s:
                self.late += 1
                self.late_s += there_s - due_s
        return max(there_s, due_s)

    def _due_s(self, number: int) -> float:
        with self._lock:
            return self._transfers.end_s(number)

    def _owed(self) -> int:
        with self._lock:
            return self._transfers.ended_by(self._instant.now())


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer of a paced link.  When its bytes are there, call it, or ask it until it has ``ended``."""

    _link: PacedLink
    _number: int

    def __call__(self, there_s: float) -> float:
        """Sleep until it is due; the time that counts as its end.  ``there_s``: since when its bytes were there."""
        return self._link._hold(self._number, there_s)

    def ended(self, there_s: float) -> float | None:
        """The same without sleeping; None if it is not due yet."""
        return self._link._ended(self._number, there_s)


class _Transfers:
    """Processor sharing in virtual time, as the simulator's link has it, moved by arrivals only.

    The virtual time is the number of bytes that a transfer present all along would have received; one that enters at V
    leaves when it reaches V + size.
    """

    def __init__(self, sharing: FairShare) -> None:
        self._sharing = sharing
        self._now_s = -inf
        self._virtual_bytes = 0.0
        self._waiting: deque[tuple[int, float]] = deque()  # (number, bytes)
        self._seeking: deque[tuple[float, int, float]] = deque()  # (end of latency, number, bytes)
        self._moving: list[tuple[float, int]] = []  # (virtual end, number)
        self._ended: dict[int, float] = {}

    def add(self, number: int, n_bytes: float, at_s: float) -> None:
        self._run(max(at_s, self._now_s))
        self._waiting.append((number, n_bytes))
        self._let_in()

    def end_s(self, number: int) -> float:
        """When it ends, or ended, if nothing else is asked for."""
        if number in self._ended:
            return self._ended[number]
        ahead = copy(self)
        ahead._waiting, ahead._seeking = self._waiting.copy(), self._seeking.copy()
        ahead._moving, ahead._ended = self._moving.copy(), {}
        return ahead._end_s(number)

    def ended_by(self, at_s: float) -> int:
        """How many have ended by then and were not forgotten."""
        self._run(max(at_s, self._now_s))
        return len(self._ended)

    def forget(self, number: int) -> None:
        """It has ended and nobody will ask for it again."""
        self._end_s(number)
        del self._ended[number]

    def _end_s(self, number: int) -> float:
        while number not in self._ended:
            self._run(self._next_s())
        return self._ended[number]

    def _next_s(self) -> float:
        seeking_s = self._seeking[0][0] if self._seeking else inf
        if not self._moving:
            return seeking_s
        left = self._moving[0][0] - self._virtual_bytes
        return min(seeking_s, self._now_s + left / self._sharing.rate(len(self._moving)))

    def _run(self, until_s: float) -> None:
        while (next_s := self._next_s()) <= until_s:
            self._advance(next_s)
            if self._seeking and self._seeking[0][0] <= next_s:
                _, number, n_bytes = self._seeking.popleft()
                heappush(self._moving, (self._virtual_bytes + n_bytes, number))
            else:
                self._virtual_bytes, number = heappop(self._moving)
                self._ended[number] = next_s
                self._let_in()
        self._advance(until_s)

    def _advance(self, to_s: float) -> None:
        if self._moving:
            self._virtual_bytes += (to_s - self._now_s) * self._sharing.rate(len(self._moving))
        self._now_s = to_s

    def _let_in(self) -> None:
        """Waiting transfers take the readers that are free."""
        while self._waiting and len(self._moving) + len(self._seeking) < self._sharing.slots:
            number, n_bytes = self._waiting.popleft()
            self._seeking.append((self._now_s + self._sharing.latency_s, number, n_bytes))

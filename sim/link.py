"""The link: experts on their way from storage into the cache.

Owns what is being read and how the rate is shared.  Knows neither experts nor jobs: a read is a number
and a size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

import simpy

from conf.sharing import FairShare
from sim.alarm import Alarm


class Link:
    """Processor sharing in virtual time: one heap, one alarm, no process per read.

    The virtual time is the number of bytes that a read present all along would have received; a read that enters
    at V leaves when it reaches V + size (the classic construction of fair queueing, here without packets).

    ``landed(read)`` is called at each completion; ``busy_changed(busy)`` when the link starts and ends to have work.
    What happens here sets ``changed``; the owner then calls ``arm`` before it lets time pass, so that any number of
    reads that start at one instant cost one timer.
    """

    def __init__(
        self,
        env: simpy.Environment,
        sharing: FairShare,
        landed: Callable[[int], None],
        busy_changed: Callable[[bool], None] | None = None,
    ) -> None:
        self._env = env
        self._landed = landed
        self._busy_changed = busy_changed
        self._slots = sharing.slots
        self._latency_s = sharing.latency_s
        self._rates = [0.0] + [sharing.rate(reads) for reads in range(1, self._slots + 1)]
        self._alarm = Alarm(env, self._ring)
        self._moving: list[tuple[float, int, int, float]] = []  # (virtual end, order, read, bytes)
        self._seeking: deque[tuple[float, int, float]] = deque()  # (end of latency, read, bytes)
        self._waiting: deque[tuple[int, float]] = deque()
        self._virtual_bytes = 0.0
        self._updated_s = 0.0
        self._order = 0
        self._busy = False
        self.changed = False
        self.bytes_landed = 0.0

    def start(self, read: int, size_bytes: float) -> None:
        """Read ``size_bytes``; the read waits if all readers are taken."""
        if len(self._moving) + len(self._seeking) == self._slots:
            self._waiting.append((read, size_bytes))
            return
        self.changed = True
        if not self._busy:
            self._set_busy(True)
        now_s = self._env.now
        if self._latency_s:
            self._seeking.append((now_s + self._latency_s, read, size_bytes))
            return
        if now_s != self._updated_s:
            self._advance(now_s)
        self._order += 1
        heappush(self._moving, (self._virtual_bytes + size_bytes, self._order, read, size_bytes))

    def arm(self) -> None:
        """Set the alarm for the next thing that happens here."""
        self.changed = False
        due_s = self._seeking[0][0] if self._seeking else inf
        moving = self._moving
        if moving:
            ends_s = self._updated_s + (moving[0][0] - self._virtual_bytes) / self._rates[len(moving)]
            due_s = min(due_s, ends_s) if self._seeking else ends_s
        self._alarm.set(due_s)

    def _advance(self, now_s: float) -> None:
        """Bring the virtual time up to now; who moves has not changed since the last call."""
        if self._moving:
            self._virtual_bytes += self._rates[len(self._moving)] * (now_s - self._updated_s)
        else:
            self._virtual_bytes = 0.0
        self._updated_s = now_s

    def _ring(self, now_s: float, instant_s: float) -> None:
        self.changed = True
        self._advance(now_s)
        moving, seeking = self._moving, self._seeking
        if moving:
            reached = self._virtual_bytes + (instant_s - now_s) * self._rates[len(moving)]
            while moving and moving[0][0] <= reached:
                _, _, read, size_bytes = heappop(moving)
                self.bytes_landed += size_bytes
                self._landed(read)
        while seeking and seeking[0][0] <= instant_s:
            _, read, size_bytes = seeking.popleft()
            self._order += 1
            heappush(moving, (self._virtual_bytes + size_bytes, self._order, read, size_bytes))
        while self._waiting and len(moving) + len(seeking) < self._slots:
            self.start(*self._waiting.popleft())
        if not moving and not seeking:
            self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        self._busy = busy
        if self._busy_changed:
            self._busy_changed(busy)

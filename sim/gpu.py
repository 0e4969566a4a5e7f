"""The GPU: batches that have been committed, and how fast they progress.

Owns launch, queue and progress of batches.  Knows only how long each would take alone on an idle machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

import simpy

from conf.sharing import GpuSharing
from sim.alarm import Alarm


class Gpu:
    """Progress of batches as remaining work and rate; one alarm.

    ``finished(batch)`` is called at each completion.  What happens here sets ``changed``; the owner then calls
    ``arm`` before it lets time pass.
    """

    def __init__(self, env: simpy.Environment, sharing: GpuSharing, finished: Callable[[int], None]) -> None:
        self._env = env
        self._host_s = sharing.host_s
        self._streams = sharing.streams
        self._alone = [0.0, 1.0] + [sharing.overlap_speedup / running for running in range(2, sharing.streams + 1)]
        self._contended = [rate / sharing.contention for rate in self._alone]
        self._rates = self._alone
        self._finished = finished
        self._alarm = Alarm(env, self._ring)
        self._launching: deque[tuple[float, int, float]] = deque()  # (end of launch, batch, work)
        self._queue: deque[tuple[int, float]] = deque()
        self._running: list[tuple[int, float]] = []  # (batch, work left in seconds)
        self._updated_s = 0.0
        self.changed = False

    def start(self, batch: int, work_s: float) -> None:
        """Commit a batch that takes ``work_s`` seconds alone."""
        self.changed = True
        now_s = self._env.now
        if self._host_s:
            self._launching.append((now_s + self._host_s, batch, work_s))
            return
        self._advance(now_s)
        self._enqueue(batch, work_s)

    def link_busy(self, busy: bool) -> None:
        """The link has begun or ended to move bytes."""
        self._advance(self._env.now)
        self._rates = self._contended if busy else self._alone
        self.changed = True

    def arm(self) -> None:
        """Set the alarm for the next thing that happens here."""
        self.changed = False
        due_s = self._launching[0][0] if self._launching else inf
        running = self._running
        if running:
            left_s = running[0][1] if len(running) == 1 else min(work for _, work in running)
            ends_s = self._updated_s + left_s / self._rates[len(running)]
            due_s = min(due_s, ends_s)
        self._alarm.set(due_s)

    def _enqueue(self, batch: int, work_s: float) -> None:
        if len(self._running) < self._streams:
            self._running.append((batch, work_s))
        else:
            self._queue.append((batch, work_s))

    def _advance(self, now_s: float) -> None:
        """Bring the work left up to now; who runs, and at which rate, has not changed since the last call."""
        if self._running:
            done_s = (now_s - self._updated_s) * self._rates[len(self._running)]
            self._running = [(batch, work - done_s) for batch, work in self._running]
        self._updated_s = now_s

    def _ring(self, now_s: float, instant_s: float) -> None:
        self.changed = True
        self._advance(now_s)
        tolerance_s = instant_s - now_s
        for entry in tuple(self._running):
            if entry[1] <= tolerance_s:
                self._running.remove(entry)
                self._finished(entry[0])
        launching = self._launching
        while launching and launching[0][0] <= instant_s:
            _, batch, work_s = launching.popleft()
            self._enqueue(batch, work_s)
        while self._queue and len(self._running) < self._streams:
            self._running.append(self._queue.popleft())

"""Where the driver hears of what others have done: one queue, and what came early.

Owns the events between their arrival and the core.  An error that was posted on another thread is raised here, in the
driver.  Knows neither decoder nor reader.
"""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from executor.host import HostTimes
from executor.pace import Instant
from executor.reader import Completions, Posted
from policies.core.messages import ComputeDone, Event

GATHER_S = 1e-3
"""How long the driver waits for a transfer that has ended at the same instant on a paced link."""

PATIENCE_S = 1.0
"""A driver to which nothing comes for so long looks whether the threads that should answer still live."""

Poll = Callable[[], Sequence[Posted]]
"""Completions since it was called last, of what nobody posts."""


class Inbox:
    """``times``: gets the seconds from a batch's end to here.  ``alive``: what must live, by name: if one has ended, an
    answer would never come.  ``instant``: hears the time of every event.  ``poll``: what is asked beside the queue,
    over and over where others block.
    """

    def __init__(
        self,
        done: Completions,
        times: HostTimes,
        alive: Mapping[str, Callable[[], bool]],
        instant: Instant,
        poll: Poll | None = None,
    ) -> None:
        self._done, self._times, self._alive, self._instant, self._poll = done, times, alive, instant, poll
        self._stash: deque[Event] = deque()

    def take(self) -> list[Event]:
        """Block until there is an event; that and all others at hand.  Raises what was posted as an error."""
        if not self._stash:
            self.receive()
        return self.at_hand()

    def at_hand(self) -> list[Event]:
        """All that has been received, without waiting."""
        events = list(self._stash)
        self._stash.clear()
        return events

    def until(self, event: Event) -> None:
        """Take events until ``event`` is among them; the others wait for ``take``."""
        while event not in self._stash:
            self.receive()
        self._stash.remove(event)

    def receive(self, timeout_s: float | None = None) -> None:
        """Take what was posted; block until there is something, or for ``timeout_s``.  Raises the first error among it.

        What ended at the same instant on a paced link is waited for: its threads wake one after the other, and the
        decision would be another one.  A ``poll`` is asked once if ``timeout_s`` is given.
        """
        if self._poll is not None:
            while not self._ask(self._poll) and timeout_s is None:
                os.sched_yield()
            return
        if timeout_s == 0.0 and self._done.empty():
            return  # the usual case of a driver that looks in passing; an exception costs microseconds
        with contextlib.suppress(queue.Empty):
            self._hear(self._first() if timeout_s is None else self._done.get(timeout_s > 0, timeout_s))
            while True:
                self._hear(self._done.get(timeout=GATHER_S) if self._instant.owed() else self._done.get_nowait())

    def _ask(self, poll: Poll) -> bool:
        """Whether anything was at hand."""
        heard = False
        for item in poll():
            self._hear(item)
            heard = True
        while not self._done.empty():
            self._hear(self._done.get())
            heard = True
        return heard

    def _hear(self, item: Posted) -> None:
        if isinstance(item, BaseException):
            raise item
        event, done_s = item
        self._stash.append(event)
        self._instant.saw(done_s)
        if isinstance(event, ComputeDone):
            self._times.notice_s += time.perf_counter() - done_s

    def _first(self) -> Posted:
        while True:
            try:
                return self._done.get(timeout=PATIENCE_S)
            except queue.Empty:
                for name, alive in self._alive.items():
                    if not alive():
                        raise RuntimeError(
                            f"the {name} thread has ended without an answer; the run is broken"
                        ) from None

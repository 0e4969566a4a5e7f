"""A timer that can be set again: at most one live SimPy event for each resource.

Owns the pending SimPy event.  Does not know what it is an alarm for.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import simpy
from simpy.events import Event, Timeout


def end_of_instant_s(now_s: float) -> float:
    """Up to here is still now: a picosecond, or a few roundings of a long run's clock."""
    return now_s + (1e-12 + 1e-15 * now_s)


class Alarm:
    """Calls ``ring(now_s, instant_s)`` at or before the time that was set last.

    ``instant_s`` is the end of the present instant: what is due by then is due.

    SimPy's events cannot be withdrawn.  An alarm that is moved back keeps its event, rings early and is set
    again by its owner; an alarm that is moved forward gets a new event, and the old one passes unheard.
    """

    __slots__ = ("_env", "_event", "_fired", "_ring", "_set_for_s")

    def __init__(self, env: simpy.Environment, ring: Callable[[float, float], None]) -> None:
        self._env = env
        self._ring = ring
        self._fired = self._fire  # bound once
        self._set_for_s = inf
        self._event: Event | None = None

    def set(self, at_s: float) -> None:
        """Ring not later than ``at_s``; ``inf`` asks for nothing."""
        if at_s < self._set_for_s:
            self._set_for_s = at_s
            delay_s = at_s - self._env.now
            self._event = event = Timeout(self._env, delay_s if delay_s > 0.0 else 0.0)
            event.callbacks.append(self._fired)

    def _fire(self, event: Event) -> None:
        if event is self._event:
            self._set_for_s = inf
            now_s = self._env.now
            self._ring(now_s, end_of_instant_s(now_s))

"""The host's CPU as a third resource: experts that are computed where they lie.

Owns what the CPU computes and when it ends.  Knows only how long each expert takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf

import simpy

from conf.sharing import HostSharing
from sim.alarm import Alarm


class Host:
    """One expert at a time on all cores, in order; activations go there and back beside that.

    ``finished(task)`` is called when a result has arrived.  What happens here sets ``changed``; the owner then calls
    ``arm`` before it lets time pass.
    """

    def __init__(self, env: simpy.Environment, sharing: HostSharing, finished: Callable[[int], None]) -> None:
        self._env, self._sharing, self._finished = env, sharing, finished
        self._alarm = Alarm(env, self._ring)
        self._free_s = 0.0
        self._tasks: deque[tuple[float, int]] = deque()  # (arrival of the result, task)
        self.changed = False

    def start(self, task: int, tokens: int) -> None:
        """Compute one expert for so many tokens."""
        self.changed = True
        sharing = self._sharing
        half_s = sharing.move_s / 2
        self._free_s = max(self._free_s, self._env.now + half_s) + sharing.seconds(tokens)
        self._tasks.append((self._free_s + half_s, task))

    def arm(self) -> None:
        """Set the alarm for the next result."""
        self.changed = False
        self._alarm.set(self._tasks[0][0] if self._tasks else inf)

    def _ring(self, now_s: float, instant_s: float) -> None:
        self.changed = True
        while self._tasks and self._tasks[0][0] <= instant_s:
            self._finished(self._tasks.popleft()[1])

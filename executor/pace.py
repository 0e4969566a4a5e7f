"""A link of fixed rate: real reads, held back until a model link would have delivered them.

Owns the due times.  Knows neither what is read nor by whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from policies.core.types import UserError


class PacedLink:
    """Transfers one after another at ``bytes_per_s``: ``due = max(last due, asked) + bytes / rate``.

    A due time counts from when the transfer was *asked for*, not from when a thread took it up: the time that
    a thread needs to wake from its last sleep is not added to the next transfer, so the rate is exact as long as
    transfers queue, and a thread's delay shows once instead of adding up.

    ``late`` and ``late_s``: transfers whose real read took longer than the link allowed, and by how much in
    all; a result with many of them was not held to the rate.
    """

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock`` in seconds, the same one that is given to ``reserve`` as ``asked_s``."""
        if not 0 < bytes_per_s < float("inf"):
            raise UserError(f"paced link of {bytes_per_s!r} bytes/s; expected a positive number")
        self.bytes_per_s = bytes_per_s
        self.late = 0
        self.late_s = 0.0
        self._clock = clock
        self._sleep = sleep
        self._lock = Lock()
        self._free_s = float("-inf")

    def reserve(self, n_bytes: int, asked_s: float) -> float:
        """The time at which a transfer asked for now is delivered."""
        with self._lock:
            self._free_s = max(self._free_s, asked_s) + n_bytes / self.bytes_per_s
            return self._free_s

    def hold(self, due_s: float) -> None:
        """Sleep until ``due_s``; a transfer that is late already is counted."""
        late_s = self._clock() - due_s
        if late_s > 0:
            with self._lock:
                self.late += 1
                self.late_s += late_s
            return
        while (left_s := due_s - self._clock()) > 0:
            self._sleep(left_s)

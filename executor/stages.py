"""What a run does before its first step, for whoever waits: a line a stage on standard error.

Owns when that is worth a line.  Measures nothing that a result depends on.
"""

from __future__ import annotations

import sys
import time

LARGE_BYTES = 4 << 30
"""A pack below this is open before anybody wonders."""


class Stages:
    """Call it with the stage that begins; silent for a pack of less than ``LARGE_BYTES``."""

    def __init__(self, pack_bytes: int) -> None:
        self._large = pack_bytes >= LARGE_BYTES
        self._began_s = time.perf_counter()

    def __call__(self, line: str) -> None:
        """Print it with the seconds since the run was made."""
        if self._large:
            print(f"{time.perf_counter() - self._began_s:7.1f} s  {line}", file=sys.stderr, flush=True)

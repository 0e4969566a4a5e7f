"""A random victim: the baseline that any idea has to beat."""

from __future__ import annotations

from collections.abc import Container
from random import Random as Generator

from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId


class Random(EvictionPolicy):
    """Any released expert, each with the same probability; the same for the same seed and calls."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = Generator(seed)
        self._released: list[ExpertId] = []
        self._place: dict[ExpertId, int] = {}

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Pinned: no candidate until it is released."""
        self.forget(expert)

    def release(self, expert: ExpertId) -> None:
        """A candidate from now on."""
        if expert not in self._place:
            self._place[expert] = len(self._released)
            self._released.append(expert)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """A draw; the next candidate in the list where the drawn one is not in ``evictable``."""
        n = len(self._released)
        if not n:
            return None
        start = self._generator.randrange(n)
        for i in range(start, start + n):
            expert = self._released[i % n]
            if expert in evictable:
                return expert
        return None

    def forget(self, expert: ExpertId) -> None:
        """Close the gap with the last of the list."""
        place = self._place.pop(expert, None)
        if place is None:
            return
        last = self._released.pop()
        if last != expert:
            self._released[place] = last
            self._place[last] = place

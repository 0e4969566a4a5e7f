"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId


class LRU(EvictionPolicy):
    """The expert whose last use is oldest leaves first; a prefetched one counts as used on entry.

    ``victim`` passes over the pinned experts at the old end, of which there are none in lockstep.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertId, None] = OrderedDict()

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Move to the recent end."""
        self._order[expert] = None
        self._order.move_to_end(expert)

    def admit(self, expert: ExpertId) -> None:
        """Enter at the recent end."""
        self._order[expert] = None

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The oldest member of ``evictable``."""
        for expert in self._order:
            if expert in evictable:
                return expert
        return None

    def forget(self, expert: ExpertId) -> None:
        """Drop it from the order."""
        del self._order[expert]

    def lockstep(self, capacity: int) -> Callable[[Sequence[ExpertId]], int]:
        """Whole batches for the untimed walk: what is touched moves to the recent end, so none of a batch can leave."""
        order = self._order
        move_to_end, popitem = order.move_to_end, order.popitem

        def lookup(batch: Sequence[ExpertId]) -> int:
            absent = []
            for expert in batch:
                if expert in order:
                    move_to_end(expert)
                else:
                    absent.append(expert)
            if not absent:
                return len(batch)
            for _ in range(len(order) + len(absent) - capacity):
                popitem(False)
            for expert in absent:
                order[expert] = None
            return len(batch) - len(absent)

        return lookup

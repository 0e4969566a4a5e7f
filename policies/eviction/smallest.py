"""Eviction by the smallest key, for keys that change while an expert is in the cache.

Owns a heap with lazy deletion; knows nothing of what a key means.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from heapq import heapify, heappop, heappush
from typing import Any

from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId

Entry = tuple[Any, ...]
"""A sort key whose last item is the expert."""

_SLACK = 1024


class SmallestFirst(EvictionPolicy):
    """The released expert with the smallest entry leaves first.

    ``_entries`` holds the one valid entry of each expert.  A subclass replaces it (a new tuple) on
    every change; copies of older tuples that are still in the heap are told apart by identity and
    dropped when they surface.  A pinned expert has no valid entry in the heap: it gets one at
    ``release``.  All methods are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._entries: dict[ExpertId, Entry] = {}
        self._heap: list[Entry] = []
        self._limit = _SLACK

    @abstractmethod
    def touch(self, expert: ExpertId, uses: int) -> None:
        """Replace the expert's entry by a new tuple."""

    def release(self, expert: ExpertId) -> None:
        """Enter the expert's valid entry into the heap."""
        heap = self._heap
        heappush(heap, self._entries[expert])
        if len(heap) > self._limit:
            self._compact()

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The member of ``evictable`` with the smallest valid entry."""
        heap, entries = self._heap, self._entries
        kept_back: list[Entry] = []
        found: ExpertId | None = None
        while heap:
            entry = heap[0]
            expert: ExpertId = entry[-1]
            if entries.get(expert) is not entry:
                heappop(heap)
            elif expert in evictable:
                found = expert
                break
            else:
                kept_back.append(heappop(heap))
        for entry in kept_back:
            heappush(heap, entry)
        return found

    def forget(self, expert: ExpertId) -> None:
        """Invalidate the expert's entry."""
        del self._entries[expert]

    def _compact(self) -> None:
        """Drop stale entries; at least as many pushes lie between two calls as the heap keeps entries."""
        entries = self._entries
        self._heap = [entry for entry in self._heap if entries.get(entry[-1]) is entry]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK

"""Eviction by the smallest key, for keys that change while an expert is in the cache.

Owns a heap that is brought up to date where it is looked at; knows nothing of what a key means.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from policies.core.protocols import EvictionPolicy
from policies.core.types import ExpertId

Entry = tuple[Any, ...]
"""A sort key whose last item is the expert."""

_SLACK = 1024


class SmallestFirst(EvictionPolicy):
    """The released expert with the smallest entry leaves first.

    ``_entries`` holds the present entry of each expert; a subclass replaces it (a new tuple) on every change.  The heap
    holds one item of each candidate that is not above its entry: an entry that has grown since is put in its place
    when its item surfaces, and a release needs a new item only if the entry has shrunk.  ``_items``: the item that
    counts; others of the expert are dropped when they surface.  ``_released``: each expert's entry at its last release,
    by which a candidate is told from an expert in use.  All methods are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._entries: dict[ExpertId, Entry] = {}
        self._items: dict[ExpertId, Entry] = {}
        self._released: dict[ExpertId, Entry] = {}
        self._heap: list[Entry] = []
        self._limit = _SLACK

    @abstractmethod
    def touch(self, expert: ExpertId, uses: int) -> None:
        """Replace the expert's entry by a new tuple."""

    def release(self, expert: ExpertId) -> None:
        """Make sure that the heap has an item that is not above the expert's entry."""
        entry = self._released[expert] = self._entries[expert]
        item = self._items.get(expert)
        if item is not None and item <= entry:
            return
        self._items[expert] = entry
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._compact()

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The member of ``evictable`` with the smallest entry."""
        heap, entries, items, released = self._heap, self._entries, self._items, self._released
        kept_back: list[Entry] = []
        found: ExpertId | None = None
        while heap:
            item = heap[0]
            expert: ExpertId = item[-1]
            if items.get(expert) is not item:
                heappop(heap)
                continue
            entry = entries[expert]
            if expert not in evictable:
                heappop(heap)
                if released[expert] is entry:
                    items[expert] = entry
                    kept_back.append(entry)
                else:  # in use
                    del items[expert]
            elif entry is item:
                found = expert
                break
            else:
                items[expert] = entry
                heapreplace(heap, entry)
        for item in kept_back:
            heappush(heap, item)
        return found

    def forget(self, expert: ExpertId) -> None:
        """Drop the expert's entry and its item."""
        del self._entries[expert]
        self._items.pop(expert, None)

    def _compact(self) -> None:
        """Drop items that do not count; at least as many pushes lie between two calls as the heap keeps items."""
        items = self._items
        self._heap = [item for item in self._heap if items.get(item[-1]) is item]
        heapify(self._heap)
        self._limit = 2 * len(self._heap) + _SLACK

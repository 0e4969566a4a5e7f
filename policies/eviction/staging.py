"""Staging buffers for prefetched experts, as Mixtral-Offloading has them (arXiv 2312.17238)."""

from __future__ import annotations

from collections.abc import Callable, Container

from policies.core.messages import Gate
from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, ExpertId, RequestId


class Staging(EvictionPolicy):
    """``staging`` slots of the cache are set aside for prefetched experts, which replace nothing else.

    A staged expert that is used joins the cache when its use is over, and the victim that it replaces there is staged
    instead, the first to go; one that is not used is replaced by the next prefetch.  (About four buffers shared by all
    layers, from memory of the report, unchecked.)

    An incoming expert is a demand if a gate of this step chose it, else a prefetch.  ``inner``: makes the policy of all
    other slots, by its argument ``capacity``.
    """

    def __init__(self, inner: Callable[..., EvictionPolicy], staging: int, capacity: int) -> None:
        if not 1 <= staging < capacity:
            raise CapacityError(
                f"Staging: {staging} of {capacity} cache slots are set aside for prefetches; expected at least 1 and "
                f"fewer than all"
            )
        self._inner = inner(capacity=capacity - staging)
        self._staging = staging
        self._staged: dict[ExpertId, None] = {}  # the first to go first
        self._used: set[ExpertId] = set()  # of the staged
        self._released: set[ExpertId] = set()  # of the others
        self._demanded: set[ExpertId] = set()

    def begin_step(self, step: int) -> None:
        """No gate has chosen yet."""
        self._demanded.clear()
        self._inner.begin_step(step)

    def observe(self, request: RequestId, gate: Gate) -> None:
        """What comes in of these is a demand."""
        self._demanded.update(gate.experts)
        self._inner.observe(request, gate)

    def touch(self, expert: ExpertId, uses: int) -> None:
        """A staged expert is used; any other is the inner policy's."""
        if expert in self._staged:
            self._used.add(expert)
        else:
            self._released.discard(expert)
            self._inner.touch(expert, uses)

    def admit(self, expert: ExpertId) -> None:
        """Stage it, the last to go."""
        self._staged[expert] = None

    def release(self, expert: ExpertId) -> None:
        """A staged expert that was used changes places with a victim."""
        if expert in self._staged:
            if expert not in self._used:
                return
            if self._inner.full(expert):
                victim = self._inner.victim(self._released, expert)
                if victim is None:  # all of its layer are in use: it stays staged
                    return
                self._inner.forget(victim)
                self._released.discard(victim)
                self._staged = {victim: None, **self._staged}
            del self._staged[expert]
            self._used.discard(expert)
            self._inner.touch(expert, 1)
        self._released.add(expert)
        self._inner.release(expert)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """For a demand the inner policy's victim, for a prefetch the first staged expert."""
        found = self._inner.victim(evictable, incoming) if incoming in self._demanded else None
        if found is None:
            found = next((expert for expert in self._staged if expert in evictable), None)
        return found

    def forget(self, expert: ExpertId) -> None:
        """Drop it from where it is."""
        if expert in self._staged:
            del self._staged[expert]
            self._used.discard(expert)
        else:
            self._released.discard(expert)
            self._inner.forget(expert)

    def full(self, incoming: ExpertId) -> bool:
        """True if the incoming expert's part of the cache is full."""
        if incoming in self._demanded:
            return self._inner.full(incoming)
        return len(self._staged) >= self._staging

    def room(self, layer: int, capacity: int) -> int:
        """That of the inner policy."""
        return self._inner.room(layer, capacity - self._staging)

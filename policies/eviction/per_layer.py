"""A cache that is split between the layers, as Mixtral-Offloading and ProMoE have it."""

from __future__ import annotations

from collections.abc import Callable, Container

from policies.core.messages import Gate
from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, ExpertId, RequestId


class PerLayer(EvictionPolicy):
    """Every layer has its own share of the slots and its own policy.

    ``inner``: makes the policy of one layer.  ``capacity``: slots of the whole cache; where the split
    is not even, the first layers have one slot more.
    """

    def __init__(self, inner: Callable[[], EvictionPolicy], n_layers: int, n_experts: int, capacity: int) -> None:
        if capacity < n_layers:
            raise CapacityError(
                f"a cache of {capacity} slots split between {n_layers} layers leaves some without any; "
                f"use at least {n_layers}"
            )
        self._n_experts = n_experts
        self._inner = [inner() for _ in range(n_layers)]
        self._observers = [p for p in self._inner if type(p).observe is not EvictionPolicy.observe]
        self._entries: list[set[ExpertId]] = [set() for _ in range(n_layers)]
        self._share = [self.room(layer, capacity) for layer in range(n_layers)]

    def begin_step(self, step: int) -> None:
        """Tell every layer."""
        for policy in self._inner:
            policy.begin_step(step)

    def observe(self, request: RequestId, gate: Gate) -> None:
        """Tell every layer that listens: predictions may concern any of them."""
        for policy in self._observers:
            policy.observe(request, gate)

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Tell its layer."""
        layer = expert // self._n_experts
        self._entries[layer].add(expert)
        self._inner[layer].touch(expert, uses)

    def admit(self, expert: ExpertId) -> None:
        """Tell its layer."""
        layer = expert // self._n_experts
        self._entries[layer].add(expert)
        self._inner[layer].admit(expert)

    def release(self, expert: ExpertId) -> None:
        """Tell its layer."""
        self._inner[expert // self._n_experts].release(expert)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """A victim of the incoming expert's own layer."""
        return self._inner[incoming // self._n_experts].victim(evictable, incoming)

    def forget(self, expert: ExpertId) -> None:
        """Tell its layer."""
        layer = expert // self._n_experts
        self._entries[layer].discard(expert)
        self._inner[layer].forget(expert)

    def full(self, incoming: ExpertId) -> bool:
        """True if the incoming expert's layer has used its share."""
        layer = incoming // self._n_experts
        return len(self._entries[layer]) >= self._share[layer]

    def room(self, layer: int, capacity: int) -> int:
        """The share of ``layer``."""
        even, left = divmod(capacity, len(self._inner))
        return even + (layer < left)

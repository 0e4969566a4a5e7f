"""LRU in which a prediction counts as a use (ProMoE, arXiv 2410.22134)."""

from __future__ import annotations

from policies.core.messages import Gate
from policies.core.types import RequestId
from policies.eviction.lru import LRU


class PredictedLRU(LRU):
    """Least recently used; a predicted expert that is in the cache moves to the recent end.

    ``promote_hit_in_prefetch`` of ProMoE's code, on by default there: predictions steer eviction too.
    """

    def observe(self, request: RequestId, gate: Gate) -> None:
        """Touch what is predicted, the likeliest last."""
        order = self._order
        for expert, _ in reversed(gate.predicted):
            if expert in order:
                order.move_to_end(expert)

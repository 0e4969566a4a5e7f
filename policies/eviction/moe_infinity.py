"""MoE-Infinity's rule (arXiv 2401.14361): experts of early layers are dearer, since nobody can prefetch them."""

from __future__ import annotations

from policies.core.types import ExpertId
from policies.eviction.smallest import SmallestFirst


class MoEInfinityScore(SmallestFirst):
    """The expert with the smallest visits x (1 - layer / layers) leaves first; among equals the one used longest ago.

    Visits count token uses since the expert entered the cache.  From memory of the paper (unchecked), whose ratio of
    activations has the same denominator for all; the released code holds several rules that contradict each other.
    """

    def __init__(self, n_layers: int, n_experts: int) -> None:
        super().__init__()
        self._n_layers, self._n_experts = n_layers, n_experts
        self._visits: dict[ExpertId, int] = {}
        self._tick = 0

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Count the uses."""
        self._tick += 1
        visits = self._visits[expert] = self._visits.get(expert, 0) + uses
        weight = self._n_layers - expert // self._n_experts
        self._entries[expert] = (visits * weight, self._tick, expert)

    def admit(self, expert: ExpertId) -> None:
        """Enter without a visit."""
        self.touch(expert, 0)

    def forget(self, expert: ExpertId) -> None:
        """Visits start anew at the next entry."""
        super().forget(expert)
        del self._visits[expert]

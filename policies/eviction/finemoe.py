"""FineMoE's score (arXiv 2502.05370): predicted probability times visits while in the cache."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal, get_args

from policies.core.messages import Gate
from policies.core.types import ExpertId, RequestId, UserError
from policies.eviction.smallest import SmallestFirst

Arithmetic = Literal["float", "integer"]


class FineMoEScore(SmallestFirst):
    """The expert with the smallest score leaves first; among equals the one touched longest ago.

    The probability is that of the latest prediction that listed the expert (the last writer wins), zero
    if none did.  A visit is a touch, or the entry of a prefetch.  Eviction clears both.
    ``arithmetic``: ``float`` as the paper means it; ``integer`` cuts the score to an integer as the
    released code does, so that every score below one is a tie.
    """

    def __init__(self, arithmetic: Arithmetic = "float") -> None:
        super().__init__()
        if arithmetic not in get_args(Arithmetic):
            raise UserError(
                f"FineMoEScore: arithmetic is {arithmetic!r}, expected one of {', '.join(get_args(Arithmetic))}"
            )
        self._cut = arithmetic == "integer"
        self._probability: dict[ExpertId, float] = {}
        self._visits: dict[ExpertId, int] = {}
        self._moved: dict[ExpertId, float] = {}  # candidates whose place in the heap is that of an older probability
        self._tick = 0

    def observe(self, request: RequestId, gate: Gate) -> None:
        """Take over the predicted probabilities; candidates move when somebody asks for a victim."""
        self._probability.update(gate.predicted)
        self._moved.update(gate.predicted)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """The candidate with the smallest score of the latest probabilities."""
        if self._moved:
            entries, released = self._entries, self._released
            for expert in self._moved:
                entry = entries.get(expert)
                if entry is not None and released.get(expert) is entry:
                    self.release(expert)
            self._moved.clear()
        return super().victim(evictable, incoming)

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Count one visit, whatever the number of requests."""
        self._visits[expert] = self._visits.get(expert, 0) + 1
        self._tick += 1
        self._entries[expert] = (0, self._tick, expert)  # the score that counts is that of the release

    def admit(self, expert: ExpertId) -> None:
        """Entry counts as a visit: a prediction alone keeps a prefetched expert."""
        self.touch(expert, 0)

    def release(self, expert: ExpertId) -> None:
        """Become a candidate at the present score."""
        score = self._probability.get(expert, 0.0) * self._visits[expert]
        self._entries[expert] = (int(score) if self._cut else score, self._entries[expert][1], expert)
        super().release(expert)

    def forget(self, expert: ExpertId) -> None:
        """Clear the probability and the visits."""
        super().forget(expert)
        self._probability.pop(expert, None)
        del self._visits[expert]

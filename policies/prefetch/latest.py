"""Prefetch what the latest prediction says and nothing else (MoE-Infinity, and FineMoE as released)."""

from __future__ import annotations

from policies.core.messages import Prediction
from policies.core.protocols import PrefetchView
from policies.core.types import ExpertId, UserError


class Latest:
    """One queue, which every prediction empties and replaces; its experts in their order.

    Predictions come request by request, so in a batch the last request's overwrites the others', and a layer's
    overwrites what the layer before could not have read in time.  ``max_in_flight`` and ``hold``: see
    ``PrefetchPolicy``.
    """

    def __init__(self, max_in_flight: int = 2, hold: bool = True) -> None:
        if max_in_flight < 1:
            raise UserError(f"Latest: max_in_flight is {max_in_flight}, expected at least 1 reader")
        self.max_in_flight = max_in_flight
        self.hold = hold
        self._last_job = 0
        self._queue: list[Prediction] = []  # the best last

    def next(self, view: PrefetchView) -> ExpertId | None:
        """The next absent expert of the queue."""
        for job in view.jobs:
            if job.id > self._last_job:
                self._last_job = job.id
                for predictions in job.predicted:
                    if predictions:
                        self._queue = list(reversed(predictions))
        while self._queue:
            expert, _ = self._queue.pop()
            if view.absent(expert):
                return expert
        return None

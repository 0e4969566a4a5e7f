"""Prefetch for the nearest layer first, keeping predictions until their layer is reached (ProMoE, FineMoE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from policies.core.messages import Prediction
from policies.core.protocols import PrefetchView
from policies.core.types import ExpertId, UserError

Priority = Literal["layer", "score"]


class ByLayer:
    """A queue for each later layer, filled by every gate, dropped when all requests have reached that layer.

    Scores of different requests and gates for one expert add up.  ``most``: experts that a layer's queue offers in one
    step, the best first (ProMoE's ``num_predict`` for a whole batch; None: all).  ``priority``: lowest layer first, or
    the best score of any layer.  ``max_in_flight`` and ``hold``: see ``PrefetchPolicy``.  An expert is offered once.

    ProMoE reads a prefetch tensor by tensor so that a demand waits for one tensor at most; here an expert is one read,
    and demands have readers of their own.
    """

    def __init__(
        self,
        n_experts: int,
        max_in_flight: int = 2,
        hold: bool = True,
        most: int | None = None,
        priority: Priority = "layer",
    ) -> None:
        if max_in_flight < 1:
            raise UserError(f"ByLayer: max_in_flight is {max_in_flight}, expected at least 1 reader")
        if most is not None and most < 1:
            raise UserError(f"ByLayer: most is {most}, expected null or at least 1 expert a layer")
        if priority not in get_args(Priority):
            raise UserError(f"ByLayer: priority is {priority!r}, expected one of {', '.join(get_args(Priority))}")
        self.max_in_flight = max_in_flight
        self.hold = hold
        self._n_experts, self._most, self._nearest = n_experts, most, priority == "layer"
        self._scores: dict[int, dict[ExpertId, float]] = {}  # by layer
        self._ranked: dict[int, list[tuple[float, int]]] = {}  # by layer, the best last: (score, -expert)
        self._offered: dict[int, dict[ExpertId, None]] = {}  # by layer
        self._last_job = 0
        self._lowest = 0

    def next(self, view: PrefetchView) -> ExpertId | None:
        """The next absent expert of the queues."""
        self._take_in(view)
        best: tuple[float, int] | None = None
        for layer in sorted(self._scores):
            head = self._head(layer, view)
            if head is not None and (best is None or head[0] > best[0]):
                best = head
                if self._nearest:
                    break
        if best is None:
            return None
        expert = -best[1]
        layer = expert // self._n_experts
        self._ranked[layer].pop()
        self._offered.setdefault(layer, {})[expert] = None
        return expert

    def _take_in(self, view: PrefetchView) -> None:
        """Read the gates that came since, and drop the layers that everybody has reached."""
        jobs = view.jobs
        lowest = min([job.layer for job in jobs], default=0)
        if lowest == self._lowest and (not jobs or jobs[-1].id == self._last_job):
            return
        if lowest < self._lowest:  # a new step
            self._scores, self._ranked, self._offered = {}, {}, {}
        self._lowest = lowest
        for job in jobs:
            if job.id <= self._last_job:
                continue
            for predictions in job.predicted:
                self._add(predictions)
            self._last_job = job.id
        for layer in [layer for layer in self._scores if layer <= lowest]:
            del self._scores[layer]
            self._ranked.pop(layer, None)
            self._offered.pop(layer, None)

    def _add(self, predictions: Sequence[Prediction]) -> None:
        first = after = 0  # the layer at hand: most predictions in a row are for one
        scores: dict[ExpertId, float] = {}
        for expert, score in predictions:
            if not first <= expert < after:
                layer = expert // self._n_experts
                first = layer * self._n_experts
                after = first + self._n_experts
                scores = self._scores.setdefault(layer, {})
                self._ranked.pop(layer, None)
            scores[expert] = scores.get(expert, 0.0) + score

    def _head(self, layer: int, view: PrefetchView) -> tuple[float, int] | None:
        """The best absent expert of a layer that was not offered yet."""
        ranked = self._ranked.get(layer)
        if ranked is None:
            order = sorted([(score, -expert) for expert, score in self._scores[layer].items()])
            ranked = order if self._most is None else order[-self._most :]
            self._ranked[layer] = ranked
        offered, absent = self._offered.get(layer, {}), view.absent
        while ranked and (-ranked[-1][1] in offered or not absent(-ranked[-1][1])):
            ranked.pop()
        return ranked[-1] if ranked else None

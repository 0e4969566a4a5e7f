"""Prefetch what the predictions of unfinished jobs rank highest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from policies.core.messages import Prediction
from policies.core.progress import Job, JobState
from policies.core.protocols import PrefetchView
from policies.core.types import ExpertId, UserError

Aggregate = Literal["max", "sum"]


class Ranked:
    """The absent expert with the best score among the predictions of the jobs it may serve.

    The scores of a job's requests for one expert are joined by ``aggregate``; equal scores go by
    expert id.  An expert is offered once a job: if no slot could be had it is dropped, not retried.

    ``max_in_flight``: readers that prefetches may occupy; ``hold``: see ``PrefetchPolicy``;
    ``only_idle``: only while no demand fetch is in flight either; ``while_running``: only for jobs on
    the GPU (Bevy + Prefetch, paper §5.5).
    """

    def __init__(
        self,
        max_in_flight: int = 2,
        hold: bool = True,
        only_idle: bool = False,
        while_running: bool = False,
        aggregate: Aggregate = "max",
    ) -> None:
        if max_in_flight < 1:
            raise UserError(f"Ranked: max_in_flight is {max_in_flight}, expected at least 1 reader")
        if aggregate not in get_args(Aggregate):
            raise UserError(f"Ranked: aggregate is {aggregate!r}, expected one of {', '.join(get_args(Aggregate))}")
        self.max_in_flight = max_in_flight
        self.hold = hold
        self._only_idle = only_idle
        self._while_running = while_running
        self._aggregate = aggregate
        self._rankings: dict[int, list[Prediction]] = {}  # by job, the best last

    def next(self, view: PrefetchView) -> ExpertId | None:
        """The best absent expert; ties to the older job."""
        if self._only_idle and view.demand_in_flight:
            return None
        jobs = view.jobs
        best: list[Prediction] | None = None
        for job in jobs:
            if self._while_running and job.state is not JobState.RUNNING:
                continue
            ranking = self._rankings.get(job.id)
            if ranking is None:
                self._forget_all_but(jobs)
                ranking = self._rankings[job.id] = self._rank(job)
            while ranking and not view.absent(ranking[-1][0]):
                ranking.pop()
            if ranking and (best is None or ranking[-1][1] > best[-1][1]):
                best = ranking
        return best.pop()[0] if best else None

    def _rank(self, job: Job) -> list[Prediction]:
        scores: dict[ExpertId, float] = {}
        add = self._aggregate == "sum"
        for predictions in job.predicted:
            for expert, score in predictions:
                known = scores.get(expert)
                if known is None or (score > known and not add):
                    scores[expert] = score
                elif add:
                    scores[expert] = known + score
        return sorted(scores.items(), key=lambda item: (item[1], -item[0]))

    def _forget_all_but(self, jobs: Iterable[Job]) -> None:
        live = {job.id for job in jobs}
        self._rankings = {job: ranking for job, ranking in self._rankings.items() if job in live}

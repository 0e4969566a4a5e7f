"""Jobs and the Progress Table (paper §4.1, Figure 6): who stands at which layer, and in which state.

Owns the jobs of the running step.  Does not know the cache, the link or the order of service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from policies.core.messages import Prediction
from policies.core.types import ExpertId, RequestId


class JobState(IntEnum):
    """Where a job stands."""

    BLOCKED = 0  # some of its experts are missing
    READY = 1  # all are resident
    RUNNING = 2  # committed to the GPU


@dataclass(eq=False, slots=True)
class Job:
    """Job l of one unit of requests: MoE of layer l, then attention and gate of layer l + 1.

    ``missing`` counts experts that are not resident yet, those in flight included; ``queued``
    holds the missing experts whose fetch has not started, in fetch order.  ``id`` grows with the
    order of issue and ``ready_seq`` with the order of becoming ready.  ``hosted``: experts that the host still
    computes for it; they are missing, but not among ``needs``.
    """

    id: int
    unit: int
    requests: tuple[RequestId, ...]
    layer: int
    needs: tuple[ExpertId, ...]
    predicted: tuple[tuple[Prediction, ...], ...] = ()
    hosted: int = 0
    state: JobState = JobState.BLOCKED
    missing: int = 0
    queued: dict[ExpertId, None] = field(default_factory=dict)
    ready_seq: int = -1


class ProgressTable:
    """The unfinished jobs of the step, at most one for each unit of requests."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.ready: dict[int, Job] = {}
        self._ready_seq = 0

    def add(self, job: Job) -> None:
        """A new, blocked job."""
        self.jobs[job.id] = job

    def make_ready(self, job: Job) -> None:
        """The last missing expert of ``job`` is resident."""
        self._ready_seq += 1
        job.ready_seq = self._ready_seq
        job.state = JobState.READY
        self.ready[job.id] = job

    def commit(self, group: Sequence[Job]) -> None:
        """These jobs run on the GPU from now on."""
        for job in group:
            job.state = JobState.RUNNING
            del self.ready[job.id]

    def finish(self, job: Job) -> None:
        """``job`` has left the GPU."""
        del self.jobs[job.id]

    def lowest_layer(self, otherwise: int) -> int:
        """The layer of the request that lags most; ``otherwise`` if none is unfinished."""
        return min((job.layer for job in self.jobs.values()), default=otherwise)

    def check(self) -> None:
        """Assert that states, counts and lists agree."""
        for job in self.jobs.values():
            assert (job.state is JobState.BLOCKED) == (job.missing > 0), (
                f"job {job.id} is {job.state.name}, {job.missing} missing"
            )
            assert (job.state is JobState.READY) == (job.id in self.ready), (
                f"job {job.id}: state and ready list disagree"
            )
        assert self.ready.keys() <= self.jobs.keys(), "a ready job is not in the table"
        units = [job.unit for job in self.jobs.values()]
        assert len({*units}) == len(units), "a unit has two jobs"

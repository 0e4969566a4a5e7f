"""The Expert Fetcher's queue (paper §4.2): which missing expert is read next, and what is in flight.

Owns the order of demand fetches and the table of running ones.  Does not know slots or victims.
"""

from __future__ import annotations

from policies.core.progress import Job
from policies.core.protocols import JobOrder
from policies.core.types import ExpertId, FetchKind, ProtocolError


class FetchQueue:
    """Blocked jobs that still have a queued expert, and the fetches in flight.

    Only such a job can be chosen to fetch for: one whose missing experts are all in flight has
    nothing left to start.  An expert that several jobs wait for is queued for each of them, so the
    most urgent of them decides when it is read.

    ``flights``: fetch id -> expert of the fetches in flight; others only read it.
    """

    def __init__(self, order: JobOrder) -> None:
        self._key = order.key
        self._jobs: dict[int, Job] = {}
        self.flights: dict[int, ExpertId] = {}
        self._prefetches: dict[ExpertId, None] = {}

    @property
    def prefetches(self) -> int:
        """Prefetches in flight that no job has come to wait for."""
        return len(self._prefetches)

    @property
    def backlog(self) -> int:
        """Experts that are queued or in flight."""
        return len({expert for job in self._jobs.values() for expert in job.queued}) + len(self.flights)

    def add(self, job: Job) -> None:
        """A job was blocked; its ``queued`` experts want to be read."""
        if job.queued:
            self._jobs[job.id] = job

    def choose(self) -> Job | None:
        """The job that comes first, whose ``queued`` experts are read next, or None.

        Jobs enter in the order of their ids, and ``min`` keeps the first of equals: ties go to the
        lower id.
        """
        jobs = self._jobs
        if len(jobs) > 1:
            return min(jobs.values(), key=self._key)
        return next(iter(jobs.values()), None)

    def start(self, fetch: int, expert: ExpertId, waiters: list[Job]) -> FetchKind:
        """``fetch`` reads ``expert`` from now on; nobody has it queued any more.

        A fetch that nobody waits for is a prefetch.
        """
        self.flights[fetch] = expert
        if not waiters:
            self._prefetches[expert] = None
            return FetchKind.PREFETCH
        for job in waiters:
            del job.queued[expert]
            if not job.queued:
                del self._jobs[job.id]
        return FetchKind.DEMAND

    def upgrade(self, expert: ExpertId) -> None:
        """A job waits for ``expert``, which is in flight: from now on that is a demand fetch."""
        self._prefetches.pop(expert, None)

    def land(self, fetch: int) -> ExpertId:
        """``fetch`` has completed.  Raises ProtocolError if it is not in flight."""
        expert = self.flights.pop(fetch, None)
        if expert is None:
            raise ProtocolError(f"FetchDone({fetch}): no such fetch is in flight; it was never issued or came twice")
        self._prefetches.pop(expert, None)
        return expert

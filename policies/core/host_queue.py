"""The host's CPU as the core sees it: which experts it has yet to compute, and for which jobs.

Owns the tasks that wait to be issued and those that run.  Does not know how long anything takes.
"""

from __future__ import annotations

from collections import deque

from policies.core.messages import HostCompute
from policies.core.progress import Job
from policies.core.protocols import CoExecution
from policies.core.types import ExpertId, ProtocolError, RequestId


class HostQueue:
    """Experts that the CPU has yet to compute, each for one job.

    ``policy``: None if no CPU computes.  ``new``: what is to be issued; ``tasks``: what runs, by task: the job and its
    requests that need the expert.  Others only read these.
    """

    def __init__(self, policy: CoExecution | None) -> None:
        self.policy = policy
        self.new: deque[tuple[Job, ExpertId, tuple[RequestId, ...]]] = deque()
        self.tasks: dict[int, tuple[Job, int]] = {}

    @property
    def backlog(self) -> list[int]:
        """Tokens of each expert that the CPU has yet to compute."""
        return [tokens for _, tokens in self.tasks.values()] + [len(requests) for *_, requests in self.new]

    def add(self, job: Job, expert: ExpertId, requests: tuple[RequestId, ...]) -> None:
        """``job`` waits for ``expert``, computed for these of its requests."""
        self.new.append((job, expert, requests))

    def issue(self, task: int) -> HostCompute:
        """The oldest of ``new`` runs as ``task`` from now on."""
        job, expert, requests = self.new.popleft()
        self.tasks[task] = (job, len(requests))
        return HostCompute(task, expert, requests)

    def land(self, task: int) -> Job:
        """The result of ``task`` has arrived; returns the job that waits for it.  Raises ProtocolError if none runs."""
        job, _ = self.tasks.pop(task, (None, 0))
        if job is None:
            raise ProtocolError(f"HostDone({task}): the host has no such task; it was never issued or came twice")
        return job

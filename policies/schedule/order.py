"""Orders of jobs, for compute and for fetch (paper §4.2 and §5.4.2); the smallest key goes first."""

from __future__ import annotations

from typing import Literal, get_args

from policies.core.progress import Job
from policies.core.types import UserError

By = Literal["ready", "issue"]


class LowestLayerFirst:
    """The job with the least progress."""

    def key(self, job: Job) -> tuple[int, ...]:
        """Its layer."""
        return (job.layer,)


class Fifo:
    """The oldest job, by when it became ready or by when it was issued."""

    def __init__(self, by: By = "ready") -> None:
        if by not in get_args(By):
            raise UserError(f"Fifo: by is {by!r}, expected one of {', '.join(get_args(By))}")
        self._by_ready = by == "ready"

    def key(self, job: Job) -> tuple[int, ...]:
        """Its place in that order."""
        return (job.ready_seq,) if self._by_ready else (job.id,)


class LowestLayerThenSrtf:
    """The job with the least progress; at one layer the one with the fewest missing experts (Algorithm 1)."""

    def key(self, job: Job) -> tuple[int, ...]:
        """Layer, then missing experts."""
        return (job.layer, job.missing)


class GlobalSrtf:
    """The job with the fewest missing experts, whatever its layer."""

    def key(self, job: Job) -> tuple[int, ...]:
        """Missing experts."""
        return (job.missing,)

"""Batching: which ready jobs run with the lead job (paper §4.3)."""

from __future__ import annotations

from collections.abc import Sequence

from policies.core.progress import Job


class SameLayer:
    """Opportunistic layerwise grouping: all jobs that are ready at the lead's layer."""

    def group(self, lead: Job, ready: Sequence[Job]) -> Sequence[Job]:
        """The ready jobs at the lead's layer, in their given order."""
        return [job for job in ready if job.layer == lead.layer]


class Alone:
    """The lead runs alone: its unit is the batch."""

    def group(self, lead: Job, ready: Sequence[Job]) -> Sequence[Job]:
        """The lead."""
        return (lead,)

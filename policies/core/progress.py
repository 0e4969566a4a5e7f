"""Jobs and the Progress Table (paper §4.1, Figure 6): who stands at which layer, and in which state.

Owns the jobs of the running step.  Does not know the cache, the link or the order of service.
"""

from __future__ import annotations

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
    order of issue and ``ready_seq`` with the order of becoming ready.
    """

    id: int
    unit: int
    requests: tuple[RequestId, ...]
    layer: int
    needs: tuple[ExpertId, ...]
    predicted: tuple[tuple[Prediction, ...], ...] = ()
    state: JobState = JobState.BLOCKED
    missing: int = 0
    queued: dict[ExpertId, None] = field(default_factory=dict)
    ready_seq: int = -1

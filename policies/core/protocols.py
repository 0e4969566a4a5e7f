"""The plug-in sockets: what a policy, a source of routing, a workload and a backend must offer.

A new policy is one class here or anywhere on the import path, and one YAML that names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from typing import Protocol, runtime_checkable

from policies.core.messages import Command, Event, Gate, StepBegin
from policies.core.progress import Job
from policies.core.types import ExpertId, FetchKind, RequestId


class Partition(Protocol):
    """Which requests move together through a whole step."""

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """Split the step's requests into units; every request in exactly one of them."""
        ...


@runtime_checkable
class LearningPartition(Partition, Protocol):
    """A partition that learns from how long its steps took."""

    def learn(self, seconds: float, busy_s: float, fetches: int, experts: int) -> None:
        """What the step that ``units`` was asked for last took, and what it was.

        ``seconds``, and those of them in which a batch ran; ``fetches`` issued; distinct ``experts`` that the requests
        chose, summed over layers.
        """
        ...


class Batching(Protocol):
    """Which ready jobs run together with the lead job (paper §4.3)."""

    def group(self, lead: Job, ready: Sequence[Job]) -> Sequence[Job]:
        """The jobs of ``ready`` that run with ``lead``, itself included, all at its layer."""
        ...


class JobOrder(Protocol):
    """Which job comes first (paper §4.2)."""

    def key(self, job: Job) -> tuple[int, ...]:
        """The smallest key goes first; the core breaks ties by the job's id.

        It depends on nothing that the start of a fetch changes: ``job.queued`` is what is left to order.
        """
        ...


class EvictionPolicy(ABC):
    """Which expert leaves the cache.  Subclass it and give ``touch`` and ``victim``.

    The cache calls, in this order for every job: ``touch`` for each expert that is in the cache,
    then for each absent one ``victim`` (if no slot is free), ``forget`` of the victim, ``touch``.
    An expert that nobody needs any more becomes a candidate by ``release``; a later ``touch``
    ends that.  A prefetched expert enters by ``admit`` and is a candidate after ``release``.
    """

    def begin_step(self, step: int) -> None:
        """A new step (a pass through all layers) begins."""

    def observe(self, request: RequestId, gate: Gate) -> None:
        """A gate output, before any of its experts is touched."""

    @abstractmethod
    def touch(self, expert: ExpertId, uses: int) -> None:
        """A job needs ``expert`` for ``uses`` of its requests, whether it is in the cache or not."""

    def admit(self, expert: ExpertId) -> None:
        """A prefetch of ``expert`` took a slot; nobody has asked for it yet."""

    def release(self, expert: ExpertId) -> None:
        """``expert`` is resident and unpinned from now on: it may be a victim."""

    @abstractmethod
    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """A member of ``evictable`` that makes room for ``incoming``; None if there is none."""

    def forget(self, expert: ExpertId) -> None:
        """``expert`` has left the cache."""

    def full(self, incoming: ExpertId) -> bool:
        """True if ``incoming`` must replace something even while slots are free."""
        return False

    def room(self, layer: int, capacity: int) -> int:
        """How many of ``capacity`` slots the experts of ``layer`` may fill at one time."""
        return capacity


class PrefetchView(Protocol):
    """What a prefetch policy may look at."""

    @property
    def jobs(self) -> Sequence[Job]:
        """The unfinished jobs of the step, oldest first."""
        ...

    @property
    def demand_in_flight(self) -> int:
        """Demand fetches that are being read."""
        ...

    def absent(self, expert: ExpertId) -> bool:
        """True if ``expert`` is neither resident nor on its way."""
        ...


class PrefetchPolicy(Protocol):
    """Which expert to read while no demand fetch is queued.

    ``max_in_flight``: readers that prefetches may occupy at one time.
    ``hold``: keep a prefetched expert until its layer of that step has passed (or it was used);
    without it the expert may be evicted as soon as it has landed.
    """

    max_in_flight: int
    hold: bool

    def next(self, view: PrefetchView) -> ExpertId | None:
        """The next absent expert to read, or None."""
        ...


class RoutingSource(Protocol):
    """Where gate outputs come from: a trace, or a model's own gates."""

    def gates(self, step: int, requests: tuple[RequestId, ...], layer: int) -> tuple[Gate, ...]:
        """The gates of ``layer`` for the requests of the current step, in their order."""
        ...


class Workload(Protocol):
    """Which requests decode at each step."""

    def begin(self, now_s: float) -> StepBegin | float | None:
        """The next step; or the time in seconds until which nobody is there; or None at the end."""
        ...


class CoExecution(Protocol):
    """Which missing experts the host's CPU computes."""

    def choose(self, absent: Mapping[ExpertId, int], fetches: int, computed: Sequence[int]) -> Sequence[ExpertId]:
        """Those of ``absent`` (expert -> tokens) that are computed instead of fetched.

        ``fetches``: experts queued or in flight; ``computed``: tokens of each expert that the CPU has yet to compute.
        """
        ...


class Backend(Protocol):
    """A world that carries commands out: a simulator or a machine."""

    def now(self) -> float:
        """Seconds since the run began, by this world's clock."""
        ...

    def submit(self, command: Command) -> None:
        """Start a Compute or a Fetch; returns at once."""
        ...

    def wait(self) -> list[Event]:
        """Block until something completes; that completion and all others at hand."""
        ...

    def idle(self, until_s: float) -> None:
        """Let time pass: no request is there before ``until_s``."""
        ...


__all__ = [
    "Backend",
    "Batching",
    "CoExecution",
    "EvictionPolicy",
    "FetchKind",
    "JobOrder",
    "LearningPartition",
    "Partition",
    "PrefetchPolicy",
    "PrefetchView",
    "RoutingSource",
    "Workload",
]

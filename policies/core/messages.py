"""Events that go into the decision core and commands that come out of it.

Values only: frozen, compared by content, free of behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.types import ExpertId, FetchKind, Phase, RequestId

Prediction = tuple[ExpertId, float]
"""An expert that may be needed at a later layer, and how likely (any monotone score)."""


@dataclass(frozen=True, slots=True)
class Gate:
    """One request's gate output at one layer.

    ``experts``: the chosen experts in router rank order, ``top_k`` distinct ids of that layer.
    ``predicted``: experts predicted for later layers, best first; empty without a predictor.
    """

    experts: tuple[ExpertId, ...]
    predicted: tuple[Prediction, ...] = ()


# ---------------------------------------------------------------- events in


@dataclass(frozen=True, slots=True)
class StepBegin:
    """A decode step of these requests begins; the previous one has ended."""

    step: int
    requests: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class ComputeDone:
    """Batch ``batch`` has left the GPU.

    ``gates``: one gate of the next layer for each request of the batch, in the order of its
    ``Compute.requests``; empty after the last layer's job and after the head.
    """

    batch: int
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchDone:
    """Fetch ``fetch`` has landed in its slot."""

    fetch: int


@dataclass(frozen=True, slots=True)
class StepTook:
    """Step ``step`` has ended and lasted ``seconds``, of which a batch ran for ``busy_s``.

    Told between steps, to a core whose partition wants to know.
    """

    step: int
    seconds: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class HostDone:
    """The result of ``HostCompute`` ``task`` has arrived."""

    task: int


Event = StepBegin | ComputeDone | FetchDone | StepTook | HostDone

# ------------------------------------------------------------- commands out


@dataclass(frozen=True, slots=True)
class Compute:
    """Run one batch.  ``experts[i]`` lies in ``slots[i]``; both empty for ENTRY and HEAD.

    ``layer`` is the MoE layer of a JOB; ENTRY has -1 (its gate is layer 0's) and HEAD has n_layers.
    """

    batch: int
    phase: Phase
    layer: int
    requests: tuple[RequestId, ...]
    experts: tuple[ExpertId, ...] = ()
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read one expert into one cache slot."""

    fetch: int
    expert: ExpertId
    slot: int
    kind: FetchKind


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The step is complete; its requests may change before the next one."""

    step: int


@dataclass(frozen=True, slots=True)
class HostCompute:
    """Compute one expert for these requests on the host's CPU, from where it lies; it takes no cache slot."""

    task: int
    expert: ExpertId
    requests: tuple[RequestId, ...]


Command = Compute | Fetch | StepEnd | HostCompute

"""The Job Issuer (paper §4.1, §4.4): from gate outputs to jobs whose experts are pinned.

Owns the units of the step and the waves of a unit that does not fit into the cache at one time.
Does not know when anything runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policies.core.expert_cache import ExpertCache
from policies.core.fetch_queue import FetchQueue
from policies.core.host_queue import HostQueue
from policies.core.messages import Compute, ComputeDone, Gate
from policies.core.progress import Job, ProgressTable
from policies.core.protocols import CoExecution
from policies.core.types import CapacityError, ExpertId, ModelSpec, ProtocolError, RequestId

Members = list[tuple[RequestId, Gate]]


@dataclass(slots=True)
class _Waves:
    """A unit that passes a layer part by part: who is still to come, and the next gates of the others."""

    todo: list[Members]
    gates: dict[RequestId, Gate] = field(default_factory=dict)


class JobIssuer:
    """Makes the next job of each unit.  ``room[l]``: slots that the experts of layer l may fill."""

    def __init__(
        self,
        model: ModelSpec,
        cache: ExpertCache,
        progress: ProgressTable,
        queue: FetchQueue,
        room: Sequence[int],
        *,
        host: HostQueue,
    ) -> None:
        self._model, self._cache, self._progress, self._queue, self._room = model, cache, progress, queue, room
        n = model.n_experts
        self._experts = [frozenset(range(layer * n, (layer + 1) * n)) for layer in range(model.n_layers)]
        self._units: Sequence[tuple[RequestId, ...]] = ()
        self._waves: dict[int, _Waves] = {}
        self._host = host
        self._last_job = 0
        self.unfinished = 0
        self.layers_in_waves = 0

    def checked(self, event: ComputeDone, batch: Compute) -> Mapping[RequestId, Gate]:
        """The next layer's gates by request.  Raises ProtocolError if they cannot be that."""
        layer = batch.layer + 1
        expected = len(batch.requests) if layer < self._model.n_layers else 0
        if len(event.gates) != expected:
            raise ProtocolError(
                f"ComputeDone({event.batch}) has {len(event.gates)} gates; expected {expected}, those of layer {layer}"
            )
        if expected:
            top_k, possible = self._model.top_k, self._experts[layer]
            for gate in event.gates:
                chosen = gate.experts
                if len(chosen) != top_k or len(possible.intersection(chosen)) != top_k:
                    raise ProtocolError(
                        f"ComputeDone({event.batch}) has the gate {chosen}; expected {top_k} distinct experts of "
                        f"layer {layer}, ids {min(possible)} to {max(possible)}"
                    )
        return dict(zip(batch.requests, event.gates, strict=False))

    def begin(self, units: Sequence[tuple[RequestId, ...]]) -> None:
        """A step of these units begins."""
        self._units = units
        self.unfinished = len(units)

    def enter(self, gates: Mapping[RequestId, Gate]) -> None:
        """The gates of layer 0 are known: every unit gets its first job."""
        for unit, requests in enumerate(self._units):
            self._enter_layer(unit, requests, 0, gates)

    def advance(self, job: Job, gates: Mapping[RequestId, Gate]) -> None:
        """``job`` has ended: its unit goes on to its next wave, to the next layer, or to its end."""
        layer, requests = job.layer + 1, job.requests
        waves = self._waves.get(job.unit)
        if waves is not None:
            waves.gates |= {request: gates[request] for request in requests if request in gates}
            if waves.todo:
                self._make_job(job.unit, waves.todo.pop(0), job.layer)
                return
            del self._waves[job.unit]
            requests, gates = self._units[job.unit], waves.gates
        if layer < self._model.n_layers:
            self._enter_layer(job.unit, requests, layer, gates)
        else:
            self.unfinished -= 1

    def _enter_layer(
        self, unit: int, requests: tuple[RequestId, ...], layer: int, gates: Mapping[RequestId, Gate]
    ) -> None:
        members = [(request, gates[request]) for request in requests]
        for request, gate in members:
            self._cache.eviction.observe(request, gate)
        if len(members) * self._model.top_k > self._room[layer]:
            members, *rest = _split(members, self._room[layer])
            if rest:
                self._waves[unit] = _Waves(rest)
                self.layers_in_waves += 1
        self._make_job(unit, members, layer)

    def _make_job(self, unit: int, members: Members, layer: int) -> None:
        """Pin the residents, then reserve and pin the absent, then queue their fetches."""
        uses = dict.fromkeys(members[0][1].experts, 1)
        for _, gate in members[1:]:
            for expert in gate.experts:
                uses[expert] = uses.get(expert, 0) + 1
        self._last_job += 1
        predicted = tuple([gate.predicted for _, gate in members])
        job = Job(self._last_job, unit, tuple([request for request, _ in members]), layer, tuple(uses), predicted)
        absent, pending = self._cache.pin(uses)
        if absent and self._host.policy is not None:
            absent = self._without_hosted(self._host.policy, job, members, {expert: uses[expert] for expert in absent})
        for expert, entry in pending:
            entry.waiters.append(job)
            if entry.started:
                self._queue.upgrade(expert)
            else:
                job.queued[expert] = None
        reserve, queued = self._cache.reserve, job.queued
        for expert in absent:
            reserved = reserve(expert, uses[expert])
            if reserved is None:
                raise CapacityError(
                    f"no slot for expert {self._model.split(expert)}: every entry is needed by an unfinished job; "
                    f"the eviction policy promised more room than it gives"
                )
            reserved.waiters.append(job)
            queued[expert] = None
        job.missing = len(absent) + len(pending) + job.hosted
        self._progress.add(job)
        if job.missing:
            self._queue.add(job)
        else:
            self._progress.make_ready(job)

    def _without_hosted(
        self, policy: CoExecution, job: Job, members: Members, absent: Mapping[ExpertId, int]
    ) -> list[ExpertId]:
        """Give the host the experts that it is to compute; returns those that are fetched."""
        chosen = dict.fromkeys(policy.choose(absent, self._queue.backlog, self._host.backlog))
        for expert in chosen:
            self._host.add(job, expert, tuple([request for request, gate in members if expert in gate.experts]))
            self._cache.eviction.touch(expert, absent[expert])  # a use, by an expert that leaves at once
            self._cache.eviction.forget(expert)
        job.hosted = len(chosen)
        job.needs = tuple([expert for expert in job.needs if expert not in chosen])
        return [expert for expert in absent if expert not in chosen]


def _split(members: Members, room: int) -> list[Members]:
    """Consecutive requests, as many at a time as the union of their experts allows."""
    waves: list[Members] = []
    union: dict[ExpertId, None] = {}
    for request, gate in members:
        union |= dict.fromkeys(gate.experts)
        if not waves or len(union) > room:
            waves.append([])
            union = dict.fromkeys(gate.experts)
        waves[-1].append((request, gate))
    return waves

"""The decision core: a pure function from events to commands (paper §4).

The rules of the machine, in one place:

1. ``handle`` absorbs all events it is given, then commits compute, then issues fetches.  Absorbing
   first gives completions of one instant the same chance to be batched.
2. StepBegin -> ENTRY batch of all requests -> its gates make the first job of every unit.
3. A new job pins the experts that are in the cache, then reserves and pins an entry for each absent
   one, then queues their fetches.  An expert that is already queued or in flight is shared.
4. A job is blocked if and only if an expert is missing.  FetchDone may make its waiters ready.
5. While a compute slot is free, the order picks a lead among the ready jobs and the batching its
   companions.  ComputeDone releases their references and makes their next jobs.
6. While a fetch slot is free, the fetch order picks a blocked job and its next expert is read; the
   prefetch policy speaks only while no demand fetch is queued.
7. After the last job of the last unit: HEAD batch of all requests, then StepEnd.
8. With a co-execution policy the host's CPU computes some absent experts of a new job: they take no entry, and the
   job is blocked until their results are there.
9. Nothing running and something unfinished is a DeadlockError; an answer to no question is a
   ProtocolError.

No clock, no random numbers, no threads, no tensors; nothing iterated here is a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from policies.core.expert_cache import Entry, ExpertCache
from policies.core.fetch_queue import FetchQueue
from policies.core.host_queue import HostQueue
from policies.core.issuer import JobIssuer
from policies.core.messages import (
    Command,
    Compute,
    ComputeDone,
    Event,
    Fetch,
    FetchDone,
    HostDone,
    StepBegin,
    StepEnd,
    StepTook,
)
from policies.core.progress import Job, ProgressTable
from policies.core.protocols import (
    Batching,
    CoExecution,
    EvictionPolicy,
    JobOrder,
    LearningPartition,
    Partition,
    PrefetchPolicy,
)
from policies.core.types import CapacityError, DeadlockError, ExpertId, ModelSpec, Phase, ProtocolError, RequestId


class DecisionCore:
    """One run's decisions.

    ``capacity``: cache slots.  ``fetch_slots``: reads in flight at most.  ``compute_slots``:
    batches in flight at most (the commit depth).  ``strict``: refuse a cache that is too small for
    runahead instead of running all requests as one unit.

    ``runahead`` says what became of it: "on", "not used" (one unit) or "off: " and the reason.

    Raises CapacityError if the cache cannot hold one request's experts.
    """

    def __init__(
        self,
        model: ModelSpec,
        capacity: int,
        eviction: EvictionPolicy,
        *,
        partition: Partition,
        batching: Batching,
        compute_order: JobOrder,
        fetch_order: JobOrder,
        prefetch: PrefetchPolicy | None = None,
        host: CoExecution | None = None,
        fetch_slots: int = 8,
        compute_slots: int = 1,
        strict: bool = False,
    ) -> None:
        if fetch_slots < 1 or compute_slots < 1:
            raise CapacityError(f"fetch_slots {fetch_slots} and compute_slots {compute_slots} must be at least 1")
        # Prefetches in flight hold slots that no job can take.
        spare = prefetch.max_in_flight if prefetch else 0
        room = [eviction.room(layer, capacity) - spare for layer in range(model.n_layers)]
        if min(room) < model.top_k:
            raise CapacityError(
                f"a cache of {capacity} slots leaves {max(min(room), 0)} for the experts of layer "
                f"{room.index(min(room))} and a request needs {model.top_k}; raise cache.slots or cache.fraction"
            )
        self.model = model
        self.cache = ExpertCache(capacity, eviction)
        self.runahead = "not used"
        self._queue = FetchQueue(fetch_order)
        self._progress = ProgressTable()
        self._host = HostQueue(host)
        self._issuer = JobIssuer(model, self.cache, self._progress, self._queue, room, host=self._host)
        self._partition, self._batching, self._compute_key = partition, batching, compute_order.key
        self._prefetch, self._strict, self._smallest_room = prefetch, strict, min(room)
        self._fetch_slots, self._compute_slots = fetch_slots, compute_slots
        self._batches: dict[int, tuple[Compute, Sequence[Job]]] = {}
        self._step: StepBegin | None = None
        self._last_id = 0
        self._learner = partition if isinstance(partition, LearningPartition) else None
        self._fetches = 0
        self._chosen: set[ExpertId] = set()  # of this step, if somebody learns; only counted

    @property
    def wants_step_times(self) -> bool:
        """True if a ``StepTook`` is to follow every step."""
        return self._learner is not None

    # ------------------------------------------------------------------ the one entrance

    def handle(self, *events: Event) -> list[Command]:
        """Absorb ``events``, then commit and issue all that can start now."""
        out: list[Command] = []
        for event in events:
            if type(event) is FetchDone:
                for job in self.cache.fill(self._queue.land(event.fetch)):
                    job.missing -= 1
                    if job.missing == 0:
                        self._progress.make_ready(job)
            elif type(event) is ComputeDone:
                self._computed(event, out)
            elif type(event) is StepBegin:
                self._begin(event, out)
            else:
                self._absorb_rare(event)
        if self._progress.ready:
            self._commit(out)
        if len(self._queue.flights) < self._fetch_slots:
            self._issue(out)
        while self._host.new:
            out.append(self._host.issue(self._next_id()))
        if self._step is not None and not (self._batches or self._queue.flights or self._host.tasks):
            raise DeadlockError(f"nothing is running and step {self._step.step} is unfinished\n{self.dump()}")
        return out

    # ------------------------------------------------------------------ absorb

    def _absorb_rare(self, event: Event) -> None:
        if type(event) is HostDone:
            self._hosted(event)
        elif type(event) is StepTook:
            self._learn(event)
        else:
            raise ProtocolError(f"{event!r} is no event of the core")

    def _begin(self, event: StepBegin, out: list[Command]) -> None:
        if self._step is not None:
            raise ProtocolError(f"StepBegin({event.step}): step {self._step.step} has not ended")
        if not event.requests or len({*event.requests}) != len(event.requests):
            raise ProtocolError(f"StepBegin({event.step}): requests {event.requests} are empty or repeat")
        self._step = event
        units = self._partition.units(event.requests)
        if sorted(r for unit in units for r in unit) != sorted(event.requests):
            raise ProtocolError(f"{type(self._partition).__name__}.units must put every request in one unit: {units}")
        if len(units) > 1 and not self._may_run_ahead(event.requests):
            units = [event.requests]
        self._issuer.begin(units)
        self.cache.eviction.begin_step(event.step)
        self._launch(Phase.ENTRY, -1, event.requests, (), out)

    def _may_run_ahead(self, requests: tuple[RequestId, ...]) -> bool:
        """Only if the cache can hold every request's experts without sharing (paper §4.4)."""
        need = len(requests) * self.model.top_k
        if need <= self._smallest_room:
            if self.runahead == "not used":
                self.runahead = "on"
            return True
        reason = (
            f"{len(requests)} requests x top-{self.model.top_k} need {need} cache slots and {self._smallest_room} "
            f"can be had; raise cache.slots or cache.fraction, or lower concurrency"
        )
        if self._strict:
            raise CapacityError(f"runahead is impossible: {reason}")
        self.runahead = f"off: {reason}"
        return False

    def _hosted(self, event: HostDone) -> None:
        job = self._host.land(event.task)
        job.hosted -= 1
        job.missing -= 1
        if job.missing == 0:
            self._progress.make_ready(job)

    def _computed(self, event: ComputeDone, out: list[Command]) -> None:
        batch, jobs = self._batches.pop(event.batch, (None, ()))
        if batch is None:
            raise ProtocolError(f"ComputeDone({event.batch}): no such batch runs; it was never issued or came twice")
        gates = self._issuer.checked(event, batch)
        if self._learner is not None:
            for gate in event.gates:
                self._chosen.update(gate.experts)
        if batch.phase is Phase.HEAD:
            self._end_step(out)
            return
        for job in jobs:
            self.cache.unpin(job.needs)
            self._progress.finish(job)
        if batch.phase is Phase.ENTRY:
            self._issuer.enter(gates)
        for job in jobs:
            self._issuer.advance(job, gates)
        if self.cache.holds_any:
            passed = self._progress.lowest_layer(otherwise=self.model.n_layers)
            self.cache.release_holds(below=passed * self.model.n_experts)
        if self._issuer.unfinished == 0:
            assert self._step is not None
            self._launch(Phase.HEAD, self.model.n_layers, self._step.requests, (), out)

    def _end_step(self, out: list[Command]) -> None:
        assert self._step is not None
        out.append(StepEnd(self._step.step))
        self._step = None
        self.cache.release_holds()

    def _learn(self, event: StepTook) -> None:
        if self._learner is None or self._step is not None:
            raise ProtocolError(f"StepTook({event.step}): nobody wants it, or a step is unfinished")
        self._learner.learn(event.seconds, event.busy_s, self._fetches, len(self._chosen))
        self._fetches = 0
        self._chosen.clear()

    # ------------------------------------------------------------------ the Compute Scheduler

    def _commit(self, out: list[Command]) -> None:
        ready = self._progress.ready
        while ready and len(self._batches) < self._compute_slots:
            if len(ready) == 1:
                group: Sequence[Job] = [*ready.values()]
            else:
                group = self._group()
            lead = group[0]
            self._progress.commit(group)
            requests = lead.requests if len(group) == 1 else tuple([r for job in group for r in job.requests])
            self._launch(Phase.JOB, lead.layer, requests, group, out)

    def _group(self) -> Sequence[Job]:
        jobs = self._progress.ready
        ready = [jobs[number] for number in sorted(jobs)]
        lead = min(ready, key=self._compute_key)  # the first of equals: ties go to the lower id
        group = self._batching.group(lead, ready)
        if lead not in group or any(job.layer != lead.layer for job in group):
            raise ProtocolError(f"{type(self._batching).__name__}.group left its lead out or mixed layers")
        return group

    def _launch(
        self, phase: Phase, layer: int, requests: tuple[RequestId, ...], jobs: Sequence[Job], out: list[Command]
    ) -> None:
        needs = jobs[0].needs if len(jobs) == 1 else tuple(dict.fromkeys([e for job in jobs for e in job.needs]))
        entries = self.cache.entries
        batch = Compute(self._next_id(), phase, layer, requests, needs, tuple([entries[e].slot for e in needs]))
        self._batches[batch.batch] = (batch, jobs)
        out.append(batch)

    # ------------------------------------------------------------------ the Expert Fetcher

    def _issue(self, out: list[Command]) -> None:
        flights, slots = self._queue.flights, self._fetch_slots
        while len(flights) < slots:
            job = self._queue.choose()
            if job is not None:  # that a fetch starts makes no other job come first
                for expert in tuple(islice(job.queued, slots - len(flights))):
                    self._start(expert, self.cache.entries[expert], out)
            elif not self._issue_prefetch(out):
                return

    def _issue_prefetch(self, out: list[Command]) -> bool:
        policy = self._prefetch
        if policy is None or self._queue.prefetches >= policy.max_in_flight:
            return False
        expert = policy.next(self)
        if expert is None:
            return False
        if not self.absent(expert):
            raise ProtocolError(f"{type(policy).__name__}.next chose expert {expert}, which is in the cache or coming")
        entry = self.cache.reserve_prefetch(expert, policy.hold)
        if entry is None:
            return False
        self._start(expert, entry, out)
        return True

    def _start(self, expert: ExpertId, entry: Entry, out: list[Command]) -> None:
        fetch = self._last_id = self._last_id + 1
        self._fetches += 1
        entry.started = True
        out.append(Fetch(fetch, expert, entry.slot, self._queue.start(fetch, expert, entry.waiters)))

    def jobs_in(self, batch: int) -> int:
        """Jobs that end with a batch in flight; those that begin with it if it is ENTRY."""
        command, jobs = self._batches[batch]
        return self._issuer.unfinished if command.phase is Phase.ENTRY else len(jobs)

    @property
    def layers_in_waves(self) -> int:
        """How often a unit passed a layer part by part because its experts exceeded the cache."""
        return self._issuer.layers_in_waves

    # ------------------------------------------------------------------ what a prefetch policy may see

    @property
    def jobs(self) -> Sequence[Job]:
        """The unfinished jobs of the step, oldest first."""
        return tuple(self._progress.jobs.values())

    @property
    def demand_in_flight(self) -> int:
        """Demand fetches in flight, prefetches that a job has come to wait for included."""
        return len(self._queue.flights) - self._queue.prefetches

    def absent(self, expert: ExpertId) -> bool:
        """True if ``expert`` is neither resident nor on its way."""
        return expert not in self.cache.entries

    # ------------------------------------------------------------------ for tests and for people

    def check(self) -> None:
        """Assert every invariant that can be seen from inside."""
        self._progress.check()
        self.cache.check(self._progress.jobs)
        flights = list(self._queue.flights.values())
        assert len({*flights}) == len(flights) <= self._fetch_slots, "an expert is fetched twice, or too many at a time"
        assert len(self._batches) <= self._compute_slots, "more batches than compute slots"
        assert not (self._progress.ready and len(self._batches) < self._compute_slots), "idle GPU beside a ready job"
        for expert, entry in self.cache.entries.items():
            pending = entry.started and not entry.resident
            assert pending == (expert in flights), f"expert {expert}: in flight and its entry disagree"
        for job in self._progress.jobs.values():
            entries = [self.cache.entries[expert] for expert in job.needs]
            absent = sum(not entry.resident for entry in entries)
            assert job.missing == absent + job.hosted, f"job {job.id}: wrong count of missing"
            queued = [e for e, entry in zip(job.needs, entries, strict=True) if not entry.started]
            assert sorted(job.queued) == sorted(queued), f"job {job.id}: wrong list of queued experts"

    def dump(self) -> str:
        """The state in lines for a person."""
        lines = [f"running batches {sorted(self._batches)}, fetches in flight {sorted(self._queue.flights)}"]
        lines += [
            f"job {job.id}: layer {job.layer}, requests {job.requests}, {job.state.name}, {job.missing} missing, "
            f"queued {list(job.queued)}"
            for job in self._progress.jobs.values()
        ]
        cache = self.cache
        lines.append(f"cache: {len(cache.entries)} entries of {cache.capacity}, {len(cache.evictable)} evictable")
        return "\n".join(lines)

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

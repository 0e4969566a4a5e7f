"""One pass over a journal: where the time of each step went, and what was fetched for whom.

Owns every per-step definition, so that simulator and executor cannot differ in one.  Reads the journal's
records only; knows nothing of policies, bytes, files or pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from policies.core.messages import (
    Command,
    Compute,
    ComputeDone,
    Event,
    Fetch,
    FetchDone,
    HostCompute,
    StepBegin,
    StepEnd,
)
from policies.core.types import ExpertId, FetchKind, Phase, RequestId, UserError


class JournalRecord(Protocol):
    """What happened at one instant: the events that were observed and the commands that followed."""

    @property
    def t_s(self) -> float:
        """Seconds since the run began."""
        ...

    @property
    def events(self) -> Sequence[Event]:
        """What had completed."""
        ...

    @property
    def commands(self) -> Sequence[Command]:
        """What the core decided."""
        ...


@dataclass(slots=True)
class Step:
    """One decode step.

    ``busy_both_s + link_only_s + gpu_only_s + neither_s`` is the step's duration.  The link is busy while at
    least one fetch is between its ``Fetch`` and its ``FetchDone``, the GPU while at least one batch is between
    its ``Compute`` and its ``ComputeDone``; a prefetch of an earlier step that is still in flight counts too.

    Fetches belong to the step that issued them.  A prefetch is *needed* if a batch of the same step computes
    from the entry that it filled, *late* if it is needed and was still in flight when the gate asked for it,
    *wasted* otherwise; ``prefetches_later_hit`` is the part of the wasted ones that a later step used before
    they were evicted.  ``needed`` holds the distinct experts of the step in ascending order.
    ``repeated_fetches`` counts fetches of an expert that this step had fetched before (it was evicted between
    the uses of two requests).  ``hosted`` counts experts that the host's CPU computed; time in which only it works
    is ``neither_s``.  ``jobs`` counts one for each request and layer; ``group_sizes[n]`` counts the
    batches of n such jobs.
    """

    step: int
    requests: tuple[RequestId, ...]
    begin_s: float
    end_s: float = 0.0
    busy_both_s: float = 0.0
    link_only_s: float = 0.0
    gpu_only_s: float = 0.0
    neither_s: float = 0.0
    demand_fetches: int = 0
    prefetches: int = 0
    prefetches_needed: int = 0
    prefetches_late: int = 0
    prefetches_later_hit: int = 0
    repeated_fetches: int = 0
    hosted: int = 0
    needed: tuple[ExpertId, ...] = ()
    jobs: int = 0
    group_sizes: Counter[int] = field(default_factory=Counter)
    lockstep: bool = True
    token_gaps_s: list[tuple[RequestId, float]] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        """From the record of its ``StepBegin`` to the record of its ``StepEnd``."""
        return self.end_s - self.begin_s

    @property
    def prefetches_wasted(self) -> int:
        """Prefetches that this step did not use."""
        return self.prefetches - self.prefetches_needed


@dataclass(slots=True)
class _Prefetch:
    """A prefetch whose fate is open."""

    step: Step
    asked_in_flight: bool = False


class Account:
    """The single pass.  ``steps``: all finished steps so far, in order.

    A step that the run did not finish is left out.  The last steps' ``prefetches_later_hit`` may miss uses
    that a longer run would have seen.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.step: Step | None = None
        self.records = 0
        self.now_s = 0.0
        self.fetches: dict[int, ExpertId] = {}
        self.batches: set[int] = set()
        self.flying: dict[ExpertId, _Prefetch] = {}  # prefetches between Fetch and FetchDone
        self.unused: dict[int, _Prefetch] = {}  # slot -> prefetch that no batch has used yet
        self.needed: set[ExpertId] = set()
        self.fetched: list[ExpertId] = []  # of this step
        self.layers: set[int] = set()
        self.last_token_s: dict[RequestId, float] = {}

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """What happened at the next instant.

        Raises:
            UserError: completions or commands that do not fit together, or time that runs backwards.
        """
        self.advance(t_s)
        try:
            self.events(events)
        except KeyError as error:
            raise UserError(
                f"record {self.records} of the journal completes {error.args[0]}, which is not in flight; make the "
                f"run again"
            ) from None
        self.records += 1
        step = self.commands(commands)
        if step is not None:
            self.steps.append(step)

    def advance(self, t_s: float) -> None:
        """Credit the time since the last record to one of the four states."""
        passed_s = t_s - self.now_s
        if passed_s < 0:
            raise UserError(f"the journal's time runs backwards, from {self.now_s} s to {t_s} s; make the run again")
        self.now_s = t_s
        step = self.step
        if step is None:
            return
        if self.fetches:
            if self.batches:
                step.busy_both_s += passed_s
            else:
                step.link_only_s += passed_s
        elif self.batches:
            step.gpu_only_s += passed_s
        else:
            step.neither_s += passed_s

    def events(self, events: Sequence[Event]) -> None:
        """The core fills entries before it looks at new gates, so landings come first here too."""
        asked: list[ComputeDone] = []
        fetches, flying = self.fetches, self.flying
        for event in events:
            if type(event) is FetchDone:
                expert = fetches.pop(event.fetch)
                if flying:
                    flying.pop(expert, None)
            elif type(event) is ComputeDone:
                self.batches.remove(event.batch)
                asked.append(event)
            elif type(event) is StepBegin:
                self.step = Step(event.step, event.requests, self.now_s)
        if flying:
            for done in asked:
                for gate in done.gates:
                    for expert in gate.experts:
                        prefetch = flying.get(expert)
                        if prefetch is not None and prefetch.step is self.step:
                            prefetch.asked_in_flight = True

    def commands(self, commands: Sequence[Command]) -> Step | None:
        """The finished step, if it ends here."""
        step = self.step
        if step is None:
            if commands:
                raise UserError(f"the journal has a command outside any step at {self.now_s} s; make the run again")
            return None
        ends = False
        fetches, fetched, unused = self.fetches, self.fetched, self.unused
        for command in commands:
            if type(command) is Fetch:
                expert = command.expert
                fetches[command.fetch] = expert
                fetched.append(expert)
                if unused:
                    unused.pop(command.slot, None)
                if command.kind is FetchKind.PREFETCH:
                    step.prefetches += 1
                    self.flying[expert] = unused[command.slot] = _Prefetch(step)
            elif type(command) is Compute:
                self.batches.add(command.batch)
                if command.phase is Phase.JOB:
                    self._job(step, command)
            elif type(command) is HostCompute:
                step.hosted += 1
                self.needed.add(command.expert)
            elif type(command) is StepEnd:
                ends = True
        if not ends:
            return None
        self._end(step)
        self.step = None
        return step

    def _job(self, step: Step, batch: Compute) -> None:
        size = len(batch.requests)
        step.jobs += size
        step.group_sizes[size] += 1
        if batch.layer in self.layers:
            step.lockstep = False
        self.layers.add(batch.layer)
        self.needed.update(batch.experts)
        if not self.unused:
            return
        for slot in batch.slots:
            prefetch = self.unused.pop(slot, None)
            if prefetch is None:
                continue
            if prefetch.step is step:
                step.prefetches_needed += 1
                step.prefetches_late += prefetch.asked_in_flight
            else:
                prefetch.step.prefetches_later_hit += 1

    def _end(self, step: Step) -> None:
        step.end_s = self.now_s
        step.needed = tuple(sorted(self.needed))
        step.demand_fetches = len(self.fetched) - step.prefetches
        step.repeated_fetches = len(self.fetched) - len({*self.fetched})
        self.needed.clear()
        self.fetched.clear()
        self.layers.clear()
        for request in step.requests:
            before_s = self.last_token_s.get(request)
            if before_s is not None:
                step.token_gaps_s.append((request, step.end_s - before_s))
            self.last_token_s[request] = step.end_s


def account(records: Iterable[JournalRecord]) -> list[Step]:
    """All finished steps of a journal in order.  Raises UserError as ``Account.record`` does."""
    whole = Account()
    for record in records:
        whole.record(record.t_s, record.events, record.commands)
    return whole.steps

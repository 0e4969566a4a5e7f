"""A window of a run as Chrome trace events, which Perfetto and chrome://tracing open.

Owns the tracks: one for the steps and one for each resource, one a reader, one a compute slot, one a request.
Slices of one track never partly overlap: times are rounded to whole nanoseconds once, and everything that can
run beside its like gets a lane of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.account import JournalRecord
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone, StepBegin, StepEnd
from policies.core.types import ExpertId, ModelSpec, Phase, RequestId, UserError

MAX_SLICES = 100_000
"""Slices in one file, about 15 MB; viewers open a few times that, and load far larger ones as an empty page."""

_RUN, _READERS, _GPU, _REQUESTS = range(1, 5)  # the process ids, which are the groups of tracks
_GROUPS = {_RUN: "run", _READERS: "readers", _GPU: "GPU", _REQUESTS: "requests"}


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that took time; ``begin_ns`` and ``end_ns`` since the run began."""

    begin_ns: int
    end_ns: int
    name: str
    category: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Track:
    """One line of the picture: its group (process id), its place in it, its name, its slices in order."""

    group: int
    place: int
    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The tracks of steps ``first`` to ``last`` (both included); ``note`` says what the size cap cut off."""

    tracks: tuple[Track, ...]
    first: int
    last: int
    note: str | None


@dataclass(slots=True)
class _Waiting:
    """A request between its gate and its next batch."""

    since_s: float
    layer: int
    experts: tuple[ExpertId, ...]


class _Collector:
    """Reads records and keeps the slices that touch the window."""

    def __init__(self, model: ModelSpec, first: int, stop: int, max_slices: int) -> None:
        self.model, self.first, self.stop, self.max_slices = model, first, stop, max_slices
        self.seen: list[int] = []  # step numbers, first and last
        self.steps: list[Slice] = []
        self.fetches: list[Slice] = []
        self.batches: list[Slice] = []
        self.requests: dict[RequestId, list[Slice]] = {}
        self.begin_s: float | None = None
        self.end_s = 0.0
        self.note: str | None = None
        self.last = -1  # the last step of the window
        self._requests: tuple[RequestId, ...] = ()
        self._step_begin_s = 0.0
        self._before = 0  # slices when the step began
        self._flying: dict[int, tuple[float, Fetch, int]] = {}
        self._running: dict[int, tuple[float, Compute]] = {}
        self._waiting: dict[RequestId, _Waiting] = {}
        self._landed_s: dict[int, float] = {}  # slot -> when its content landed

    def read(self, records: Iterable[JournalRecord]) -> None:
        """Collect until the window is over, or full."""
        for record in records:
            for event in record.events:
                if isinstance(event, StepBegin):
                    if event.step >= self.stop:
                        return self._close()
                    self._begin(event, record.t_s)
                elif isinstance(event, FetchDone):
                    self._landed(event, record.t_s)
                elif isinstance(event, ComputeDone):
                    self._computed(event, record.t_s)
            for command in record.commands:
                if isinstance(command, Fetch):
                    self._flying[command.fetch] = (record.t_s, command, self.seen[-1])
                    self._landed_s.pop(command.slot, None)
                elif isinstance(command, Compute):
                    self._launch(command, record.t_s)
            if any(isinstance(command, StepEnd) for command in record.commands) and self._end(record.t_s):
                break
        return self._close()

    @property
    def size(self) -> int:
        """Slices so far."""
        return len(self.fetches) + len(self.batches) + sum(map(len, self.requests.values()))

    def _begin(self, event: StepBegin, t_s: float) -> None:
        self.seen = [self.seen[0] if self.seen else event.step, event.step]
        self._requests, self._step_begin_s, self._before = event.requests, t_s, self.size
        if self.begin_s is None and event.step >= self.first:
            self.begin_s = t_s

    def _end(self, t_s: float) -> bool:
        """True if the next step would not fit."""
        if self.begin_s is None:
            return False
        step = self.seen[-1]
        details = {"requests": list(self._requests)}
        self.steps.append(_slice(self._step_begin_s, t_s, f"step {step}", "step", details))
        self.last, self.end_s = step, t_s
        if 2 * self.size - self._before <= self.max_slices or step + 1 >= self.stop:
            return False
        self.note = f"cut after step {step}: a further step would pass the cap of {self.max_slices} slices"
        return True

    def _landed(self, event: FetchDone, t_s: float) -> None:
        begin_s, fetch, step = self._flying.pop(event.fetch)
        self._landed_s[fetch.slot] = t_s
        self._fetch(begin_s, t_s, fetch, step)

    def _fetch(self, begin_s: float, end_s: float, fetch: Fetch, step: int) -> None:
        if self.begin_s is None:
            return
        layer, index = self.model.split(fetch.expert)
        kind = fetch.kind.name.lower()
        details = {
            "fetch": fetch.fetch,
            "layer": layer,
            "expert": index,
            "slot": fetch.slot,
            "kind": kind,
            "step": step,
        }
        self.fetches.append(_slice(max(begin_s, self.begin_s), end_s, f"{layer}:{index} {kind}", kind, details))

    def _launch(self, batch: Compute, t_s: float) -> None:
        self._running[batch.batch] = (t_s, batch)
        waited = [(request, self._waiting.pop(request, None)) for request in batch.requests]
        if self.begin_s is None:
            return
        slots = dict(zip(batch.experts, batch.slots, strict=True))
        for request, waiting in waited:
            if waiting is None:  # ENTRY starts with the step
                continue
            states = self.requests.setdefault(request, [])
            if batch.phase is Phase.HEAD:
                _add(states, _slice(waiting.since_s, t_s, "waits for the others", "finished"))
                continue
            landed_s = [self._landed_s.get(slots[expert], 0.0) for expert in waiting.experts if expert in slots]
            ready_s = min(max([waiting.since_s, *landed_s]), t_s)
            _add(states, _slice(waiting.since_s, ready_s, f"blocked {waiting.layer}", "blocked"))
            _add(states, _slice(ready_s, t_s, f"ready {waiting.layer}", "ready"))

    def _computed(self, event: ComputeDone, t_s: float) -> None:
        begin_s, batch = self._running.pop(event.batch)
        for i, request in enumerate(batch.requests):
            if batch.phase is not Phase.HEAD:
                experts = event.gates[i].experts if event.gates else ()
                self._waiting[request] = _Waiting(t_s, batch.layer + 1, experts)
        if self.begin_s is not None:
            self._batch(begin_s, t_s, batch)

    def _batch(self, begin_s: float, end_s: float, batch: Compute) -> None:
        count = len(batch.requests)
        name = f"layer {batch.layer}" if batch.phase is Phase.JOB else batch.phase.name.lower()
        details: dict[str, Any] = {"batch": batch.batch, "requests": list(batch.requests)}
        if batch.phase is Phase.JOB:
            details["layer"] = batch.layer
            details["experts"] = [self.model.split(expert)[1] for expert in batch.experts]
        kind = batch.phase.name.lower()
        self.batches.append(_slice(begin_s, end_s, f"{name}, {count} request{'s'[: count > 1]}", kind, details))
        for request in batch.requests:
            alone = {"batch": batch.batch, "together": count}
            states = self.requests.setdefault(request, [])
            _add(states, _slice(begin_s, end_s, f"running {name}", "running", alone))

    def _close(self) -> None:
        """What is in flight at the end of the window is shown up to there."""
        for begin_s, fetch, step in self._flying.values():
            if begin_s < self.end_s:
                self._fetch(begin_s, self.end_s, fetch, step)


def build(
    records: Iterable[JournalRecord],
    model: ModelSpec,
    first: int,
    stop: int,
    max_slices: int = MAX_SLICES,
) -> Timeline:
    """The timeline of the steps ``first`` up to, not including, ``stop``.

    A request is *blocked* from its gate until the last of its own experts has landed, *ready* until its batch is
    committed (requests of one unit or group may wait for each other's experts there), and *running* until the
    batch is done.  At least one step is shown; further ones as long as ``max_slices`` allows.

    Raises:
        UserError: the journal has none of these steps, or contradicts itself.
    """
    collector = _Collector(model, first, stop, max_slices)
    try:
        collector.read(records)
    except (KeyError, IndexError) as error:
        raise UserError(f"the journal completes or starts what it never named ({error}); run the cell again") from None
    if not collector.steps:
        has = f"steps {collector.seen[0]} to {collector.seen[1]}" if collector.seen else "no step"
        raise UserError(f"steps={first}:{stop} is empty: the journal has {has}; choose FIRST:STOP within them")
    steps = collector.steps
    tracks = [
        Track(_RUN, 0, "steps", steps),
        Track(_RUN, 1, "link busy", _union(collector.fetches, "link busy")),
        Track(_RUN, 2, "GPU busy", _union(collector.batches, "GPU busy")),
    ]
    tracks += [Track(_READERS, i, f"reader {i}", lane) for i, lane in enumerate(_lanes(collector.fetches))]
    tracks += [Track(_GPU, i, f"compute slot {i}", lane) for i, lane in enumerate(_lanes(collector.batches))]
    tracks += [
        Track(_REQUESTS, i, f"request {request}", collector.requests[request])
        for i, request in enumerate(sorted(collector.requests))
    ]
    return Timeline(tuple(tracks), collector.last + 1 - len(steps), collector.last, collector.note)


def write(timeline: Timeline, out: Path) -> int:
    """Write a timeline as JSON, whole or not at all; returns its size in bytes."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events(timeline))
    text = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, out)
    return len(text)


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Trace events: names of the tracks first, then complete events with ``ts`` and ``dur`` in microseconds."""
    for group, name in _GROUPS.items():
        yield {"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": group}}
    for track in timeline.tracks:
        of = {"pid": track.group, "tid": track.place}
        yield {"ph": "M", "name": "thread_name", **of, "args": {"name": track.name}}
        yield {"ph": "M", "name": "thread_sort_index", **of, "args": {"sort_index": track.place}}
    for track in timeline.tracks:
        for s in track.slices:
            yield {
                "ph": "X",
                "name": s.name,
                "cat": s.category,
                "ts": s.begin_ns / 1000,
                "dur": (s.end_ns - s.begin_ns) / 1000,
                "pid": track.group,
                "tid": track.place,
                "args": dict(s.details),
            }


def _slice(begin_s: float, end_s: float, name: str, category: str, details: Mapping[str, Any] | None = None) -> Slice:
    return Slice(round(begin_s * 1e9), round(end_s * 1e9), name, category, details or {})


def _add(slices: list[Slice], new: Slice) -> None:
    """States of no length (ready at once) are left out."""
    if new.end_ns > new.begin_ns:
        slices.append(new)


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Spread slices over as few lanes as needed, each to the lowest that is free: the readers of a real pool."""
    lanes: list[list[Slice]] = []
    for new in sorted(slices, key=lambda s: (s.begin_ns, s.end_ns)):
        lane = next((lane for lane in lanes if lane[-1].end_ns <= new.begin_ns), None)
        if lane is None:
            lanes.append([new])
        else:
            lane.append(new)
    return lanes


def _union(slices: Iterable[Slice], name: str) -> list[Slice]:
    """When at least one of ``slices`` was under way."""
    spans: list[list[int]] = []
    for s in sorted(slices, key=lambda s: s.begin_ns):
        if spans and s.begin_ns <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], s.end_ns)
        else:
            spans.append([s.begin_ns, s.end_ns])
    return [Slice(begin, end, name, name) for begin, end in spans]

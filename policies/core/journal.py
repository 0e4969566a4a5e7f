"""The journal: the order of events of one run, and the commands that answered them.

One gzip file of JSON lines: a header object (schema, resolved config, model, digest of the routing)
and one line ``[t_s, events, commands]`` for each ``handle``.  From it everything else follows:
metrics and timelines (``analysis``), a *re-feed* through a fresh core, which must give the same
commands, and a *replay*, which imposes the same order on another world.

    events    ["S", step, [requests]]   ["C", batch, [[experts], ...]]   ["F", fetch]   ["T", step, seconds]
              ["H", task]
    commands  ["C", batch, phase, layer, [requests]]   ["F", fetch, expert, slot, kind]   ["E", step]
              ["H", task, expert, [requests]]

A ComputeDone whose gates carry predictions has a fourth item, a text for each gate: the base64 of its n experts (int32)
and then their n scores, all little-endian, after ``f`` (float32, if that holds them exactly) or ``d`` (float64).  A
number in JSON takes ten times as long.

The experts of a Compute are not written: they are those that its requests' gates chose, and their slots those of their
last fetches.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.core.core import DecisionCore
from policies.core.messages import (
    Command,
    Compute,
    ComputeDone,
    Event,
    Fetch,
    FetchDone,
    Gate,
    HostCompute,
    HostDone,
    Prediction,
    StepBegin,
    StepEnd,
    StepTook,
)
from policies.core.protocols import Backend
from policies.core.types import ExpertId, FetchKind, ModelSpec, Phase, ProtocolError, RequestId, UserError

SCHEMA = 2
_PHASES, _KINDS = tuple(Phase), tuple(FetchKind)  # looked up for each record: calling the enum is slow
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Record:
    """One ``handle``: all ``events`` were seen and all ``commands`` given at ``t_s`` seconds."""

    t_s: float
    events: tuple[Event, ...]
    commands: tuple[Command, ...]


class Journal:
    """Writes a journal.  Use it as a context manager; the same run gives the same bytes."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._file = path.open("wb")
        # No name and no time in the gzip header: they would make equal journals differ.
        self._gzip = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, compresslevel=1, mtime=0)
        self._lines = [_encode({"schema": SCHEMA, **header})]

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Append one ``handle``."""
        # By hand, and the fetches without a call: an encoder, or a call for each, takes a twentieth of a run.
        seen = [f'["F",{e.fetch}]' if isinstance(e, FetchDone) else _event_text(e) for e in events]
        given = [
            f'["F",{c.fetch},{c.expert},{c.slot},{c.kind:d}]' if isinstance(c, Fetch) else _command_text(c)
            for c in commands
        ]
        self._lines.append(f"[{t_s!r},[{','.join(seen)}],[{','.join(given)}]]")
        if len(self._lines) >= 256:
            self._flush()

    def _flush(self) -> None:
        self._gzip.write("\n".join([*self._lines, ""]).encode())
        self._lines = []

    def close(self) -> None:
        """Write what is left and close the file."""
        self._flush()
        self._gzip.close()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _event_text(event: StepBegin | ComputeDone | StepTook | HostDone) -> str:
    if isinstance(event, ComputeDone):
        experts = ",".join([f"[{','.join(map(str, gate.experts))}]" for gate in event.gates])
        if any(gate.predicted for gate in event.gates):
            predicted = ",".join([f'"{_packed(gate.predicted)}"' for gate in event.gates])
            return f'["C",{event.batch},[{experts}],[{predicted}]]'
        return f'["C",{event.batch},[{experts}]]'
    if isinstance(event, HostDone):
        return f'["H",{event.task}]'
    if isinstance(event, StepTook):
        return f'["T",{event.step},{event.seconds!r},{event.busy_s!r}]'
    return f'["S",{event.step},[{",".join(map(str, event.requests))}]]'


def _command_text(command: Compute | StepEnd | HostCompute) -> str:
    if isinstance(command, Compute):
        members = ",".join(map(str, command.requests))
        return f'["C",{command.batch},{command.phase:d},{command.layer},[{members}]]'
    if isinstance(command, HostCompute):
        return f'["H",{command.task},{command.expert},[{",".join(map(str, command.requests))}]]'
    return f'["E",{command.step}]'


def _packed(predicted: Sequence[Prediction]) -> str:
    if not predicted:
        return ""
    experts, scores = zip(*predicted, strict=True)
    numbers = array("f", scores)
    if numbers.tolist() != [*scores]:
        numbers = array("d", scores)
    return numbers.typecode + b64encode(_bytes(array("i", experts)) + _bytes(numbers)).decode("ascii")


def _unpacked(text: str) -> tuple[Prediction, ...]:
    if not text:
        return ()
    both = b64decode(text[1:], validate=True)
    experts, scores = array("i"), array(text[0])
    middle = len(both) // (experts.itemsize + scores.itemsize) * experts.itemsize
    experts.frombytes(both[:middle])
    scores.frombytes(both[middle:])
    if sys.byteorder == "big":
        experts.byteswap()
        scores.byteswap()
    return tuple(zip(experts.tolist(), scores.tolist(), strict=True))


def _bytes(numbers: array[Any]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class _Decoder:
    """Rows back to messages, in their order: what a Compute leaves out follows from what went before."""

    def __init__(self) -> None:
        self._members: dict[int, tuple[RequestId, ...]] = {}
        self._chosen: dict[RequestId, tuple[ExpertId, ...]] = {}
        self._slots: dict[ExpertId, int] = {}

    def record(self, t_s: float, events: list[Any], commands: list[Any]) -> Record:
        return Record(t_s, tuple([self._event(row) for row in events]), tuple([self._command(row) for row in commands]))

    def _event(self, row: list[Any]) -> Event:
        if row[0] == "F":
            return FetchDone(row[1])
        if row[0] == "S":
            return StepBegin(row[1], tuple(row[2]))
        if row[0] == "T":
            return StepTook(row[1], row[2], row[3])
        if row[0] == "H":
            return HostDone(row[1])
        chosen = [tuple(experts) for experts in row[2]]
        self._chosen.update(zip(self._members.pop(row[1]), chosen, strict=False))
        if len(row) == 3:
            return ComputeDone(row[1], tuple([Gate(experts) for experts in chosen]))
        gates = zip(chosen, row[3], strict=True)
        return ComputeDone(row[1], tuple([Gate(experts, _unpacked(text)) for experts, text in gates]))

    def _command(self, row: list[Any]) -> Command:
        if row[0] == "F":
            self._slots[row[2]] = row[3]
            return Fetch(row[1], row[2], row[3], _KINDS[row[4]])
        if row[0] == "E":
            return StepEnd(row[1])
        if row[0] == "H":
            for request in row[3]:  # the GPU computes the others
                self._chosen[request] = tuple([expert for expert in self._chosen[request] if expert != row[2]])
            return HostCompute(row[1], row[2], tuple(row[3]))
        _, batch, phase, layer, members = row
        requests = self._members[batch] = tuple(members)
        if phase != Phase.JOB:
            return Compute(batch, _PHASES[phase], layer, requests)
        experts = tuple(dict.fromkeys([expert for request in requests for expert in self._chosen[request]]))
        return Compute(batch, Phase.JOB, layer, requests, experts, tuple([self._slots[expert] for expert in experts]))


def read_journal(path: Path) -> tuple[dict[str, Any], Iterator[Record]]:
    """The header and the records of a journal, read as they are asked for.

    Raises UserError if the file is no journal, or of another schema, or broken off.
    """
    lines = _lines(path)
    try:
        header = json.loads(next(lines, "null"))
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise UserError(f"{path} is no journal of schema {SCHEMA}; give the journal.jsonl.gz of a finished run")
    return header, _records(path, lines)


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a journal ({error}); run the cell again") from error


def _records(path: Path, lines: Iterator[str]) -> Iterator[Record]:
    decode = _Decoder().record
    for number, line in enumerate(lines, start=2):
        try:
            yield decode(*json.loads(line))
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise UserError(f"{path} line {number} is no record of a journal; run the cell again") from error


def refeed(core: DecisionCore, records: Iterable[Record]) -> int:
    """Run a journal through a fresh core with no backend; returns the number of records.

    Raises ProtocolError at the first command that differs.
    """
    count = 0
    for count, record in enumerate(records, start=1):
        commands = tuple(core.handle(*record.events))
        if commands != record.commands:
            raise ProtocolError(f"record {count}: the journal has {record.commands}, the core now gives {commands}")
    return count


def step_times(records: Iterable[Record]) -> dict[int, StepTook]:
    """What the core of this journal was told of each step.  A replay tells it the same (``drive``'s ``told``)."""
    return {e.step: e for record in records for e in record.events if isinstance(e, StepTook)}


class ReplayWorkload:
    """The steps of a journal, each as soon as the one before has ended."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._steps = (e for record in records for e in record.events if isinstance(e, StepBegin))

    def begin(self, now_s: float) -> StepBegin | None:
        """The journal's next step."""
        return next(self._steps, None)


class ReplayBackend:
    """Imposes a journal's order of events on another backend, holding early completions back."""

    def __init__(self, inner: Backend, records: Iterable[Record]) -> None:
        self._inner = inner
        # The driver begins and times the steps: those are no answers of a backend.
        self._script = (r.events for r in records if not isinstance(r.events[0], StepBegin | StepTook))
        self._early: dict[tuple[str, int], Event] = {}

    def now(self) -> float:
        """The inner backend's time in seconds."""
        return self._inner.now()

    def submit(self, command: Command) -> None:
        """Start a command on the inner backend."""
        self._inner.submit(command)

    def idle(self, until_s: float) -> None:
        """Let time pass on the inner backend."""
        self._inner.idle(until_s)

    def wait(self) -> list[Event]:
        """The journal's next events, once the inner backend has completed all of them."""
        script = next(self._script, None)
        if script is None:
            raise ProtocolError("the journal has ended and the core still waits: the replayed run took another turn")
        events = []
        for scripted in script:
            name = _name(scripted)
            while name not in self._early:
                self._early |= {_name(event): event for event in self._inner.wait()}
            events.append(self._early.pop(name))
        return events


def _name(event: Event) -> tuple[str, int]:
    if isinstance(event, FetchDone):
        return ("fetch", event.fetch)
    if isinstance(event, ComputeDone):
        return ("batch", event.batch)
    if isinstance(event, HostDone):
        return ("task", event.task)
    return ("step", event.step)


def story(model: ModelSpec, records: Iterable[Record], expert: ExpertId) -> Iterator[str]:
    """Everything that happened to one expert, a line each: chosen, fetched, landed, evicted, computed with."""
    layer, index = model.split(expert)
    slot = None
    fetch = None
    for record in records:
        at = f"{record.t_s:12.6f} s "
        for event in record.events:
            if isinstance(event, StepBegin):
                step = f"step {event.step}: "
            elif isinstance(event, FetchDone) and event.fetch == fetch:
                yield f"{at}{step}landed in slot {slot}"
            elif isinstance(event, ComputeDone):
                chosen = sum(expert in gate.experts for gate in event.gates)
                if chosen:
                    yield f"{at}{step}chosen by {chosen} request(s) after batch {event.batch}"
        for command in record.commands:
            if isinstance(command, Fetch) and command.expert == expert:
                slot, fetch = command.slot, command.fetch
                yield f"{at}{step}fetch {fetch} of {layer}:{index} into slot {slot} ({command.kind.name.lower()})"
            elif isinstance(command, Fetch) and command.slot == slot:
                other = model.split(command.expert)
                yield f"{at}{step}gone: slot {slot} is read over by expert {other[0]}:{other[1]}"
                slot = None
            elif isinstance(command, Compute) and expert in command.experts:
                yield f"{at}{step}computed in batch {command.batch}, requests {list(command.requests)}"

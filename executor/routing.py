"""Replay: what a journal's gates said, served again, and the commands that must follow.

Owns the index over a journal.  Does not know whether a simulator or a machine wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from policies.core.journal import Journal, Record
from policies.core.messages import Command, Compute, ComputeDone, Event, Gate, StepBegin
from policies.core.types import RequestId, UserError


class JournalRouting:
    """A RoutingSource that gives the gates of a journal, predictions included.

    Steps are numbered from 0 in the order of the journal, whatever numbers its steps carry.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._steps: list[dict[tuple[RequestId, int], Gate]] = []
        running: dict[int, Compute] = {}
        for record in records:
            for event in record.events:
                if isinstance(event, StepBegin):
                    self._steps.append({})
                elif isinstance(event, ComputeDone):
                    batch = running.pop(event.batch)
                    for request, gate in zip(batch.requests, event.gates, strict=False):
                        self._steps[-1][request, batch.layer + 1] = gate
            running |= {command.batch: command for command in record.commands if isinstance(command, Compute)}

    def __len__(self) -> int:
        """Steps in the journal."""
        return len(self._steps)

    def gates(self, step: int, requests: tuple[RequestId, ...], layer: int) -> tuple[Gate, ...]:
        """The gates of ``layer``.  Raises UserError if the journal has none: the run took another turn."""
        try:
            return tuple(self._steps[step][request, layer] for request in requests)
        except (IndexError, KeyError):
            raise UserError(
                f"the journal has no gates of layer {layer} at its step {step} for requests {requests}; "
                "replay it with the configuration that it was written with"
            ) from None


class ReplayedJournal(Journal):
    """A journal that must come out as another one did, its times aside."""

    def __init__(self, path: Path, header: dict[str, Any], records: Iterable[Record]) -> None:
        super().__init__(path, header)
        self._expected = iter(records)
        self._count = 0

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Append one ``handle``.  Raises UserError if the journal that is replayed has another one here.

        Without this, a run that takes another turn would wait for a completion that it never asked for.
        """
        super().record(t_s, events, commands)
        self._count += 1
        expected = next(self._expected, None)
        if expected is None or (tuple(events), tuple(commands)) != (expected.events, expected.commands):
            raise UserError(
                f"record {self._count}: the journal has {expected and expected.commands}, this run decides "
                f"{tuple(commands)}; replay it with the configuration that it was written with"
            )

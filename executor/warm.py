"""Warming: a cache that has seen steps, without the time to carry them out.

Owns a world in which everything completes at once.  The decisions are the core's own; only their times are not.
"""

from __future__ import annotations

from policies.core.messages import Command, Compute, ComputeDone, Event, Fetch, FetchDone
from policies.core.protocols import RoutingSource
from policies.core.types import Phase


class InstantBackend:
    """A Backend at time zero: no bytes are read and nothing is computed, but for the gates."""

    def __init__(self, routing: RoutingSource, n_layers: int) -> None:
        self._routing, self._n_layers = routing, n_layers
        self._step = -1
        self._done: list[Event] = []

    def now(self) -> float:
        """Always 0."""
        return 0.0

    def submit(self, command: Command) -> None:
        """Complete it at the next ``wait``."""
        if isinstance(command, Fetch):
            self._done.append(FetchDone(command.fetch))
        elif isinstance(command, Compute):
            self._step += command.phase is Phase.ENTRY
            layer = command.layer + 1
            gated = command.phase is not Phase.HEAD and layer < self._n_layers
            gates = self._routing.gates(self._step, command.requests, layer) if gated else ()
            self._done.append(ComputeDone(command.batch, gates))

    def wait(self) -> list[Event]:
        """All that was submitted since the last call."""
        done, self._done = self._done, []
        return done

    def idle(self, until_s: float) -> None:
        """Time does not pass."""

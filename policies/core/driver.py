"""The one loop that both worlds run: workload -> core -> backend.

Owns nothing.  There is no second scheduler anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.core.core import DecisionCore
from policies.core.journal import Journal
from policies.core.messages import Command, Compute, ComputeDone, Event, StepBegin, StepEnd, StepTook
from policies.core.protocols import Backend, Workload


def drive(
    core: DecisionCore,
    workload: Workload,
    backend: Backend,
    *,
    journal: Journal | None = None,
    check: bool = False,
    on_step: Callable[[StepBegin, float], None] | None = None,
    told: Callable[[int], StepTook] | None = None,
) -> None:
    """Decode every step of ``workload``.

    ``check``: assert the core's invariants after every event.  ``on_step`` hears each finished step
    and the time in seconds at which it ended.  ``told(step)``: what a core that wants to know is told of a step, for a
    replay; None: what the backend's clock says.
    """
    while (begin := workload.begin(backend.now())) is not None:
        if not isinstance(begin, StepBegin):
            backend.idle(begin)
            continue
        timing = _Timing(begin.step, backend.now()) if core.wants_step_times else None
        events: list[Event] = [begin]
        ended = False
        while not ended:
            now_s = backend.now()
            commands = core.handle(*events)
            if timing is not None:
                timing.saw(now_s, events, commands)
            if check:
                core.check()
            for command in commands:
                if type(command) is StepEnd:
                    ended = True
                else:
                    backend.submit(command)
            if journal is not None:  # while the backend is at work
                journal.record(now_s, events, commands)
            if not ended:
                events = backend.wait()
        if timing is not None:
            took = timing.took(backend.now()) if told is None else told(begin.step)
            _teach(core, took, backend.now(), journal)
        if on_step is not None:
            on_step(begin, backend.now())


def _teach(core: DecisionCore, took: StepTook, now_s: float, journal: Journal | None) -> None:
    core.handle(took)
    if journal is not None:
        journal.record(now_s, [took], [])


class _Timing:
    """How long a step takes, and for how long of it a batch runs."""

    def __init__(self, step: int, now_s: float) -> None:
        self._step, self._began_s, self._saw_s = step, now_s, now_s
        self._busy_s, self._running = 0.0, 0

    def saw(self, now_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """At ``now_s`` these events came, and these commands answer them."""
        if self._running:
            self._busy_s += now_s - self._saw_s
        self._saw_s = now_s
        self._running -= sum(type(event) is ComputeDone for event in events)
        self._running += sum(type(command) is Compute for command in commands)

    def took(self, now_s: float) -> StepTook:
        """The step has ended."""
        return StepTook(self._step, now_s - self._began_s, self._busy_s)

"""The one loop that both worlds run: workload -> core -> backend.

Owns nothing.  There is no second scheduler anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.core import DecisionCore
from policies.core.journal import Journal
from policies.core.messages import Event, StepBegin, StepEnd, StepTook
from policies.core.protocols import Backend, Workload


def drive(
    core: DecisionCore,
    workload: Workload,
    backend: Backend,
    *,
    journal: Journal | None = None,
    check: bool = False,
    on_step: Callable[[StepBegin, float], None] | None = None,
    step_s: Callable[[int], float] | None = None,
) -> None:
    """Decode every step of ``workload``.

    ``check``: assert the core's invariants after every event.  ``on_step`` hears each finished step
    and the time in seconds at which it ended.  ``step_s(step)``: how long the core is told that a step took, for a
    replay; None: what the backend's clock says.
    """
    while (begin := workload.begin(backend.now())) is not None:
        if not isinstance(begin, StepBegin):
            backend.idle(begin)
            continue
        began_s = backend.now()
        events: list[Event] = [begin]
        ended = False
        while not ended:
            now_s = backend.now()
            commands = core.handle(*events)
            if check:
                core.check()
            if journal is not None:
                journal.record(now_s, events, commands)
            for command in commands:
                if isinstance(command, StepEnd):
                    ended = True
                else:
                    backend.submit(command)
            if not ended:
                events = backend.wait()
        if core.wants_step_times:
            now_s = backend.now()
            took = StepTook(begin.step, now_s - began_s if step_s is None else step_s(begin.step))
            core.handle(took)
            if journal is not None:
                journal.record(now_s, [took], [])
        if on_step is not None:
            on_step(begin, backend.now())

"""The one loop that both worlds run: workload -> core -> backend.

Owns nothing.  There is no second scheduler anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.core import DecisionCore
from policies.core.journal import Journal
from policies.core.messages import Event, StepBegin, StepEnd
from policies.core.protocols import Backend, Workload


def drive(
    core: DecisionCore,
    workload: Workload,
    backend: Backend,
    *,
    journal: Journal | None = None,
    check: bool = False,
    on_step: Callable[[StepBegin, float], None] | None = None,
) -> None:
    """Decode every step of ``workload``.

    ``check``: assert the core's invariants after every event.  ``on_step`` hears each finished step
    and the time in seconds at which it ended.
    """
    while (begin := workload.begin(backend.now())) is not None:
        if not isinstance(begin, StepBegin):
            backend.idle(begin)
            continue
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
        if on_step is not None:
            on_step(begin, backend.now())

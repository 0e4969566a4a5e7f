"""Several systems on one machine, taking turns of two steps: what changes in minutes meets all of them alike.

Owns the turns and the run directories of the systems.  Each has its own core, cache slots, readers and journal;
the shared weights are there once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conf import rundir
from conf.cells import recorded
from executor.host import Compiled
from executor.machine import MemoryPack
from executor.model import Decoder
from executor.run import Measure, OpenRun, finish

CHUNK_STEPS = 2
"""Steps of a turn."""

MIN_STEPS = 4
"""Measured steps that a time limit does not take away."""


def interleave(
    cells: Sequence[tuple[Mapping[str, Any], Path]],
    *,
    measure: Measure,
    stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[], object] = lambda: None,
    shared: Decoder | None = None,
    memory: MemoryPack | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """Run ``cells`` (settings, run directory) in turns until their steps are done; returns the summaries.

    All cells have equal ``steps``, ``warmup`` and ``concurrency`` and one pack.  ``stop``: asked before each round;
    what was measured so far counts.  ``shared``, ``memory``: as for ``OpenRun``.  ``more`` goes into every summary.  If
    one breaks, no directory is written.
    """
    settings = [dict(cell) for cell, _ in cells]
    systems = [str(cell["system"]["name"]) for cell in settings]
    with ExitStack() as folders:
        temporary = [folders.enter_context(rundir.writing(folder, replace=True)) for _, folder in cells]
        for cell, folder in zip(settings, temporary, strict=True):
            rundir.write_records(folder, recorded(cell))
        with ExitStack() as opened:
            runs: list[OpenRun] = []
            for cell, folder in zip(settings, temporary, strict=True):
                weights = runs[0].decoder if runs else shared
                run = OpenRun(recorded(cell), folder / "journal.jsonl.gz", weights, memory)
                runs.append(opened.enter_context(run))
            take_turns(runs, stop, on_round)
        facts = {"interleaved": {"chunk_steps": CHUNK_STEPS, "systems": systems}, **more}
        return [finish(run, folder, measure, **facts) for run, folder in zip(runs, temporary, strict=True)]


def take_turns(runs: Sequence[OpenRun], stop: Callable[[], bool], on_round: Callable[[], object]) -> None:
    """First what settles, then rounds of ``CHUNK_STEPS`` each."""
    for run in runs:
        settling = int(run.settings["warmup"]) - run.steps
        if settling > 0:
            run.decode(settling)
    with Compiled() as compiled:
        while not stop():
            done = [run.decode(CHUNK_STEPS) for run in runs]
            if not all(done):
                break
            on_round()
    if compiled.count:
        for run in runs:
            run.faults.append(f"{compiled.count} kernels were compiled while time was taken; raise settle")


def until(deadline_s: float, most: int) -> tuple[Callable[[], bool], Callable[[], None]]:
    """``(stop, on_round)``: stop after ``most`` steps, or at the deadline once ``MIN_STEPS`` are measured."""
    rounds = [0]

    def count() -> None:
        rounds[0] += 1

    def stop() -> bool:
        steps = rounds[0] * CHUNK_STEPS
        return steps >= most or (steps >= MIN_STEPS and time.perf_counter() > deadline_s)

    return stop, count

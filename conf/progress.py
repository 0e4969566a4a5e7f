"""Progress of a sweep, seen from the files that finished cells leave.

Owns the bar (in a terminal) or the plain lines (in a log).  Needs nothing from the processes that run the
cells, so it is the same for every launcher.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from tqdm import tqdm

from conf import rundir
from conf.cells import Cell

_PERIOD_S = 0.25


class State(Enum):
    """What has become of a cell since this command began."""

    WAITING = "waiting"
    RUNNING = "started"
    FINISHED = "finished"
    FAILED = "failed"


class Watch:
    """Tells the state of each cell of this command."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.cells = cells
        self._studies = list(dict.fromkeys(cell.folder.parent for cell in cells))
        for cell in cells:
            # It is tried again now: an old reason would be taken for a new one.
            rundir.failure_file(cell.folder).unlink(missing_ok=True)
        looks = self._look()
        self._before = {
            cell.folder: looks[cell.folder.parent].runs.get(cell.name)
            for cell in cells
            if cell.settings["force"] or not rundir.is_finished(cell.folder)
        }

    def states(self) -> dict[Path, State]:
        """By run directory, from the files that are there at this moment."""
        looks = self._look()
        return {cell.folder: self._state(cell, looks[cell.folder.parent]) for cell in self.cells}

    def _look(self) -> dict[Path, rundir.Look]:
        return {study: rundir.look(study) for study in self._studies}

    def _state(self, cell: Cell, look: rundir.Look) -> State:
        if cell.name in look.failed:
            return State.FAILED
        inode = look.runs.get(cell.name)
        if inode is not None and inode != self._before.get(cell.folder):
            return State.FINISHED
        return State.RUNNING if cell.name in look.started else State.WAITING


@contextmanager
def shown(watch: Watch) -> Iterator[None]:
    """Show the progress of the watched cells while the block runs.

    A terminal has one bar over all cells; a single cell has a bar of its own steps instead.
    """
    terminal = sys.stderr.isatty()
    if terminal and len(watch.cells) == 1:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(watch, over, terminal), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(watch: Watch, over: threading.Event, terminal: bool) -> None:
    known: dict[Path, State] = {}
    done = 0
    with tqdm(total=len(watch.cells), unit="cell", disable=not terminal) as bar:
        last = False
        while not last:
            last = over.wait(_PERIOD_S)
            before, known = known, watch.states()
            for cell in watch.cells:
                state = known[cell.folder]
                if state is State.WAITING or state is before.get(cell.folder):
                    continue
                if state is not State.RUNNING:
                    done += 1
                    bar.update()
                if not terminal:
                    print(_line(cell, state, done, len(watch.cells)), file=sys.stderr, flush=True)
            bar.refresh()  # the time that has passed


def _line(cell: Cell, state: State, done: int, total: int) -> str:
    text = f"{cell.name}: {state.value}"
    if state is State.RUNNING:
        return text
    summary = rundir.read_summary(cell.folder) if state is State.FINISHED else None
    if summary is not None:
        text += f", {summary['tokens_per_s']:.1f} tokens/s"
    return f"{text} ({done} of {total})"

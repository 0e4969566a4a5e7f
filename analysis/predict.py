"""The simulator's run of a cell that was executed: the same settings, on a profile of the machine.

Owns nothing: simulator and metrics do the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from analysis.metrics import Metrics
from conf import rundir
from conf.cells import cell_name, check, recorded
from sim.run import simulate


def predict(settings: Mapping[str, Any]) -> Path:
    """Simulate resolved settings, whatever is there already; returns the run directory.  Raises UserError."""
    check(settings)
    folder = Path(str(settings["runs"])) / str(settings["study"]) / cell_name(settings)
    with rundir.writing(folder, replace=True) as unfinished:
        rundir.write_records(unfinished, recorded(settings))
        simulate(recorded(settings), unfinished, False, measure=Metrics)
    return folder

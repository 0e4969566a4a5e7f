"""Where the driver itself is the limit: what of a run's time is its own, and what the GPU's, from real runs.

A driver that launches batches and starts reads itself (``executor.fast``) is busy or it waits; both are measured.  Its
own time goes to batches, requests, predictions and reads; the time for which it waits, with one batch in flight and
every expert at hand, is what the GPU adds.

Owns the arithmetic.  Knows neither clocks nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from conf.sharing import DriverSharing
from executor.job_fit import JobFit, JobSample, least_squares
from policies.core.journal import Record
from policies.core.messages import ComputeDone, FetchDone, StepBegin
from policies.core.types import Phase, UserError


@dataclass(frozen=True, slots=True)
class DriverRun:
    """One run: seconds in which the driver was busy and in which it waited, and what it did meanwhile.

    ``counts``: completed batches, their jobs, their requests, those of them with predictions, reads.
    """

    busy_s: float
    waited_s: float
    counts: tuple[int, int, int, int, int]


def from_step(records: Sequence[Record], step: int) -> Sequence[Record]:
    """The records from the beginning of ``step`` on.  Raises UserError if there are none."""
    for i, record in enumerate(records):
        if isinstance(record.events[0], StepBegin) and record.events[0].step >= step:
            return records[i:]
    raise UserError(f"the run ended before step {step}; give it more steps")


def driver_run(
    records: Sequence[Record], samples: Sequence[JobSample], waited_s: float, units: int | None
) -> DriverRun:
    """``records``: a run's steps, from the first one's beginning to the last one's end; ``samples``: their batches.

    ``units``: the groups in which the requests move, one job a batch; None: every request has a job of its own.
    """
    jobs = {
        Phase.ENTRY: sum(units or s.requests for s in samples if s.phase is Phase.ENTRY),
        Phase.JOB: sum(1 if units else s.requests for s in samples if s.phase is Phase.JOB),
    }
    events = [event for record in records for event in record.events]
    gates = [gate for event in events if isinstance(event, ComputeDone) for gate in event.gates]
    counts = (
        len(samples),
        sum(jobs.values()),
        sum(sample.requests for sample in samples),
        sum(bool(gate.predicted) for gate in gates),
        sum(isinstance(event, FetchDone) for event in events),
    )
    return DriverRun(records[-1].t_s - records[0].t_s - waited_s, waited_s, counts)


def fit_driver(runs: Sequence[DriverRun]) -> DriverSharing:
    """Least squares in relative errors over whole runs, no constant below zero."""
    busy_s = np.array([run.busy_s for run in runs])
    if busy_s.min() <= 0:
        raise UserError("a calibration run's driver was never busy; its clock is wrong, or the run has no step")
    design = np.array([run.counts for run in runs], dtype=np.float64) / busy_s[:, None]
    return DriverSharing(*least_squares(design, np.ones(len(runs))))


def fit_gpu(samples: Sequence[Sequence[JobSample]], runs: Sequence[DriverRun], driver: DriverSharing) -> JobFit:
    """What the driver waits for in ``runs`` in which nothing was read; ``samples``: the batches of each.

    By batches and requests: how many experts a request adds goes with it.
    """
    own_s = driver.batch_s + driver.request_s * max(s.requests for each in samples for s in each)
    heads = [s.seconds - own_s for each in samples for s in each if s.phase is Phase.HEAD]
    head_s = max(0.0, float(np.mean(heads)))
    jobs = [[s for s in each if s.phase is Phase.JOB] for each in samples]
    steps = [sum(s.phase is Phase.HEAD for s in each) for each in samples]
    waited_s = np.array([max(run.waited_s - n * head_s, 1e-9) for run, n in zip(runs, steps, strict=True)])
    design = np.array([(len(each), sum(s.requests for s in each)) for each in jobs]) / waited_s[:, None]
    layer_s, request_s = constants = least_squares(design, np.ones(len(runs)))
    spread = float(np.std(design @ np.array(constants)))
    return JobFit(layer_s, 0.0, request_s, head_s, spread, sum(map(len, jobs)))


def driver_level(run: DriverRun, driver: DriverSharing) -> float:
    """How slow the driver was in ``run`` against its constants: it is the processor's speed that moves in minutes."""
    return run.busy_s / sum(n * s for n, s in zip(run.counts, astuple(driver), strict=True))


def scaled(driver: DriverSharing, factor: float) -> DriverSharing:
    """The constants of a driver that is slower by ``factor``."""
    return DriverSharing(*(factor * seconds for seconds in astuple(driver)))

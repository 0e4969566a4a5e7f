"""Job times from the journal of real runs: t = a + b E + c n, and what reading costs computing.

Owns the arithmetic from records to constants.  Knows neither clocks nor devices: a journal is enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core.journal import Record
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone
from policies.core.types import Phase, UserError

Columns = npt.NDArray[np.float64]

MIN_SAMPLES = 24
"""Fewer jobs than this say nothing about the constants."""


@dataclass(frozen=True, slots=True)
class JobSample:
    """One batch from its ``Compute`` to its ``ComputeDone``.

    ``overlap``: share of that time in which at least one fetch was in flight.
    """

    phase: Phase
    layer: int
    requests: int
    experts: int
    seconds: float
    overlap: float


def job_samples(records: Iterable[Record]) -> list[JobSample]:
    """All batches of a journal; those of its warm-up at time zero are left out."""
    samples: list[JobSample] = []
    running: dict[int, tuple[Compute, float, float]] = {}  # batch -> command, begin, link time by then
    flying: set[int] = set()
    link_s = last_s = 0.0
    for record in records:
        link_s += (record.t_s - last_s) * bool(flying)
        last_s = record.t_s
        for event in record.events:
            if isinstance(event, FetchDone):
                flying.discard(event.fetch)
            elif isinstance(event, ComputeDone):
                batch, begun_s, link_then_s = running.pop(event.batch)
                seconds = record.t_s - begun_s
                if seconds > 0:
                    key = (batch.phase, batch.layer, len(batch.requests), len(batch.experts))
                    samples.append(JobSample(*key, seconds, (link_s - link_then_s) / seconds))
        for command in record.commands:
            if isinstance(command, Fetch):
                flying.add(command.fetch)
            elif isinstance(command, Compute):
                running[command.batch] = (command, record.t_s, link_s)
    return samples


@dataclass(frozen=True, slots=True)
class JobFit:
    """``layer_s + expert_s * experts + request_s * requests`` for a job; ``head_s`` for the head.

    ``spread``: standard deviation of measured over fitted, of the ``samples`` jobs that were fitted.
    """

    layer_s: float
    expert_s: float
    request_s: float
    head_s: float
    spread: float
    samples: int

    def scaled(self, factor: float) -> JobFit:
        """The fit of a machine that is slower by ``factor``."""
        times = {name: factor * getattr(self, name) for name in ("layer_s", "expert_s", "request_s", "head_s")}
        return replace(self, **times)

    def job_s(self, requests: int, experts: int) -> float:
        """Fitted seconds of a job that is not the last layer's."""
        return self.layer_s + self.expert_s * experts + self.request_s * requests


def fit_jobs(samples: Sequence[JobSample], n_layers: int, expert_s: float | None) -> JobFit:
    """Least squares in relative errors over the jobs during which nothing was read, no constant below zero.

    ``expert_s``: seconds of one expert, measured alone: in decoding, many requests also need many experts, so their
    costs are hard to tell apart in the jobs themselves.  None: from the jobs all the same, which predicts jobs of such
    shapes only.  Raises UserError with too few jobs.
    """
    quiet = [s for s in _inner(samples, n_layers) if s.overlap == 0]
    if len(quiet) < MIN_SAMPLES:
        raise UserError(f"only {len(quiet)} jobs ran without a read beside them; calibrate with a larger cache")
    seconds = np.array([s.seconds for s in quiet])
    experts = np.array([s.experts for s in quiet], dtype=np.float64)
    requests = np.array([s.requests for s in quiet], dtype=np.float64)
    design = np.stack([np.ones_like(seconds), requests, experts], axis=1) / seconds[:, None]
    if expert_s is None:
        *constants, expert_s = least_squares(design, np.ones_like(seconds))
    else:
        constants = least_squares(design[:, :2], np.maximum(1 - expert_s * experts / seconds, 0.0))
    # Relative errors favour what is short: the mean over all jobs must still be right.
    scale = float(seconds.mean() / (constants[0] + constants[1] * requests + expert_s * experts).mean())
    layer_s, request_s = (constant * scale for constant in constants)
    fitted = layer_s + request_s * requests + expert_s * scale * experts
    heads = [s.seconds for s in samples if s.phase is Phase.HEAD]
    return JobFit(
        layer_s=layer_s,
        expert_s=expert_s * scale,
        request_s=request_s,
        head_s=float(np.mean(heads)) if heads else 0.0,
        spread=float(np.std(seconds / fitted)),
        samples=len(quiet),
    )


def least_squares(design: Columns, right: Columns) -> list[float]:
    """The best constants of which none is negative: of all subsets of the columns, the one with the least error."""
    best, least = np.zeros(design.shape[1]), float(right @ right)
    columns = range(design.shape[1])
    for kept in (list(subset) for n in columns for subset in itertools.combinations(columns, n + 1)):
        found, *_ = np.linalg.lstsq(design[:, kept], right, rcond=None)
        error = float(((design[:, kept] @ found - right) ** 2).sum())
        if found.min() >= 0 and error < least:
            best, least = np.zeros(len(columns)), error
            best[kept] = found
    return [float(constant) for constant in best]


def level(samples: Sequence[JobSample], fit: JobFit, n_layers: int) -> float:
    """Measured over fitted time of the jobs: how fast the machine was then, against when the fit was made."""
    jobs = _inner(samples, n_layers)
    if not jobs:
        raise UserError("the run has no job of an inner layer; nothing tells how fast the machine was")
    return sum(s.seconds for s in jobs) / sum(fit.job_s(s.requests, s.experts) for s in jobs)


def contention(samples: Sequence[JobSample], fit: JobFit, n_layers: int) -> float:
    """How many times longer a job takes while something is read; at least 1.

    seconds = s fitted (1 + (k - 1) overlap): the speed s of the machine at that time is fitted along.
    """
    jobs = _inner(samples, n_layers)
    fitted = np.array([fit.job_s(s.requests, s.experts) for s in jobs])
    design = np.stack([fitted, fitted * np.array([s.overlap for s in jobs])], axis=1)
    (speed, more), _, rank, _ = np.linalg.lstsq(design, np.array([s.seconds for s in jobs]), rcond=None)
    if rank < 2 or speed <= 0:
        return 1.0
    return max(1.0, 1.0 + float(more / speed))


def _inner(samples: Sequence[JobSample], n_layers: int) -> list[JobSample]:
    return [s for s in samples if s.phase is Phase.JOB and s.layer < n_layers - 1]


def table(samples: Sequence[JobSample], n_layers: int) -> list[dict[str, Any]]:
    """Mean and deviation of the jobs without a read beside them, by requests and distinct experts."""
    groups: dict[tuple[int, int], list[float]] = {}
    for s in _inner(samples, n_layers):
        if s.overlap == 0:
            groups.setdefault((s.requests, s.experts), []).append(s.seconds)
    return [
        {"requests": n, "experts": e, "jobs": len(t), "mean_s": float(np.mean(t)), "std_s": float(np.std(t))}
        for (n, e), t in sorted(groups.items())
    ]

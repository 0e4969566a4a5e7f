"""A simulated run against a run on a machine, step by step: are the decisions equal, are the times?

Owns the comparison, its table and its picture.  Reads run directories only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from analysis.account import account
from analysis.runs import Run, find_runs, open_journal
from policies.core.messages import StepBegin
from policies.core.types import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (
    "tokens",
    "demand_fetches",
    "prefetches",
    "prefetches_needed",
    "repeated_fetches",
    "jobs",
    "batches",
    "distinct_experts",
    "hits",
)
"""What is counted in each step; ``hits``: distinct experts that needed no fetch of this step."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """``counts``: of each name [steps, 2], simulator first.  ``times_s``: step, compute and link time [steps, 2].

    ``measured``: the first step that both runs count as measured.  ``same_records``: how many records from the start
    hold equal events and commands; ``records``: of the longer journal; ``first_difference``: the step of the first
    unequal record, None if there is none.
    """

    sim: Run
    machine: Run
    counts: dict[str, npt.NDArray[np.int64]]
    times_s: dict[str, npt.NDArray[np.float64]]
    measured: int
    same_records: int
    records: int
    first_difference: int | None

    @property
    def decisions_equal(self) -> bool:
        """Every command of one run is a command of the other, in the same order."""
        return self.first_difference is None

    @property
    def counts_equal(self) -> bool:
        """All counts agree in every step."""
        return all(bool((pair[:, 0] == pair[:, 1]).all()) for pair in self.counts.values())

    @property
    def errors(self) -> npt.NDArray[np.float64]:
        """Simulated over measured step time, less one, of each measured step."""
        pair = self.times_s["step"][self.measured :]
        return np.asarray(pair[:, 0] / pair[:, 1] - 1)

    @property
    def mean_error(self) -> float:
        """Simulated over measured mean step time, less one."""
        pair = self.times_s["step"][self.measured :].sum(axis=0)
        return float(pair[0] / pair[1] - 1)


def compare_runs(sim: Path, machine: Path) -> Comparison:
    """Compare two finished runs of the same requests.

    Raises:
        UserError: they have no measured step in common, or are not what they should be.
    """
    runs = [find_runs([path])[0] for path in (sim, machine)]
    for run, backend in zip(runs, ("sim", "executor"), strict=True):
        if run.summary.get("backend") != backend:
            was = run.summary.get("backend")
            raise UserError(f"{run.path} is a run of {was}, expected {backend}; usage: validate SIM_RUN EXEC_RUN")
    steps = [account(open_journal(run.path)[2]) for run in runs]
    common = min(map(len, steps))
    measured = max(int(run.summary["warmup"]) for run in runs)
    if common <= measured:
        raise UserError(f"the runs have {common} steps in common and {measured} are warm-up; run more steps")
    if [step.requests for step in steps[0][:common]] != [step.requests for step in steps[1][:common]]:
        raise UserError("the runs decode different requests; give two runs of the same workload and concurrency")
    pairs = list(zip(*(each[:common] for each in steps), strict=True))
    counts = {
        "tokens": [[len(step.requests) for step in pair] for pair in pairs],
        **{
            name: [[getattr(step, name) for step in pair] for pair in pairs]
            for name in ("demand_fetches", "prefetches", "prefetches_needed", "repeated_fetches", "jobs")
        },
        "batches": [[step.group_sizes.total() for step in pair] for pair in pairs],
        "distinct_experts": [[len(step.needed) for step in pair] for pair in pairs],
        "hits": [[len(s.needed) - s.demand_fetches - s.prefetches_needed for s in pair] for pair in pairs],
    }
    times = {
        "step": [[step.step_s for step in pair] for pair in pairs],
        "compute busy": [[step.busy_both_s + step.gpu_only_s for step in pair] for pair in pairs],
        "link busy": [[step.busy_both_s + step.link_only_s for step in pair] for pair in pairs],
        "both busy": [[step.busy_both_s for step in pair] for pair in pairs],
    }
    return Comparison(
        runs[0],
        runs[1],
        {name: np.array(counts[name], dtype=np.int64) for name in COUNTS},
        {name: np.array(values) for name, values in times.items()},
        measured,
        *_same_records(runs),
    )


def _same_records(runs: Sequence[Run]) -> tuple[int, int, int | None]:
    same = total = 0
    step = 0
    differs: int | None = None
    for mine, theirs in zip_longest(*(open_journal(run.path)[2] for run in runs)):
        total += 1
        first = mine or theirs
        if isinstance(first.events[0], StepBegin):
            step = first.events[0].step
        equal = mine and theirs and mine.events == theirs.events and mine.commands == theirs.commands
        if differs is None and not equal:
            differs = step
        same += differs is None
    return same, total, differs


def table(found: Comparison) -> str:
    """Counts and times, the simulator's beside the machine's, and what follows."""
    lines = [f"{'a step, mean':<20}{'simulated':>12}{'measured':>12}{'steps that differ':>20}"]
    measured = slice(found.measured, None)
    for name, pair in found.counts.items():
        means = pair[measured].mean(axis=0)
        differing = int((pair[:, 0] != pair[:, 1]).sum())
        lines.append(f"{name.replace('_', ' '):<20}{means[0]:>12.2f}{means[1]:>12.2f}{differing:>14} of {len(pair)}")
    lines.append("")
    lines.append(f"{'ms':<20}{'simulated':>12}{'measured':>12}{'simulated/measured':>20}")
    for name, seconds in found.times_s.items():
        means = seconds[measured].mean(axis=0)
        ratio = f"{means[0] / means[1]:.3f}" if means[1] else "-"
        lines.append(f"{name:<20}{1e3 * means[0]:>12.1f}{1e3 * means[1]:>12.1f}{ratio:>20}")
    errors = found.errors
    low, high = np.percentile(errors, [10, 90])
    lines += [
        "",
        f"step time: mean error {found.mean_error:+.1%}; over the {len(errors)} steps mean absolute error "
        f"{np.abs(errors).mean():.1%}, 10% {low:+.1%}, 90% {high:+.1%}",
        f"link of the machine: {found.machine.summary.get('link', '?')}; "
        f"{'valid' if found.machine.summary.get('valid') else 'INVALID'}",
        _verdict(found),
    ]
    return "\n".join(lines) + "\n"


def _verdict(found: Comparison) -> str:
    if found.decisions_equal:
        return f"decisions: equal in all {found.records} records"
    return (
        f"decisions: equal in the first {found.same_records} of {found.records} records, first difference in step "
        f"{found.first_difference} (two runs of their own differ by the order of completions; a replay must not)"
    )


def check_replay(found: Comparison) -> None:
    """Raise UserError if the machine replayed a journal and its decisions or counts differ all the same."""
    if found.machine.config.get("journal") and not (found.decisions_equal and found.counts_equal):
        raise UserError(
            f"{found.machine.path} replayed a journal and differs from {found.sim.path} in step "
            f"{found.first_difference}; give the run whose journal it replayed"
        )


def draw(found: Comparison) -> Figure:
    """Step times of both over the steps, and one against the other."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    over, against = figure.subplots(1, 2, width_ratios=[2, 1])
    pair = 1e3 * found.times_s["step"][found.measured :]
    steps = np.arange(found.measured, found.measured + len(pair))
    for column, name in enumerate(("simulated", "measured")):
        over.plot(steps, pair[:, column], label=name, linewidth=1.2)
    over.set_xlabel("step")
    over.set_ylabel("step time (ms)")
    over.set_ylim(bottom=0)
    over.legend(frameon=False)
    over.set_title(f"{found.machine.label('system')}, {found.machine.summary.get('link', '')} link", fontsize=10)
    against.scatter(pair[:, 1], pair[:, 0], s=9)
    top = float(pair.max()) * 1.05
    against.plot([0, top], [0, top], color="0.6", linewidth=0.8)
    against.set_xlim(0, top)
    against.set_ylim(0, top)
    against.set_xlabel("measured (ms)")
    against.set_ylabel("simulated (ms)")
    return figure

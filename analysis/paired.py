"""Interleaved runs of several systems: ratios of neighbouring turns, where the time went, what was predicted.

Owns the table of ``python -m executor``.  Reads run directories only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.runs import Run, find_runs
from policies.core.types import UserError

BASELINE = "llama_cpp_lfu"
"""What every other system of a group is compared with."""

LINK_DIFFERS = 0.05
"""If two systems saw rates that differ by more, their ratio is not a scheduler's alone."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that took turns, and for each the simulator's run of the same cell, if there is one."""

    title: str
    runs: tuple[Path, ...]
    predicted: Mapping[Path, Path]


@dataclass(frozen=True, slots=True)
class Row:
    """One system.  ``ratios``: 10%, median and 90% of the baseline's time of a turn over this system's."""

    label: str
    summary: Mapping[str, Any]
    ratios: tuple[float, float, float] | None
    predicted_s: float | None

    @property
    def measured_s(self) -> float:
        """Mean step time."""
        return float(self.summary["step_s_mean"])

    @property
    def error(self) -> float | None:
        """Predicted over measured step time, less one."""
        return None if self.predicted_s is None else self.predicted_s / self.measured_s - 1


def measured_s(run: Run) -> npt.NDArray[np.float64]:
    """Seconds of each step after the warm-up."""
    import pandas as pd  # noqa: PLC0415

    try:
        step_s = pd.read_parquet(run.path / "steps.parquet")["step_s"].to_numpy(dtype=np.float64)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{run.path}/steps.parquet cannot be read ({error}); run the cell again") from error
    return np.asarray(step_s[int(run.summary["warmup"]) :])


def turns_s(run: Run) -> npt.NDArray[np.float64]:
    """Seconds of each turn after the warm-up."""
    step_s = measured_s(run)
    chunk = int(run.summary.get("interleaved", {}).get("chunk_steps", 1))
    whole = len(step_s) // chunk
    return np.asarray(step_s[: whole * chunk].reshape(whole, chunk).sum(axis=1))


def _same_steps_s(sim: Run, run: Run) -> float:
    """The simulator's mean over the steps that the other run has measured."""
    return float(measured_s(sim)[: len(measured_s(run))].mean())


def paired_ratios(base: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """10%, median and 90% of ``base / other`` over neighbouring turns."""
    count = min(len(base), len(other))
    if not count:
        raise UserError("no whole turn was measured; raise steps")
    low, mid, high = np.percentile(base[:count] / other[:count], [10, 50, 90])
    return float(low), float(mid), float(high)


def rows(group: Group) -> list[Row]:
    """The group's runs, in its order."""
    runs = [find_runs([path])[0] for path in group.runs]
    base = next((run for run in runs if run.summary["system"] == BASELINE), None)
    found = []
    for run in runs:
        ratios = paired_ratios(turns_s(base), turns_s(run)) if base is not None and run is not base else None
        sim = group.predicted.get(run.path)
        predicted_s = _same_steps_s(find_runs([sim])[0], run) if sim is not None else None
        found.append(Row(run.label("system"), run.summary, ratios, predicted_s))
    return found


_HEAD = (
    f"{'':<16}{'step':>8}{'tok/s':>7}{'x':>6}{'10%':>6}{'med':>6}{'90%':>6}"
    f"{'both':>7}{'link':>6}{'comp.':>7}{'neither':>8}{'GB/s':>6}{'MB':>7}{'rho':>6}{'predicted':>11}{'error':>7}"
)
_UNITS = (
    f"{'':<16}{'ms':>8}{'':>7}{'':>6}{'paired ratios':>18}{'% of the step':>28}"
    f"{'seen':>6}{'/step':>7}{'':>6}{'ms':>11}{'%':>7}"
)


class Lines:
    """The table, as groups come in."""

    def __init__(self) -> None:
        self._errors: list[float] = []
        self._pairs: list[tuple[bool, float]] = []  # of systems: predicted in the measured order, measured gap
        self._begun = False

    def add(self, group: Group) -> str:
        """A group's lines with their notes, below the head if it is the first."""
        found = rows(group)
        base = next((row for row in found if row.summary["system"] == BASELINE), None)
        lines = [] if self._begun else [_HEAD, _UNITS]
        lines += ["", group.title, *(_line(row, base) for row in found), *(f"  note: {note}" for note in _notes(found))]
        self._begun = True
        self._errors += [abs(row.error) for row in found if row.error is not None and row is not base]
        for one, other in combinations([row for row in found if row.predicted_s is not None], 2):
            measured, predicted = one.measured_s - other.measured_s, (one.predicted_s or 0) - (other.predicted_s or 0)
            gap = abs(measured) / max(one.measured_s, other.measured_s)
            self._pairs.append((measured * predicted > 0, gap))
        return "\n".join(lines) + "\n"

    def end(self) -> str:
        """How good the predictions of all groups are, if there are any."""
        errors = self._errors
        if not errors:
            return ""
        text = f"\nprediction: mean error {fmean(errors):.1%} over {len(errors)} cells, largest {max(errors):.1%}"
        if self._pairs:
            wrong = [gap for right, gap in self._pairs if not right]
            text += f"; {len(self._pairs) - len(wrong)} of {len(self._pairs)} pairs of systems in the measured order"
            text += f", the others differ by up to {max(wrong):.1%}" if wrong else ""
        end = "The speed of machine and link is that of llama.cpp + LFU in the same turns; its own cells do not count."
        return f"{text}.\n{end}\n"


def table(groups: Sequence[Group]) -> str:
    """The groups below each other, with their notes and the mean error of the prediction."""
    lines = Lines()
    return "".join([*map(lines.add, groups), lines.end()])


def _line(row: Row, base: Row | None) -> str:
    s = row.summary
    speedup = "" if base is None else f"{s['tokens_per_s'] / base.summary['tokens_per_s']:.2f}"
    ratios = "".join(f"{ratio:>6.2f}" for ratio in row.ratios) if row.ratios else " " * 18
    shares = [100 * s[key] for key in ("busy_both", "link_only", "gpu_only", "neither")]
    rate = f"{s['link_bytes_per_s'] / 1e9:.2f}" if s["link_bytes_per_s"] else "-"
    rho = f"{s['rho']:.2f}" if s["rho"] is not None else "-"
    predicted = f"{1e3 * row.predicted_s:.1f}" if row.predicted_s is not None else ""
    error = f"{100 * row.error:+.1f}" if row.error is not None else ""
    return (
        f"{row.label:<16}{1e3 * s['step_s_mean']:>8.1f}{s['tokens_per_s']:>7.1f}{speedup:>6}{ratios}"
        f"{shares[0]:>7.0f}{shares[1]:>6.0f}{shares[2]:>7.0f}{shares[3]:>8.0f}{rate:>6}"
        f"{s['bytes_per_step'] / 1e6:>7.0f}{rho:>6}{predicted:>11}{error:>7}"
    )


def _notes(found: Sequence[Row]) -> list[str]:
    notes = []
    rates = {row.label: row.summary["link_bytes_per_s"] for row in found if row.summary["link_bytes_per_s"]}
    if rates and max(rates.values()) > (1 + LINK_DIFFERS) * min(rates.values()):
        seen = ", ".join(f"{label} {rate / 1e9:.2f}" for label, rate in rates.items())
        notes.append(f"the systems saw different rates (GB/s: {seen}), so the ratio is not the schedule's alone")
    for row in found:
        notes += [f"{row.label}: {line}" for line in row.summary["warnings"] if "random weights" not in line]
    return notes

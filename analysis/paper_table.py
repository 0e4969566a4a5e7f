"""Every number that the paper prints, ours beside it, and whether ours lies inside.

Owns the tolerances and the verdicts.  The numbers are data: ``paper.yaml`` (one system in one setting) and
``paper_ranges.yaml`` (many runs together).  Nothing is left out: a number without runs is listed as such.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analysis.compare import compare
from analysis.paper import paper_numbers
from analysis.paper_metrics import View, metric
from analysis.study import Study, find_study

RELATIVE = 0.05
"""A single printed value may be off by this share of it, unless below."""

SHARE = 0.03
"""A share of the step, of groups, of prefetches: by three points."""

ABSOLUTE = {
    "step_over_bevy": 0.02,
    **dict.fromkeys(
        ("busy_both", "link_only", "gpu_only", "neither", "hit_rate", "prefetch_wasted_share", "groups_of_1_share",
         "groups_of_3_up_share", "bevy_gpu_overlapped_share"), SHARE,
    ),
}  # fmt: skip

INSIDE, OUTSIDE, ABSENT = "yes", "NO", "no run"


@dataclass(frozen=True, slots=True)
class Row:
    """One number: the paper's value or range, the range of ours, the tolerance around the paper's."""

    where: str
    setting: str
    metric: str
    low: float
    high: float
    tolerance: float
    statement: bool
    status: str
    source: str
    note: str
    ours: tuple[float, ...] = ()

    @property
    def inside(self) -> str:
        """``yes``: all of ours lie in the paper's range, or within the tolerance of its value."""
        if not self.ours:
            return ABSENT
        slack = self.tolerance + 1e-9
        whole = all(self.low - slack <= value <= self.high + slack for value in self.ours)
        return INSIDE if whole else OUTSIDE

    def text(self, values: Sequence[float]) -> str:
        """A value or a range in this row's unit."""
        if not values:
            return "-"
        if self.statement:
            return "true" if all(values) else "false"
        ends = dict.fromkeys(_number(self.metric, value) for value in (min(values), max(values)))
        return " to ".join(ends)


def rows(paths: Sequence[Path]) -> list[Row]:
    """The whole table for the finished runs at or under ``paths``, and the ``precision.csv`` files there.

    Raises:
        UserError: there is no finished run.
    """
    tables = [path for folder in paths for path in sorted(folder.rglob("precision.csv"))]
    alone = [table.parent for table in tables]  # Figure 2's folder holds no runs
    study = find_study([path for path in paths if path not in alone])
    return [*_of_systems(study), *_of_ranges(study, tables)]


def _of_systems(study: Study) -> list[Row]:
    means: dict[tuple[str, str, str], list[float]] = {}
    for block in compare(study.runs):
        for entry in block.entries:
            for number in entry.paper.values():
                if number.metric in entry.means:
                    key = (_setting(number.setting), number.system, number.metric)
                    means.setdefault(key, []).append(entry.means[number.metric])
    found = []
    for number in paper_numbers():
        setting = _setting(number.setting)
        status = "fitted" if number.fitted else "derived" if number.derived else "printed"
        found.append(
            Row(
                where=number.source,
                setting=setting,
                metric=f"{number.system} {number.metric}",
                low=number.low,
                high=number.high,
                tolerance=_tolerance(number.metric, number.low, number.high),
                statement=False,
                status=status,
                source=number.source,
                note=number.note,
                ours=tuple(means.get((setting, number.system, number.metric), ())),
            )
        )
    return found


def _of_ranges(study: Study, tables: Sequence[Path]) -> list[Row]:
    from omegaconf import OmegaConf  # noqa: PLC0415

    entries: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("paper_ranges.yaml")))
    found = []
    for entry in entries:
        value = entry["value"]
        low, high = value if isinstance(value, list) else (value, value)
        view = View(_part(study, entry["setting"]), tables)
        found.append(
            Row(
                where=entry["where"],
                setting=_setting(entry["setting"]),
                metric=entry["metric"],
                low=float(low),
                high=float(high),
                tolerance=float(entry.get("tolerance", _tolerance(entry["metric"], low, high))),
                statement=value is True,
                status=entry.get("status", "printed"),
                source=entry["source"],
                note=entry.get("note", ""),
                ours=tuple(metric(entry["metric"])(view)),
            )
        )
    return found


def _part(study: Study, setting: Mapping[str, Any]) -> Study:
    """The cells of a setting; a list stands for any of its values."""
    frame = study.frame
    for key, value in setting.items():
        wanted = value if isinstance(value, list) else [value]
        frame = frame[frame[key].isin(wanted)]
    kept = set(frame["path"].dropna())
    return replace(study, frame=frame, runs=[run for run in study.runs if str(run.path) in kept])


def _tolerance(name: str, low: float, high: float) -> float:
    if low != high or isinstance(low, bool):
        return 0.0
    return ABSOLUTE.get(name, RELATIVE * abs(low))


def _setting(setting: Mapping[str, Any]) -> str:
    names = {"cache_fraction": "cache"}
    parts = []
    for key, value in setting.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(text if isinstance(value, str) else f"{names.get(key, key)} {text}")
    return ", ".join(parts) or "all runs"


def _number(name: str, value: float) -> str:
    own = name.rpartition(" ")[2]
    if own.startswith("config.") or own == "deadlock_free_entries":
        return f"{value:g}"
    if "over" in own and "share" not in own and "overlapped" not in own:
        return f"{value:.2f}" if own != "step_over_bevy" else f"{value:.3f}"
    if own in ABSOLUTE or own.endswith(("_share", "throughput_change")):
        return f"{value:.1%}"
    if own.startswith("extra_misses") or own.endswith(("fetches_per_step", "prefetches_per_step", "tokens_per_s")):
        return f"{value:.1f}"
    return f"{value:.3f}" if own.startswith("bevy_over") else f"{value * 1e3:.1f} ms"


def text(table: Sequence[Row]) -> str:
    """The table as lines, mismatches once more at its end."""
    head = ("where", "setting", "metric", "paper", "ours", "inside")
    lines = [head, *((r.where, r.setting, r.metric, paper_text(r), r.text(r.ours), r.inside) for r in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, "", verdict(table)])


def paper_text(row: Row) -> str:
    """The paper's number with its tolerance."""
    own = row.text([row.low, row.high])
    if row.tolerance and row.low == row.high:
        own += f" +- {_number(row.metric, row.tolerance)}"
    return own + {"derived": " *", "fitted": " f"}.get(row.status, "")


def verdict(table: Sequence[Row]) -> str:
    """How many lie inside, and each that does not."""
    count = {state: sum(row.inside == state for row in table) for state in (INSIDE, OUTSIDE, ABSENT)}
    lines = [
        f"{count[INSIDE]} inside, {count[OUTSIDE]} outside, {count[ABSENT]} without runs, of {len(table)}.  "
        "*: derived from printed numbers; f: our models were fitted to it",
    ]
    lines += [
        f"outside: {row.where}, {row.setting}, {row.metric}: paper {paper_text(row)}, ours {row.text(row.ours)}"
        for row in table
        if row.inside == OUTSIDE
    ]
    return "\n".join(lines)


def write_csv(table: Sequence[Row], path: Path) -> None:
    """All of it, a row a number; whole or not at all."""
    import pandas as pd  # noqa: PLC0415

    frame = pd.DataFrame(
        {
            "where": row.where,
            "setting": row.setting,
            "metric": row.metric,
            "paper_low": row.low,
            "paper_high": row.high,
            "tolerance": row.tolerance,
            "ours_low": min(row.ours, default=None),
            "ours_high": max(row.ours, default=None),
            "inside": row.inside,
            "status": row.status,
            "source": row.source,
            "note": row.note,
        }
        for row in table
    )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    frame.to_csv(unfinished, index=False, float_format="%.6g", lineterminator="\n")
    os.replace(unfinished, path)

"""Several runs side by side: what is comparable with what, averages over seeds, ratios, the table of text.

Pictures are in ``analysis.bars``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from analysis.paper import PaperNumber, paper_for
from analysis.runs import SETTING, Run, as_requested, find_runs, run_row

SPEEDUPS = {"speedup_over_llama_cpp": "llama_cpp", "speedup_over_llama_cpp_lfu": "llama_cpp_lfu"}
"""Metric -> the system whose throughput it divides by; ``step_over_bevy`` compares step times with ``bevy``."""

_FREE = ("seed", "study", "runs", "check")
"""Config keys that do not make two runs of a system different."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: its two header lines, its metric, and how a number reads."""

    head: tuple[str, str]
    metric: str
    factor: float = 1
    digits: int = 0

    def text(self, value: float, digits: int | None = None) -> str:
        """``value`` in the column's unit."""
        digits = self.digits if digits is None else digits
        return f"{round(value * self.factor, digits) + 0.0:.{digits}f}"  # + 0.0: no "-0.0"

    def paper(self, number: PaperNumber) -> str:
        """The paper's value or range, with a star if it is derived."""
        if number.low == number.high:
            text = self.text(number.low)
        else:
            digits = min(self.digits, 0 if self.factor > 1 else 2)  # a range is no place for decimals
            text = f"{self.text(number.low, digits)}-{self.text(number.high, digits)}"
        return text + ("*" if number.derived else "")


COLUMNS = (
    Column(("", "tok/s"), "tokens_per_s", 1, 1),
    Column(("step", "ms"), "step_s_mean", 1e3, 1),
    Column(("P95", "ms"), "step_s_p95", 1e3, 1),
    Column(("GPU", "ms"), "gpu_busy_s_per_step", 1e3, 1),
    Column(("fetches", "a step"), "fetches_per_step"),
    Column(("prefetch", "wasted%"), "prefetch_wasted_share", 100),
    Column(("hit", "%"), "hit_rate", 100, 1),
    Column(("both", "busy%"), "busy_both", 100),
    Column(("link", "only%"), "link_only", 100),
    Column(("GPU", "only%"), "gpu_only", 100, 1),
    Column(("neither", "%"), "neither", 100, 1),
    Column(("groups", "of 1%"), "groups_of_1_share", 100),
    Column(("groups", "of 3+%"), "groups_of_3_up_share", 100),
    Column(("x over", "llama.cpp"), "speedup_over_llama_cpp", 1, 2),
    Column(("x over", "+ LFU"), "speedup_over_llama_cpp_lfu", 1, 2),
    Column(("step/", "Bevy's"), "step_over_bevy", 1, 3),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One system in one setting: means over its seeds, standard deviations if there are several."""

    label: str
    means: Mapping[str, float]
    deviations: Mapping[str, float]
    seeds: int
    paper: Mapping[str, PaperNumber]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """The systems of one setting, in the order of their runs."""

    title: str
    entries: tuple[Entry, ...]


def compare(runs: Sequence[Run]) -> list[Block]:
    """Group runs by setting, and within one by system and config; average over seeds.

    A ratio is taken between runs of the same setting and seed, then averaged; it is missing where the other
    system's run is.
    """
    settings: dict[str, list[Run]] = {}
    for run in map(as_requested, runs):
        setting = [run.summary.get(key) for key in SETTING]
        settings.setdefault(_text([setting, _world(run)]), []).append(run)
    groups = list(settings.values())
    titles = _distinguished([_title(members[0]) for members in groups], [_world(members[0]) for members in groups])
    return [Block(title, tuple(_entries(members))) for title, members in zip(titles, groups, strict=True)]


def _entries(runs: Sequence[Run]) -> list[Entry]:
    rows = [run_row(run) for run in runs]
    by_system = {(row["system"], row.get("seed")): row for row in reversed(rows)}
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        row = rows[i]
        for metric, system in SPEEDUPS.items():
            if base := by_system.get((system, row.get("seed"))):
                row[metric] = row["tokens_per_s"] / base["tokens_per_s"]
        if base := by_system.get(("bevy", row.get("seed"))):
            row["step_over_bevy"] = row["step_s_mean"] / base["step_s_mean"]
        groups.setdefault(_text([row["system"], _settings(run.config)]), []).append(i)
    entries = [_entry([rows[i] for i in members], [runs[i] for i in members]) for members in groups.values()]
    configs = [_settings(runs[members[0]].config) for members in groups.values()]
    labels = _distinguished([entry.label for entry in entries], configs)
    return [replace(entry, label=label) for entry, label in zip(entries, labels, strict=True)]


def _distinguished(names: Sequence[str], configs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names that occur twice get the settings in which their configs differ."""
    for name, config in zip(names, configs, strict=True):
        twins = [c for n, c in zip(names, configs, strict=True) if n == name]
        differing = [key for key in config if any(twin.get(key) != config[key] for twin in twins)]
        extra = ", ".join(f"{key.rpartition('.')[2]}={config[key]}" for key in differing)
        yield f"{name} ({extra})" if extra else name


def _entry(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Entry:
    metrics = [key for key, value in rows[0].items() if isinstance(value, float | int) and key not in SETTING]
    values = {key: [float(row[key]) for row in rows if row.get(key) is not None] for key in metrics}
    notes = [
        f"runahead {run.summary['runahead']}" for run in runs if str(run.summary.get("runahead")).startswith("off")
    ]
    notes += [str(line) for run in runs for line in run.summary.get("warnings", ())]
    return Entry(
        label=runs[0].label("system"),
        means={key: fmean(numbers) for key, numbers in values.items()},
        deviations={key: stdev(numbers) for key, numbers in values.items() if len(numbers) > 1},
        seeds=len(rows),
        paper=paper_for(runs[0].summary),
        notes=tuple(dict.fromkeys(notes)),
    )


def _settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a config by dotted key, without what may differ between runs of one system."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if key in _FREE:
            continue
        if isinstance(value, Mapping):
            leaves |= _settings(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _world(run: Run) -> dict[str, Any]:
    """What a run was made on, in full: two traces are two workloads, whatever they are called."""
    return _settings({group: run.config.get(group) for group in ("model", "device", "workload")})


def _title(run: Run) -> str:
    summary = run.summary
    share = summary.get("cache_fraction")
    cache = f"cache {summary['cache_slots']} slots" if share is None else f"cache {share:.0%}"
    world = {"sim": "simulator", "executor": "executor"}.get(summary["backend"], summary["backend"])
    return (
        f"{run.label('model')}, {run.label('workload')}, {summary['concurrency']} requests, {cache}, "
        f"{run.label('device')} ({world}, {summary['steps']} steps, {summary['warmup']} of them warm-up)"
    )


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


# -------------------------------------------------------------------------------------------- text


def table(blocks: Sequence[Block]) -> str:
    """Neat text: a line a system, its spread over seeds and the paper's numbers below it.

    Columns without any number are left out.
    """
    entries = [entry for block in blocks for entry in block.entries]
    columns = [column for column in COLUMNS if any(column.metric in entry.means for entry in entries)]
    rows = [["", *(c.head[0] for c in columns)], ["system", *(c.head[1] for c in columns)]]
    titles: dict[int, str] = {}
    for block in blocks:
        titles[len(rows)] = block.title
        for entry in block.entries:
            rows += _lines(entry, columns)
    for i in range(1, len(columns) + 1):
        if any(row[i].endswith("*") for row in rows):
            for row in rows:
                row[i] += "" if row[i].endswith("*") else " "  # digits stay below digits
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    lines = []
    for number, row in enumerate(rows):
        if number in titles:
            lines += ["", titles[number]]
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(" ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join([*lines, *_footnotes(entries)]) + "\n"


def _lines(entry: Entry, columns: Sequence[Column]) -> Iterator[list[str]]:
    yield [entry.label, *(c.text(entry.means[c.metric]) if c.metric in entry.means else "-" for c in columns)]
    if entry.seeds > 1:
        spread = (c.text(entry.deviations[c.metric]) if c.metric in entry.deviations else "" for c in columns)
        yield [f"  +- over {entry.seeds} seeds", *spread]
    paper = [c.paper(entry.paper[c.metric]) if c.metric in entry.paper else "" for c in columns]
    if any(paper):
        yield ["  paper", *paper]


def _footnotes(entries: Sequence[Entry]) -> Iterator[str]:
    whose: dict[str, list[str]] = {}
    for entry in entries:
        for note in entry.notes:
            whose.setdefault(note, []).append(entry.label)
    notes = [f"{'; '.join(labels) if len(labels) < len(entries) else 'all'}: {note}" for note, labels in whose.items()]
    if any(entry.paper for entry in entries):
        notes.append("paper: as printed; * follows from printed numbers by arithmetic (analysis/paper.yaml says how)")
    if notes:
        yield ""
        yield from notes


# ------------------------------------------------------------------------------- from folders


def print_table(paths: Sequence[Path]) -> str:
    """``table`` of the finished runs at or under ``paths``, to be printed."""
    return table(compare(find_runs(paths)))


def plot(paths: Sequence[Path], out: Path) -> None:
    """Write ``analysis.bars.draw`` of the finished runs at or under ``paths`` to a PNG, SVG or PDF."""
    from analysis.bars import draw, save  # noqa: PLC0415

    save(draw(compare(find_runs(paths))), out)

"""What the precision study has found, as a table and as a picture (paper §2.4, Figure 2).

Owns their form.  Knows neither predictors nor caches.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

COLUMNS = ("predictor", "cache_fraction", "cache_kind", "precision", "precision_sd", "coverage", "held_share")


@dataclass(frozen=True, slots=True)
class Row:
    """One value of one seed and one draw.  ``cache_kind``: actual, randomized or none."""

    predictor: str
    cache_fraction: float
    cache_kind: str
    precision: float
    coverage: float
    held_share: float


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over seeds and draws, one dictionary with ``COLUMNS`` for each predictor, size and kind, in their order."""
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.predictor, row.cache_fraction, row.cache_kind), []).append(row)
    return [
        {
            "predictor": name,
            "cache_fraction": fraction,
            "cache_kind": kind,
            "precision": fmean(row.precision for row in members),
            "precision_sd": stdev(row.precision for row in members) if len(members) > 1 else 0.0,
            "coverage": fmean(row.coverage for row in members),
            "held_share": fmean(row.held_share for row in members),
        }
        for (name, fraction, kind), members in groups.items()
    ]


def write(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """As CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in table:
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})


def show(table: Sequence[Mapping[str, Any]], coverage: float) -> None:
    """Print it; ``coverage``: the share of the demand that a prefix covers."""
    print(f"precision at {coverage:.0%} coverage of the nonresident demand")
    print(f"{'predictor':18s} {'cache':>6s} {'holds':>6s} {'none':>7s} {'randomised':>17s} {'actual':>17s}  (1)    (2)")
    cells = {(row["predictor"], row["cache_fraction"], row["cache_kind"]): row for row in table}
    for (name, fraction, kind), row in cells.items():
        if kind == "actual":
            none, other = cells[name, 0.0, "none"]["precision"], cells[name, fraction, "randomized"]
            values = [f"{r['precision']:7.3f} +- {r['precision_sd']:.4f}" for r in (other, row)]
            first, second = none - other["precision"], other["precision"] - row["precision"]
            print(
                f"{name:18s} {fraction:6.0%} {row['held_share']:6.1%} {none:7.3f} {values[0]:>17s} {values[1]:>17s} "
                f"{first:+.3f} {second:+.3f}"
            )


def draw(table: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Figure 2: a panel for each predictor, with regions (1) and (2)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    names = list(dict.fromkeys(str(row["predictor"]) for row in table))
    figure = Figure(figsize=(3.4 * len(names), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        mine = [row for row in table if row["predictor"] == name]
        none = next(row["precision"] for row in mine if row["cache_kind"] == "none")
        actual, other = (
            [(0.0, none), *((100 * r["cache_fraction"], r["precision"]) for r in mine if r["cache_kind"] == kind)]
            for kind in ("actual", "randomized")
        )
        sizes, low = zip(*sorted(actual), strict=True)
        _, middle = zip(*sorted(other), strict=True)
        panel.fill_between(sizes, none, middle, color="#7a9cc6", alpha=0.25, linewidth=0)
        panel.fill_between(sizes, middle, low, color="#c67a7a", alpha=0.25, linewidth=0)
        panel.axhline(none, color="0.3", linestyle=":", label="no cache")
        panel.plot(sizes, middle, color="#3b5f8f", linestyle="--", marker="o", markersize=3, label="randomised cache")
        panel.plot(sizes, low, color="#8f3b3b", marker="o", markersize=3, label="actual cache")
        widest = max(range(len(sizes)), key=lambda i: middle[i] - low[i])
        panel.text(sizes[-1], (none + middle[-1]) / 2, "(1) ", ha="right", va="center")
        panel.text(sizes[widest], (middle[widest] + low[widest]) / 2, "(2)", ha="center", va="center")
        panel.set_title(name, fontsize="medium")
        panel.set_xlabel("cache, % of all experts")
    panels[0].set_ylabel("prefetch precision")
    panels[0].set_ylim(bottom=0)
    panels[0].legend(fontsize="small")
    figure.savefig(path, format="png", dpi=150, metadata={"Software": None})

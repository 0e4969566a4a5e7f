"""What goes beyond the paper, from one table of cells: gains over Bevy and over the best of the paper's schedules.

Owns the comparison of systems within a cell, the text and the picture.  The table is what ``benchmarks.beyond`` wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.drawing import Drawing, Look, sheet
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL = ["half", "route", "requests", "cache", "device"]
THREE = ("batch", "halves", "pairs", "bevy")
"""Batching, static groups and Bevy, all with LFU: what is to be beaten."""

LOOKS = {
    "batch": Look("#999999", "s"),
    "halves": Look("#56B4E9", "^"),
    "pairs": Look("#009E73", "v"),
    "bevy_retention": Look("#E69F00", "D"),
    "auto": Look("#D55E00", "o"),
}
SHOWN_REQUESTS = 8
DEVICES = ("m6", "thor", "rtx4090", "h200_ram")


def read(path: Path) -> pd.DataFrame:
    """The table, a row a run.  Raises UserError if the file is not such a table or misses one of the three."""
    import pandas as pd  # noqa: PLC0415

    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); make it by python -m benchmarks.beyond out=FILE") from error
    missing = {*CELL, "seed", "system", "step_s", "fetches", "optimal_fetches"} - {*table.columns}
    if missing or not {*THREE} <= {*table["system"]}:
        raise UserError(f"{path} is no table of python -m benchmarks.beyond with {', '.join(THREE)}")
    return table


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """A row a cell and seed, a column pair for each system that is none of the three.

    ``SYSTEM_over_bevy`` and ``SYSTEM_over_best`` are ratios of step times, above 1 where the system is faster; the
    best is the fastest of the three in that cell and seed.  ``best_over_bevy`` likewise.  ``bound`` is Bevy's step
    over the longer of compute and fetch of batching; ``SYSTEM_bound`` the same of the system.  ``SYSTEM_closed`` is
    the share of Bevy's fetches beyond the offline optimum that the system does without.
    """
    import pandas as pd  # noqa: PLC0415

    key = [*CELL, "seed"]
    step = table.pivot_table(index=key, columns="system", values="step_s").dropna(subset=list(THREE))
    fetches = table.pivot_table(index=key, columns="system", values="fetches").loc[step.index]
    batch = table[table["system"] == "batch"].set_index(key).loc[step.index]
    bound = batch[["gpu_s", "link_s"]].max(axis=1)
    optimum = table.dropna(subset=["optimal_fetches"]).groupby(key)["optimal_fetches"].first().reindex(step.index)
    best = step[list(THREE)].min(axis=1)
    out = {"best_over_bevy": step["bevy"] / best, "bound": step["bevy"] / bound}
    for system in (system for system in step if system not in THREE):
        out[f"{system}_over_bevy"] = step["bevy"] / step[system]
        out[f"{system}_over_best"] = best / step[system]
        out[f"{system}_bound"] = step[system] / bound
        surplus = (fetches["bevy"] - optimum).where(lambda gap: gap >= 1)
        out[f"{system}_closed"] = (fetches["bevy"] - fetches[system]) / surplus
    return pd.DataFrame(out)


def draw(path: Path) -> Drawing:
    """The page of a table: ``lines`` of the drawing's caption, and a panel for each device and route."""
    found = gains(read(path))
    means = found.groupby(level=CELL).mean()
    caption = (
        f"{len(means)} cells of {found.groupby(level=CELL).size().max()} seeds. Lines: step time of Bevy over that of "
        f"the system with {SHOWN_REQUESTS} requests, above 1 where the system is faster; the band of Auto spans the "
        "numbers of requests."
    )
    return Drawing(_picture(means), means.reset_index(), "Beyond the paper: gains over Bevy by cache size", caption)


def text(path: Path) -> str:
    """The tables of the page."""
    found = gains(read(path))
    means, spread = found.groupby(level=CELL).mean(), found.groupby(level=CELL).std()
    return "\n".join(_lines(means, spread))


def _systems(means: pd.DataFrame) -> list[str]:
    return [name.removesuffix("_over_best") for name in map(str, means) if name.endswith("_over_best")]


def _lines(means: pd.DataFrame, spread: pd.DataFrame) -> Iterator[str]:
    head = "{:16s} {:>9s} {:>22s} {:>22s} {:>7s} {:>7s} {:>7s} {:>6s} {:>7s}"
    row = "{:16s} {:>9s} {:>22s} {:>22s} {:>7.0%} {:>7.0%} {:>7s} {:>6.2f} {:>7s}"
    yield "step time ratios, means over seeds: median [least, most] over cells; sd: median over cells, between seeds"
    yield ""
    yield head.format(
        "system", "device", "over Bevy", "over the best of 3", ">=1.05B", "<0.99b", "sd", "bound", "closed"
    )
    for system in _systems(means):
        for device in DEVICES:
            if device not in means.index.unique("device"):
                continue
            mine, sd = (frame.xs(device, level="device") for frame in (means, spread))
            mine = mine[mine[f"{system}_over_bevy"].notna()]
            if mine.empty:  # a system that needs what this device lacks
                continue
            bevy, best, closed = (mine[f"{system}_{what}"] for what in ("over_bevy", "over_best", "closed"))
            deviation = sd[f"{system}_over_bevy"].median()
            yield row.format(
                system, device, _range(bevy), _range(best), (bevy >= 1.05).mean(), (best < 0.99).mean(),
                "-" if isnan(deviation) else f"{deviation:.3f}", mine[f"{system}_bound"].median(),
                "-" if closed.isna().all() else f"{closed.median():.0%}",
            )  # fmt: skip
        yield ""
    bound, best = means["bound"].median(), _range(means["best_over_bevy"])
    yield f"Bevy itself: {bound:.2f} x the bound (median); the best of 3 over Bevy {best}"
    yield ""
    for system in _systems(means):
        yield from _where(means, system)


def _where(means: pd.DataFrame, system: str) -> Iterator[str]:
    """Mean gains by cache size and by route, device and number of requests, and the worst and the best cell."""
    means = means[means[f"{system}_over_bevy"].notna()]
    for what, over in (("over_bevy", "Bevy"), ("over_best", "the best of 3")):
        yield f"{system} over {over}, means by cache size"
        yield f"{'':18s}" + "".join(f"{cache:>8.0%}" for cache in means.index.unique("cache"))
        for level in ("route", "device", "requests"):
            by = means[f"{system}_{what}"].groupby(level=[level, "cache"]).mean().unstack("cache")
            for name, values in by.iterrows():
                label = f"{name} {level}" if level == "requests" else f"{name}"
                yield f"{label:18s}" + "".join(f"{value:>8.3f}" for value in values)
    over_best = f"{system}_over_best"
    ordered = means.sort_values(over_best, kind="stable").reset_index()
    for name, cell in (("least", ordered.iloc[0]), ("most", ordered.iloc[-1])):
        where = ", ".join(f"{key} {cell[key]}" for key in CELL[1:])
        yield f"{name} over the best of 3: {cell[over_best]:.3f} at {where}"
    yield ""


def _range(values: pd.Series) -> str:
    return f"{values.median():.3f} [{values.min():.3f}, {values.max():.3f}]"


def _picture(means: pd.DataFrame) -> Figure:
    devices = [device for device in DEVICES if device in means.index.unique("device")]
    routes = list(means.index.unique("route"))
    with sheet(2.1 * len(routes) + 0.6, 1.6 * len(devices) + 0.8) as figure:
        axes = figure.subplots(len(devices), len(routes), squeeze=False, sharex=True)
        for i, device in enumerate(devices):
            for j, route in enumerate(routes):
                mine = means.xs(device, level="device").xs(route, level="route").reset_index()
                _panel(axes[i][j], mine)
                axes[i][j].set_title(f"{device}, {route}", fontsize=7)
            axes[i][0].set_ylabel("x over Bevy")
        for bottom in axes[-1]:
            bottom.set_xlabel("Cache (% of all experts)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return figure


def _panel(axes: Axes, mine: pd.DataFrame) -> None:
    at = mine[mine["requests"] == SHOWN_REQUESTS] if SHOWN_REQUESTS in set(mine["requests"]) else mine
    at = at.groupby("cache").mean(numeric_only=True)
    axes.axhline(1.0, color="#333333", linewidth=0.8)
    axes.plot(at.index * 100, at["best_over_bevy"], color="#999999", linestyle="--", linewidth=1, label="best of 3")
    for system, own in LOOKS.items():
        if f"{system}_over_bevy" in at:
            axes.plot(
                at.index * 100, at[f"{system}_over_bevy"], color=own.colour, marker=own.marker, markersize=3.5,
                linewidth=1.2, label=system,
            )  # fmt: skip
    if "auto_over_bevy" in mine:
        span = mine.groupby("cache")["auto_over_bevy"]
        axes.fill_between(
            span.min().index * 100, span.min(), span.max(), color=LOOKS["auto"].colour, alpha=0.15, linewidth=0
        )
    axes.grid(visible=True)

"""Figure 2: prefetch precision under caching, from the CSV that ``python -m sim.precision`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from analysis.drawing import Drawing, sheet
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

NAMES = {
    "promoe": "ProMoE",
    "next_gate": "Mixtral-Offloading (next gate)",
    "finemoe": "FineMoE",
    "learned_linear": "learned linear",
}
COLUMNS = {"predictor", "cache_fraction", "cache_kind", "precision"}


def read(path: Path) -> pd.DataFrame:
    """The table of ``precision.csv``, or of the folder that holds it.  Raises UserError if it is none."""
    import pandas as pd  # noqa: PLC0415

    file = path / "precision.csv" if path.is_dir() else path
    try:
        table = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); run python -m sim.precision first") from error
    if not set(table.columns) >= COLUMNS:
        raise UserError(f"{file} is not the table of python -m sim.precision: it lacks {COLUMNS - set(table.columns)}")
    return table


def curves(table: pd.DataFrame, predictor: str) -> pd.DataFrame:
    """Precision by cache size (rows, %): columns ``actual`` and ``randomized``; without a cache both are the same."""
    mine = table[table["predictor"] == predictor]
    wide = mine[mine["cache_kind"] != "none"].pivot_table(
        index="cache_fraction", columns="cache_kind", values="precision"
    )
    wide.loc[0.0] = mine.loc[mine["cache_kind"] == "none", "precision"].mean()
    ordered: pd.DataFrame = wide.sort_index()
    return ordered


def draw(path: Path) -> Drawing:
    """A panel for each predictor: actual cache solid, randomised dashed, none dotted."""
    table = read(path)
    predictors = list(dict.fromkeys(table["predictor"]))
    says = []
    with sheet(max(3.0, 2.4 * len(predictors)), 2.6) as figure:
        panels = figure.subplots(1, len(predictors), sharey=True, squeeze=False)[0]
        for axes, predictor in zip(panels, predictors, strict=True):
            lines = curves(table, predictor)
            _panel(axes, lines)
            axes.set_title(NAMES.get(predictor, predictor), fontsize=7.5)
            first, last = lines["actual"].iloc[0], lines["actual"].iloc[-1]
            says.append(f"{NAMES.get(predictor, predictor)} {first:.0%} to {last:.0%}")
        panels[0].set(ylabel="Precision (%)", ylim=(0, None))
        figure.legend(handles=panels[0].get_legend_handles_labels()[0], loc="outside lower center", ncols=3)
    caption = (
        f"Precision at 80% coverage without a cache and with {table['cache_fraction'].max():.0%} of the experts "
        f"cached: {', '.join(says)}. The paper prints no numbers here: it falls for all, and the "
        "randomised cache gives a part."
    )
    return Drawing(figure, table, "Figure 2: prefetch precision under caching", caption)


def _panel(axes: Axes, lines: pd.DataFrame) -> None:
    percent, none = lines.index * 100, 100 * float(lines["actual"].iloc[0])
    axes.axhline(none, color="black", linestyle=":", linewidth=1, label="no cache")
    axes.plot(percent, 100 * lines["randomized"], "--s", color="#0072B2", markersize=3.5, label="randomised cache")
    axes.plot(percent, 100 * lines["actual"], "-o", color="#D55E00", markersize=3.5, label="actual cache")
    axes.set_xlabel("Cache size (% of experts)")
    axes.grid(visible=True)

"""Figure 9: throughput by the size of the expert cache, a panel for each device and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.drawing import Drawing, gap_handle, look, mark_gap, sheet, spread
from analysis.figures.fig8 import SYSTEMS, throughput
from analysis.study import SETTING, Study

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def draw(study: Study) -> Drawing:
    """A line a system."""
    import pandas as pd  # noqa: PLC0415

    means, ratios = throughput(study, "Figure 9")
    devices, models = (sorted(means[group].unique()) for group in ("device", "model"))
    names = {group: study.labels(group) for group in ("system", "model", "device")}
    with sheet(max(3.6, 3.3 * len(models)), 0.9 + 1.9 * len(devices)) as figure:
        axes = figure.subplots(len(devices), len(models), squeeze=False)
        for i, device in enumerate(devices):
            for j, model in enumerate(models):
                mine = means.query("device == @device and model == @model")
                _panel(axes[i][j], mine, names["system"])
                axes[i][j].set_title(f"{names['device'][device]}, {names['model'][model]}", fontsize=7.5)
            axes[i][0].set_ylabel("Throughput (tok/s)")
        for bottom in axes[-1]:
            bottom.set_xlabel("Cache size (% of all experts)")
        handles = list(axes[0][0].get_legend_handles_labels()[0])
        if means["tokens_per_s"].isna().any():
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    over, base = ratios["bevy_over_fastest"], ratios["bevy_over_llama_cpp"]
    last = ratios.loc[ratios["cache"] == ratios["cache"].max(), "finemoe_over_llama_cpp"]
    early = ratios.loc[ratios["cache"].between(0.19, 0.31), "finemoe_over_llama_cpp"]
    caption = (
        f"Bevy over the fastest baseline {spread(over.min(), over.max())} (paper 1.07 to 1.55), over llama.cpp "
        f"{spread(base.min(), base.max())} (1.26 to 2.83). FineMoE over llama.cpp "
        + (f"{spread(early.min(), early.max())} at 20 to 30% (1.43 to 2.06) and " if not early.empty else "")
        + f"{spread(last.min(), last.max())} at {ratios['cache'].max():.0%} (at 70%: 1.08 to 1.18). {study.scale}."
    )
    values: pd.DataFrame = pd.merge(means, ratios, on=SETTING, how="left")
    return Drawing(figure, values, "Figure 9: throughput by cache size", caption, study.missing())


def _panel(axes: Axes, means: pd.DataFrame, names: dict[str, str]) -> None:
    import pandas as pd  # noqa: PLC0415

    table = means.pivot_table(index="cache", columns="system", values="tokens_per_s", dropna=False).sort_index()
    percent = table.index * 100
    for system in (system for system in SYSTEMS if system in table):
        own = look(system)
        bold = system == "bevy"
        axes.plot(
            percent, table[system], color=own.colour, marker=own.marker, markersize=4.5 if bold else 4,
            linewidth=1.9 if bold else 1.2, zorder=3 if bold else 2, label=names[system],
        )  # fmt: skip
        for x, value in zip(percent, table[system], strict=True):
            if pd.isna(value):
                mark_gap(axes, float(x))
    axes.set_xticks(list(percent))
    axes.set_ylim(bottom=0)
    axes.grid(visible=True)

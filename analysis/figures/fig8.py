"""Figure 8: throughput by the number of concurrent requests, a panel for each workload, device and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.drawing import INK, Drawing, gap_handle, look, mark_gap, sheet, spread
from analysis.study import SETTING, Study, speedups
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SYSTEMS = ("llama_cpp", "finemoe", "specmd", "bevy")
_BAR = 0.2


def draw(study: Study) -> Drawing:
    """Grouped bars; the number above Bevy's is its speedup over the fastest baseline."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    means, ratios = throughput(study, "Figure 8")
    panels = means[["device", "model"]].drop_duplicates().sort_values(["device", "model"])
    columns = list(panels.itertuples(index=False, name=None))
    rows = sorted(means["workload"].unique(), key=["chat", "agentic"].index)
    names = {group: study.labels(group) for group in ("system", "model", "device", "workload")}
    with sheet(max(3.6, 2.5 * len(columns)), 1.0 + 1.75 * len(rows)) as figure:
        axes = figure.subplots(len(rows), len(columns), squeeze=False)
        for i, workload in enumerate(rows):
            for j, (device, model) in enumerate(columns):
                mine = means.query("workload == @workload and device == @device and model == @model")
                own = ratios.query("workload == @workload and device == @device and model == @model")
                _panel(axes[i][j], mine, own.set_index("concurrency")["bevy_over_fastest"])
                if i == 0:
                    axes[i][j].set_title(f"{names['device'][device]}\n{names['model'][model]}", fontsize=7.5)
            axes[i][0].set_ylabel(f"{names['workload'][workload]}\nThroughput (tok/s)")
        for bottom in axes[-1]:
            bottom.set_xlabel("Concurrent requests")
        shown = [system for system in SYSTEMS if system in names["system"]]
        handles: list[object] = [
            Patch(facecolor=look(s).colour, hatch=look(s).hatch, edgecolor="white", label=names["system"][s])
            for s in shown
        ]
        if means["tokens_per_s"].isna().any():
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    over, base = ratios["bevy_over_fastest"], ratios["bevy_over_llama_cpp"]
    many = ratios.loc[ratios["concurrency"] >= 4, "bevy_over_fastest"]
    caption = (
        f"Bevy over the fastest baseline {spread(over.min(), over.max())}, mean {over.mean():.2f} (paper 1.01 to 1.38, "
        f"mean 1.26); with four or more requests {spread(many.min(), many.max())} (1.15 to 1.38). Over llama.cpp "
        f"{spread(base.min(), base.max())} (1.29 to 3.46). {study.scale}. The number above a group is Bevy's speedup "
        "over the fastest baseline; the paper prints 40 of them without telling the panels apart."
    )
    values = means.merge(ratios, on=SETTING, how="left")
    return Drawing(figure, values, "Figure 8: throughput by concurrent requests", caption, study.missing())


def throughput(study: Study, figure: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Mean throughput a system and setting, gaps as rows without a number; and Bevy's ratios a setting."""
    import pandas as pd  # noqa: PLC0415

    means = study.means("tokens_per_s")
    means = means[means["system"].isin(SYSTEMS)]
    if means.empty:
        raise UserError(f"{figure} needs runs of some of {', '.join(SYSTEMS)}; run the experiment of that figure")
    whole = means[SETTING].drop_duplicates().merge(pd.DataFrame({"system": means["system"].unique()}), how="cross")
    filled: pd.DataFrame = whole.merge(means, on=[*SETTING, "system"], how="left")
    return filled, speedups(study)


def _panel(axes: Axes, means: pd.DataFrame, ratios: pd.Series[float]) -> None:
    import pandas as pd  # noqa: PLC0415

    table = means.pivot_table(index="concurrency", columns="system", values="tokens_per_s", dropna=False).sort_index()
    shown = [system for system in SYSTEMS if system in table]
    top = table.max().max()
    for x, (requests, row) in enumerate(table.iterrows()):
        for k, system in enumerate(shown):
            place = x + (k - (len(shown) - 1) / 2) * _BAR
            if pd.isna(row[system]):
                mark_gap(axes, place)
                continue
            own = look(system)
            axes.bar(place, row[system], _BAR, color=own.colour, hatch=own.hatch, edgecolor="white", linewidth=0.3)
        ratio = ratios.get(requests)
        if ratio is not None and pd.notna(ratio):
            axes.annotate(
                f"{ratio:.2f}\N{MULTIPLICATION SIGN}", (x + 0.2, row.max()), xytext=(0, 2), textcoords="offset points",
                ha="center", fontsize=6.5, color=INK,
            )  # fmt: skip
    axes.set_xticks(range(len(table)), [str(requests) for requests in table.index])
    axes.set_ylim(0, top * 1.12)
    axes.grid(axis="y")

"""Figure 13: Bevy with and without prefetching, by the number of concurrent requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.bars import FETCH_PARTS
from analysis.drawing import INK, Drawing, gap_handle, look, mark_gap, sheet
from analysis.study import Study
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PAIR = ("bevy", "bevy_prefetch")
PARTS = FETCH_PARTS[1:]


def draw(study: Study) -> Drawing:
    """(a) throughput, with the change that prefetching makes; (b) prefetches a step, needed and wasted."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    study.one_setting("Figure 13", vary=("concurrency",))
    means = study.means("tokens_per_s", *(part.metric for part in PARTS), "prefetched_per_step")
    table = means.pivot_table(index="concurrency", columns="system", values="tokens_per_s", dropna=False).sort_index()
    if not set(PAIR) <= set(table):
        raise UserError("Figure 13 needs runs of system=bevy and system=bevy_prefetch; run experiment=fig13")
    change = table["bevy_prefetch"] / table["bevy"] - 1
    ahead = means[means["system"] == "bevy_prefetch"].set_index("concurrency").reindex(table.index)
    wasted = ahead["prefetches_wasted_per_step"] / ahead["prefetched_per_step"]
    names = study.labels("system")
    with sheet(7.0, 2.6) as figure:
        left, right = figure.subplots(1, 2)
        _throughput(left, table, change)
        _prefetches(right, ahead, wasted)
        for axes in (left, right):
            axes.set_xticks(range(len(table)), [str(requests) for requests in table.index])
            axes.set_xlabel("Concurrent requests")
            axes.grid(axis="y")
        handles: list[object] = [
            Patch(facecolor=look(s).colour, hatch=look(s).hatch, edgecolor="white", label=names[s]) for s in PAIR
        ]
        handles += [Patch(facecolor=p.colour, hatch=p.hatch, edgecolor="white", label=p.name) for p in PARTS]
        if table.isna().any(axis=None):
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    said = ", ".join(f"{value:+.1%} at {n}" for n, value in change.dropna().items())
    lost = ", ".join(f"{value:.0%} at {n}" for n, value in wasted.dropna().items())
    caption = (
        f"Throughput with prefetching: {said} requests (paper -4.2% at 2, -5.4% at 4, equal from 8 on). Wasted "
        f"prefetches: {lost} (46% at 2, 39% at 4; almost no prefetches from 8 on). {study.scale}."
    )
    values = ahead[["prefetched_per_step", *(part.metric for part in PARTS)]].join(table).reset_index()
    return Drawing(figure, values, "Figure 13: Bevy with prefetching", caption, study.missing())


def _throughput(axes: Axes, table: pd.DataFrame, change: pd.Series[float]) -> None:
    import pandas as pd  # noqa: PLC0415

    for x, requests in enumerate(table.index):
        for k, system in enumerate(PAIR):
            value, place = table.loc[requests, system], x + (k - 0.5) * 0.36
            if pd.isna(value):
                mark_gap(axes, place)
                continue
            own = look(system)
            axes.bar(place, value, 0.36, color=own.colour, hatch=own.hatch, edgecolor="white", linewidth=0.3)
        if pd.notna(change[requests]):
            axes.annotate(
                f"{change[requests]:+.1%}", (x, table.loc[requests].max()), xytext=(0, 2),
                textcoords="offset points", ha="center", fontsize=6.5, color=INK,
            )  # fmt: skip
    axes.set(title="(a) Throughput", ylabel="Throughput (tok/s)", ylim=(0, table.max().max() * 1.12))


def _prefetches(axes: Axes, ahead: pd.DataFrame, wasted: pd.Series[float]) -> None:
    import pandas as pd  # noqa: PLC0415

    for x, (_, row) in enumerate(ahead.iterrows()):
        if pd.isna(row["prefetched_per_step"]):
            mark_gap(axes, x)
            continue
        bottom = 0.0
        for part in PARTS:
            axes.bar(
                x, row[part.metric], 0.5, bottom=bottom, color=part.colour, hatch=part.hatch, edgecolor="white",
                linewidth=0.3,
            )  # fmt: skip
            bottom += row[part.metric]
        share = wasted.iloc[x]
        text = f"{share:.0%} wasted" if pd.notna(share) else "none"
        axes.annotate(text, (x, bottom), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=6.5)
    axes.set(title="(b) Prefetches", ylabel="Expert prefetches per step")
    axes.set_ylim(0, max(1.0, float(ahead["prefetched_per_step"].max()) * 1.15))

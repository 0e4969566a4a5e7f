"""Figure 12: what other orders change, and the sizes of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.bars import PAPER_MARK
from analysis.drawing import GAP, Drawing, gap_handle, paper_handle, sheet
from analysis.study import Study
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ORDER = ("bevy", "bevy_global_srtf", "bevy_fifo", "bevy_both")
TIMES = (
    ("gpu_busy_s_per_step", "GPU busy", "#0072B2", ""),
    ("gpu_idle_s_per_step", "GPU idle", "#56B4E9", "////"),
    ("step_s_mean", "step time", "#D55E00", ""),
)
SIZES = (("1", "#CC79A7", "black"), ("2", "#E69F00", "black"), ("3", "#F0E442", "black"), ("4", "#009E73", "white"),
         ("5 and more", "#333333", "white"))  # fmt: skip
PAPER_CHANGE_MS = {  # of 139.8 ms a step, which is derived
    ("bevy_fifo", "gpu_busy_s_per_step"): 19.2,
    ("bevy_fifo", "gpu_idle_s_per_step"): -2.0,
    ("bevy_fifo", "step_s_mean"): 17.2,
    ("bevy_global_srtf", "gpu_busy_s_per_step"): 3.7,
    ("bevy_global_srtf", "step_s_mean"): 2.4,
    ("bevy_both", "step_s_mean"): 19.0,
}
PAPER_SINGLES = {"bevy": 0.56, "bevy_global_srtf": 0.60, "bevy_fifo": 0.67, "bevy_both": 0.70}


def draw(study: Study) -> Drawing:
    """(a) change against Bevy in ms; (b) share of the groups by the number of requests in them."""
    import pandas as pd  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    study.one_setting("Figure 12")
    metrics = [metric for metric, *_ in TIMES]
    means = study.means(*metrics).set_index("system")
    if "bevy" not in means.index or means.loc["bevy"].isna().any():
        raise UserError("Figure 12 compares with Bevy and there is no finished run of system=bevy")
    systems = [system for system in ORDER if system in means.index]
    change_ms = (means[metrics] - means.loc["bevy", metrics]).loc[systems] * 1e3
    sizes = group_sizes(study).reindex(systems)
    names = study.labels("system")
    with sheet(7.0, 2.75) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.2))
        _changes(left, change_ms.drop(index="bevy"), first=1)
        _sizes(right, sizes)
        left.set_yticks(range(len(systems)), [names[system] for system in systems])
        left.set_ylim(len(systems) - 0.5, -0.5)
        left.set(title="(a) Change against Bevy", xlabel="Change per step (ms)")
        right.set(title="(b) Group sizes", xlabel="Share of groups (%); diamond: of one, in the paper", xlim=(0, 100))
        handles: list[object] = [
            Patch(facecolor=c, hatch=h, edgecolor="white", linewidth=0.4, label=n) for _, n, c, h in TIMES
        ]
        handles += [Patch(facecolor=c, label=f"groups of {n}") for n, c, _ in SIZES]
        handles.append(paper_handle())
        if change_ms.isna().any(axis=None):
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    percent = change_ms["step_s_mean"] / (1e3 * float(means["step_s_mean"].loc["bevy"]))
    paper = {"bevy_fifo": "+12.3%", "bevy_global_srtf": "+1.7%", "bevy_both": "+13.6%"}
    said = "; ".join(
        f"{names[s]} {percent[s]:+.1%} ({paper[s]})" for s in systems if s in paper and s in percent.dropna()
    )
    caption = f"Step time against Bevy, the paper's in brackets: {said}. {study.scale}."
    values = change_ms.add_suffix("_change_ms").join(sizes.add_prefix("share_of_")).rename_axis("system").reset_index()
    assert isinstance(values, pd.DataFrame)
    return Drawing(figure, values, "Figure 12: other compute and fetch orders", caption, study.missing())


def group_sizes(study: Study) -> pd.DataFrame:
    """Share of the groups by size, a row a system, means over seeds."""
    import pandas as pd  # noqa: PLC0415

    rows = []
    for run in study.runs:
        share = run.summary["group_size_share"]
        row = {name: float(share.get(name, 0.0)) for name in ("1", "2", "3", "4")}
        row["5 and more"] = sum(value for size, value in share.items() if int(size) >= 5)
        rows.append({"system": run.summary["system"], **row})
    means: pd.DataFrame = pd.DataFrame(rows).groupby("system", sort=False).mean()
    return means


def _changes(axes: Axes, change_ms: pd.DataFrame, first: int) -> None:
    import pandas as pd  # noqa: PLC0415

    for y, (system, row) in enumerate(change_ms.iterrows(), first):
        for k, (metric, _, colour, hatch) in enumerate(TIMES):
            place = y + (k - 1) * 0.25
            if pd.isna(row[metric]):
                axes.plot([0], [place], **GAP)
                continue
            axes.barh(place, row[metric], 0.23, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
            if (printed := PAPER_CHANGE_MS.get((str(system), metric))) is not None:
                axes.plot(printed, place, **PAPER_MARK, zorder=5)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)


def _sizes(axes: Axes, sizes: pd.DataFrame) -> None:
    import pandas as pd  # noqa: PLC0415

    for y, (system, row) in enumerate(sizes.iterrows()):
        if row.isna().any():
            axes.plot([1], [y], **GAP)
            continue
        left = 0.0
        for name, colour, ink in SIZES:
            width = 100 * row[name]
            axes.barh(y, width, 0.72, left=left, color=colour, edgecolor="white", linewidth=0.4)
            if width > 7:
                axes.text(
                    left + width / 2, y, f"{width:.0f}%", ha="center", va="center_baseline", fontsize=6.5, color=ink
                )
            left += width
        if (printed := PAPER_SINGLES.get(str(system))) is not None and pd.notna(printed):
            axes.plot(100 * printed, y + 0.3, **PAPER_MARK, zorder=5)  # below the numbers
    axes.tick_params(axis="y", length=0)

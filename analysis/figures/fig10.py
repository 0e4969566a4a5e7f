"""Figure 10: where the step time goes and what is fetched, baselines with Bevy's eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.bars import FETCH_PARTS, PAPER_MARK, TIME_PARTS, Part
from analysis.drawing import GAP, Drawing, gap_handle, paper_handle, sheet
from analysis.paper import PaperNumber, paper_for
from analysis.study import Study

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ORDER = ("llama_cpp_lfu", "finemoe_lfu", "specmd_lfu", "bevy")
SHARES = ("busy_both", "link_only", "gpu_only", "neither")


def draw(study: Study) -> Drawing:
    """Two panels of stacked bars; a diamond is the paper's total, a line its range."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    study.one_setting("Figure 10")
    means = study.means("step_s_mean", *SHARES, *(part.metric for part in FETCH_PARTS), "fetches_per_step")
    means = means.set_index("system")
    means = means.loc[[system for system in ORDER if system in means.index]]
    step_ms = means["step_s_mean"] * 1e3
    times = means[list(SHARES)].mul(step_ms, axis=0)
    names = study.labels("system")
    printed = {run.summary["system"]: paper_for(run.summary) for run in study.runs}
    with sheet(7.0, 1.55 + 0.36 * len(means)) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.35, 1))
        inside = means[list(SHARES)].map("{:.0%}".format)
        _stack(left, TIME_PARTS, times, inside)
        _totals(left, step_ms, {s: p["step_s_mean"] for s, p in printed.items() if "step_s_mean" in p}, 1e3, 1)
        counts = means[[part.metric for part in FETCH_PARTS]]
        _stack(right, FETCH_PARTS, counts, counts.map("{:.0f}".format))
        fetched = {s: p["fetches_per_step"] for s, p in printed.items() if "fetches_per_step" in p}
        _totals(right, means["fetches_per_step"], fetched, 1, 0)
        left.set_yticks(range(len(means)), [names[system] for system in means.index])
        left.invert_yaxis()
        left.set(title="(a) Where the step time goes", xlabel="Step time (ms); inside, % of the step")
        right.set(title="(b) What is fetched", xlabel="Expert fetches per step")
        handles: list[object] = [
            Patch(facecolor=part.colour, hatch=part.hatch, edgecolor="white", linewidth=0.4, label=part.name)
            for part in (*TIME_PARTS, *FETCH_PARTS)
        ]
        handles.append(paper_handle("(the paper's number)"))
        if step_ms.isna().any():
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return Drawing(
        figure,
        means.reset_index(),
        "Figure 10: where the step time goes",
        f"{_caption(means)} {study.scale}.",
        study.missing(),
    )


def _caption(means: pd.DataFrame) -> str:
    says = []
    if "bevy" in means.index and means.loc["bevy"].notna().all():
        own = means.loc["bevy"]
        says.append(
            f"Bevy: both busy {own['busy_both']:.0%} (paper 77%), GPU waits for the link {own['link_only']:.0%} (10%), "
            f"{own['fetches_per_step']:.0f} fetches (235)."
        )
    if "llama_cpp_lfu" in means.index:
        says.append(f"llama.cpp + LFU: GPU waits {means['link_only'].loc['llama_cpp_lfu']:.0%} of the step (60%).")
    ahead = means.loc[[s for s in ("finemoe_lfu", "specmd_lfu") if s in means.index]].dropna()
    if not ahead.empty:
        wasted = ahead["prefetches_wasted_per_step"]
        share = wasted / (wasted + ahead["prefetches_needed_per_step"])
        says.append(
            f"Prefetching baselines: overlap {ahead['busy_both'].min():.0%} to {ahead['busy_both'].max():.0%} (36 to "
            f"40%), wasted {share.min():.0%} to {share.max():.0%} of their prefetches (51 to 64%)."
        )
    return " ".join(says)


def _stack(axes: Axes, parts: Sequence[Part], lengths: pd.DataFrame, inside: pd.DataFrame) -> None:
    longest = lengths.sum(axis=1).max()
    start = lengths.iloc[:, 0] * 0
    rows = range(len(lengths))
    for part in parts:
        width = lengths[part.metric]
        axes.barh(
            rows, width, 0.72, left=start, color=part.colour, hatch=part.hatch, edgecolor="white", linewidth=0.4
        )  # fmt: skip
        for y, system in enumerate(lengths.index):
            if width[system] > 0.085 * longest:
                box = {"facecolor": part.colour, "edgecolor": "none", "pad": 0.8} if part.hatch else None
                axes.text(
                    start[system] + width[system] / 2, y, inside.loc[system, part.metric], ha="center",
                    va="center_baseline", fontsize=6.5, color=part.ink, bbox=box,
                )  # fmt: skip
        start = start + width
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)


def _totals(axes: Axes, totals: pd.Series[float], printed: dict[str, PaperNumber], factor: float, digits: int) -> None:
    """The total after each bar, the paper's in brackets; a cross where there is no result."""
    import pandas as pd  # noqa: PLC0415

    furthest = max([totals.max(), *(number.high * factor for number in printed.values())])
    for y, (system, total) in enumerate(totals.items()):
        number = printed.get(str(system))
        if pd.isna(total):
            axes.plot([0.01 * furthest], [y], clip_on=False, **GAP)
            continue
        text, end = f"{total:.{digits}f}", total
        if number is not None:
            low, high = number.low * factor, number.high * factor
            edge = y + 0.3  # below the numbers inside
            axes.plot([low, high], [edge, edge], color="black", linewidth=1.6, zorder=4)
            axes.plot((low + high) / 2, edge, **PAPER_MARK, zorder=5)
            end = max(total, high)
            text += f" ({low:.{digits}f})" if low == high else f" ({low:.0f}\N{EN DASH}{high:.0f})"
        axes.annotate(
            text, (end, y), xytext=(6, 0), textcoords="offset points", va="center_baseline", fontsize=7,
            fontweight="bold",
        )  # fmt: skip
    axes.set_xlim(0, furthest * (1.36 if digits else 1.45))

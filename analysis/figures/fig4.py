"""Figure 4: compute of a step by the number of groups, and the fetch time of every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from analysis.bars import PAPER_MARK
from analysis.drawing import Drawing, gap_handle, mark_gap, paper_handle, sheet
from analysis.runs import Run
from analysis.study import Study
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

GROUPS = {
    "llama_cpp_lfu": (1, 56.5),
    "static_3_3": (2, 74.6),
    "static_2_2_2": (3, 90.1),
    "static_1_1_1_1_1_1": (6, 126.8),
}
"""System -> its number of groups and the compute that the paper prints for it, ms."""

PAPER_FETCH_MS = (55.7, 160.1)


def fetch_times_ms(run: Run) -> pd.Series[float]:
    """Link busy time of each measured step of a run, ms."""
    import pandas as pd  # noqa: PLC0415

    steps = pd.read_parquet(run.path / "steps.parquet", columns=["step", "link_busy_s"])
    measured: pd.Series[float] = steps.loc[steps["step"] >= run.summary["warmup"], "link_busy_s"] * 1e3
    return measured.reset_index(drop=True)


def draw(study: Study) -> Drawing:
    """(a) bars of compute time with the mean fetch time; (b) the fetch time of each step of the first seed."""
    import pandas as pd  # noqa: PLC0415

    study.one_setting("Figure 4")
    means = study.means("gpu_busy_s_per_step").set_index("system")["gpu_busy_s_per_step"] * 1e3
    whole = [run for run in study.runs if run.summary["system"] == "llama_cpp_lfu"]
    if not whole:
        raise UserError("Figure 4 needs runs of system=llama_cpp_lfu, whose steps are its fetch times")
    fetches = [fetch_times_ms(run) for run in whole]
    pooled = pd.concat(fetches)
    rows: list[dict[str, Any]] = [
        {"panel": "a", "x": groups, "ours_ms": means.get(system), "paper_ms": paper}
        for system, (groups, paper) in GROUPS.items()
    ]
    with sheet(7.0, 2.7) as figure:
        bars, line = figure.subplots(1, 2, width_ratios=(1, 1.45))
        for x, row in enumerate(rows):
            value = row["ours_ms"]
            if value is None or pd.isna(value):
                mark_gap(bars, x)
                continue
            bars.bar(x, value, 0.62, color="#0072B2")
            bars.plot(x, row["paper_ms"], **PAPER_MARK, zorder=5)
            text = f"{value:.1f}\n({row['paper_ms']:.1f})"
            bars.annotate(
                text, (x, max(value, row["paper_ms"])), xytext=(0, 5), textcoords="offset points", ha="center",
                fontsize=7, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}, zorder=4,
            )  # fmt: skip
        _mean(bars, pooled.mean(), f"mean fetch time {pooled.mean():.1f} ms")
        bars.set_ylim(0, 175)
        bars.set_xticks(range(len(rows)), [str(row["x"]) for row in rows])
        bars.set(title="(a) Compute", xlabel="Groups of the six requests", ylabel="GPU busy per step (ms)")
        line.plot(fetches[0].index + 1, fetches[0], color="#0072B2", linewidth=0.8)
        for paper, side in zip(PAPER_FETCH_MS, ("top", "bottom"), strict=True):  # outside the paper's range
            line.axhline(paper, color="black", linewidth=0.8, linestyle=":")
            line.annotate(
                f"paper {paper:.1f}", (1, paper), xycoords=("axes fraction", "data"),
                xytext=(0, 2 if side == "bottom" else -3), textcoords="offset points", ha="right", va=side, fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
            )  # fmt: skip
        _mean(line, pooled.mean(), "")
        line.set_ylim(0, max(175, fetches[0].max() * 1.08))
        line.set(title="(b) Fetch time of each step", xlabel="Step after the warm-up", ylabel="Link busy (ms)")
        handles = [bars.get_legend_handles_labels()[0][0], paper_handle()]
        if any(pd.isna(row["ours_ms"]) for row in rows):
            handles.append(gap_handle())
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    values = pd.DataFrame(rows + [{"panel": "b", "x": x, "ours_ms": value} for x, value in enumerate(fetches[0], 1)])
    caption = (
        f"Compute in 1, 2, 3, 6 groups: {_list(row['ours_ms'] for row in rows)} ms (paper 56.5, 74.6, 90.1, 126.8; the "
        f"device is fitted to them). Mean fetch time {pooled.mean():.1f} ms (paper: above 90.1, below 126.8); a step's "
        f"fetch time {pooled.min():.1f} to {pooled.max():.1f} ms (paper 55.7 to 160.1). {study.scale}."
    )
    return Drawing(figure, values, "Figure 4: compute and fetch time of a step, six requests", caption, study.missing())


def _mean(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color="#D55E00", linewidth=1.2, linestyle="--", label=label)


def _list(values: Iterable[Any]) -> str:
    import pandas as pd  # noqa: PLC0415

    return ", ".join("-" if pd.isna(value) else f"{value:.1f}" for value in values)

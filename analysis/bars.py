"""The comparison as a picture: where the step time went, and what was fetched, a bar a system (as Figure 10).

Owns its layout and colours (Okabe and Ito's, told apart without colour vision and by lightness in grey).
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.compare import Block, Entry

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("style.mplstyle")


@dataclass(frozen=True, slots=True)
class Part:
    """One colour of a stacked bar; ``ink`` is the colour of the number inside."""

    metric: str
    name: str
    colour: str
    ink: str
    hatch: str = ""


TIME_PARTS = (
    Part("busy_both", "link and GPU busy", "#0072B2", "white"),
    Part("link_only", "only the link busy", "#56B4E9", "black"),
    Part("gpu_only", "only the GPU busy", "#E69F00", "black", "////"),
    Part("neither", "neither busy", "#D0D0D0", "black"),
)
FETCH_PARTS = (
    Part("demand_fetches_per_step", "fetched on demand", "#009E73", "white"),
    Part("prefetches_needed_per_step", "prefetched, needed", "#F0E442", "black"),
    Part("prefetches_wasted_per_step", "prefetched, wasted", "#D55E00", "white", "xxxx"),
)


@dataclass(frozen=True, slots=True)
class Total:
    """The number at the end of a bar; ``room``: the width of a digit as a share of the longest bar."""

    metric: str
    factor: float
    digits: int
    room: float


STEP = Total("step_s_mean", 1e3, 1, 0.026)
FETCHES = Total("fetches_per_step", 1, 0, 0.042)

PAPER_MARK: dict[str, Any] = {
    "marker": "D",
    "markersize": 4.5,
    "markerfacecolor": "black",
    "markeredgecolor": "white",
    "markeredgewidth": 0.7,
}

_ROW_INCHES = 0.29
_BAR = 0.74  # share of its row
_TITLE_ROWS = 1.3  # space for the title of a setting, where there are several
_WIDTH_INCHES = 7.4


def draw(blocks: Sequence[Block]) -> Figure:
    """Two panels: step time in ms by state of link and GPU, and expert fetches a step by kind.

    A diamond marks the paper's number (a line its range); a whisker is the standard deviation over seeds.
    """
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    entries = [entry for block in blocks for entry in block.entries]
    rows = _rows(blocks)
    with mpl.rc_context(fname=str(STYLE)):
        figure = Figure(figsize=(_WIDTH_INCHES, _ROW_INCHES * (rows[-1] + 1) + 1.55), layout="constrained")
        time, fetches = figure.subplots(1, 2, sharey=True, width_ratios=(1.6, 1))
        states = [{part.metric: entry.means[part.metric] for part in TIME_PARTS} for entry in entries]
        lengths = [
            {metric: share * entry.means["step_s_mean"] * 1e3 for metric, share in state.items()}
            for state, entry in zip(states, entries, strict=True)
        ]
        inside = [{metric: f"{share:.0%}" for metric, share in state.items()} for state in states]
        _panel(time, TIME_PARTS, rows, lengths, inside)
        _totals(time, rows, entries, STEP)

        counts = [{part.metric: entry.means[part.metric] for part in FETCH_PARTS} for entry in entries]
        kinds = [part for part in FETCH_PARTS if part is FETCH_PARTS[0] or any(count[part.metric] for count in counts)]
        # A lone part needs no number inside: it is the total.
        inside = [{m: f"{n:.0f}" if n != sum(count.values()) else "" for m, n in count.items()} for count in counts]
        _panel(fetches, kinds, rows, counts, inside)
        _totals(fetches, rows, entries, FETCHES)

        time.set(title="(a) Where the step time goes", xlabel="Step time (ms); inside the bars, % of the step")
        fetches.set(title="(b) What is fetched", xlabel="Expert fetches per step")
        time.set_yticks(rows, [entry.label for entry in entries])
        time.set_ylim(rows[-1] + 0.55, rows[0] - (0.55 if len(blocks) == 1 else _TITLE_ROWS))
        _titles(figure, time, blocks, rows)
        _legend(figure, kinds, any(_marked(entry) for entry in entries))
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format of ``path``'s suffix, whole or not at all; same picture, same bytes."""
    import matplotlib as mpl  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    undated = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with mpl.rc_context(fname=str(STYLE)):
        figure.savefig(unfinished, metadata=undated.get(path.suffix[1:].lower()))
    os.replace(unfinished, path)


def _rows(blocks: Sequence[Block]) -> list[float]:
    """The y of every bar; settings stand apart."""
    rows: list[float] = []
    y = 0.0
    for block in blocks:
        for _ in block.entries:
            rows.append(y)
            y += 1.0
        y += _TITLE_ROWS
    return rows


def _panel(
    axes: Axes,
    parts: Sequence[Part],
    rows: Sequence[float],
    lengths: Sequence[Mapping[str, float]],
    inside: Sequence[Mapping[str, str]],
) -> None:
    longest = max(sum(length.values()) for length in lengths) or 1.0
    left = [0.0] * len(rows)
    for part in parts:
        widths = [length[part.metric] for length in lengths]
        axes.barh(rows, widths, _BAR, left=left, color=part.colour, hatch=part.hatch, edgecolor="white", linewidth=0.4)
        for y, start, width, texts in zip(rows, left, widths, inside, strict=True):
            if width > 0.085 * longest:
                box = {"facecolor": part.colour, "edgecolor": "none", "pad": 0.8} if part.hatch else None
                axes.text(
                    start + width / 2, y, texts[part.metric], ha="center", va="center_baseline", fontsize=6.5,
                    color=part.ink, bbox=box,
                )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)


def _totals(axes: Axes, rows: Sequence[float], entries: Sequence[Entry], total: Total) -> None:
    """Our number after each bar with the paper's in brackets, its mark, the spread over seeds; and room for them."""
    ends, texts = [], []
    for y, entry in zip(rows, entries, strict=True):
        end = value = entry.means[total.metric] * total.factor
        text = f"{value:.{total.digits}f}"
        if deviation := entry.deviations.get(total.metric, 0.0) * total.factor:
            axes.errorbar(value, y, xerr=deviation, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
            end = value + deviation
        if number := entry.paper.get(total.metric):
            low, middle, high = (n * total.factor for n in (number.low, number.middle, number.high))
            axes.plot([low, high], [y, y], color="black", linewidth=1.6, solid_capstyle="butt", zorder=4)
            axes.plot(middle, y, **PAPER_MARK, zorder=5)
            text += f" ({low:.{total.digits}f})" if low == high else f" ({low:.0f}\N{EN DASH}{high:.0f})"
            end = max(end, high)
        ends.append(end)
        texts.append(text)
    for y, end, text in zip(rows, ends, texts, strict=True):
        axes.annotate(
            text, (end, y), xytext=(6, 0), textcoords="offset points", va="center_baseline",
            fontsize=7, fontweight="bold",
        )  # fmt: skip
    room = max(end + total.room * (len(text) + 2) * max(ends) for end, text in zip(ends, texts, strict=True))
    axes.set_xlim(0, room or 1.0)


def _titles(figure: Figure, axes: Axes, blocks: Sequence[Block], rows: Sequence[float]) -> None:
    if len(blocks) == 1:
        figure.suptitle(textwrap.fill(blocks[0].title, 118), fontsize=8, x=0.01, ha="left")
        return
    from matplotlib.transforms import blended_transform_factory  # noqa: PLC0415

    across = blended_transform_factory(figure.transFigure, axes.transData)
    first = 0
    for block in blocks:
        title = figure.text(
            0.01, rows[first] - 0.85, block.title, transform=across, fontsize=7.5, fontstyle="italic", va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
        title.set_in_layout(False)
        first += len(block.entries)


def _legend(figure: Figure, kinds: Sequence[Part], marked: bool) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    handles: list[Artist] = [
        Patch(facecolor=part.colour, hatch=part.hatch, edgecolor="white", linewidth=0.4, label=part.name)
        for part in (*TIME_PARTS, *kinds)
    ]
    if marked:
        handles.append(Line2D([], [], linestyle="none", label="(the paper's number)", **PAPER_MARK))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


def _marked(entry: Entry) -> bool:
    return STEP.metric in entry.paper or FETCHES.metric in entry.paper

"""What all figures share: the drawn figure with its values, colours of systems, marks for gaps and for the paper.

Colours are Okabe and Ito's; systems differ by marker and hatch too, so that print without colour tells them apart.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

from analysis.bars import PAPER_MARK, STYLE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True, slots=True)
class Look:
    """How one system is drawn."""

    colour: str
    marker: str
    hatch: str = ""


LOOKS = {
    "llama_cpp": Look("#999999", "s"),
    "llama_cpp_lfu": Look("#999999", "s"),
    "finemoe": Look("#56B4E9", "^", "////"),
    "finemoe_lfu": Look("#56B4E9", "^", "////"),
    "specmd": Look("#009E73", "v", "...."),
    "specmd_lfu": Look("#009E73", "v", "...."),
    "bevy": Look("#D55E00", "o"),
    "bevy_prefetch": Look("#E69F00", "D", "xxxx"),
}
OTHER = Look("#CC79A7", "P")
INK = "#333333"
GAP: dict[str, Any] = {"marker": "x", "color": "black", "markersize": 5, "markeredgewidth": 1.3, "linestyle": "none"}
"""Where a result is missing: the cell failed or has not run."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure, the values it shows (a row each), a caption for people, and what is missing in it."""

    figure: Figure
    values: pd.DataFrame
    title: str
    caption: str
    missing: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Title, caption and gaps, to be printed."""
        wrapped = textwrap.wrap(self.caption, 118)
        return [self.title, *wrapped, *(f"missing: {line}" for line in self.missing)]


@contextmanager
def sheet(width_in: float, height_in: float) -> Iterator[Figure]:
    """An empty figure in the project's style."""
    import matplotlib.style  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.style.context(STYLE):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


def look(system: str) -> Look:
    """How ``system`` is drawn."""
    return LOOKS.get(system, OTHER)


def mark_gap(axes: Axes, x: float) -> None:
    """A cross on the axis where a result should be."""
    axes.plot([x], [0.02], transform=axes.get_xaxis_transform(), clip_on=False, zorder=6, **GAP)


def paper_handle(label: str = "printed in the paper") -> Line2D:
    """The paper's mark for a legend."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    return Line2D([], [], linestyle="none", label=label, **PAPER_MARK)


def gap_handle() -> Line2D:
    """The gap's mark for a legend."""
    from matplotlib.lines import Line2D  # noqa: PLC0415

    return Line2D([], [], label="no result", **GAP)


def spread(low: float, high: float, digits: int = 2) -> str:
    """``1.01 to 1.38``; one number where both read the same, a dash where there is none."""
    if isnan(low):
        return "-"
    return " to ".join(dict.fromkeys(f"{end:.{digits}f}" for end in (low, high)))

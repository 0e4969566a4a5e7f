"""Figure 11: step time against the number of missing experts, static groupings and Bevy."""

from __future__ import annotations

from analysis import misses
from analysis.drawing import Drawing, spread
from analysis.study import Study
from policies.core.types import UserError

WIDTHS = (20, 40, 80, 160, 320, 640)
"""Missing experts a bin; the first width with at least one bin that is full for every system."""


def draw(study: Study) -> Drawing:
    """``analysis.misses`` with its narrowest possible bins; a system that failed is named in the legend."""
    study.one_setting("Figure 11")
    ours = misses.pick(study.runs)
    for width in WIDTHS:
        try:
            means = misses.by_misses(study.runs, width)
            break
        except UserError:
            if width == WIDTHS[-1]:
                raise
    others = means.drop(columns=ours)
    if others.empty or not len(others.columns):
        raise UserError("Figure 11 needs static groupings beside Bevy; run experiment=fig11")
    below = others.min(axis=1) - means[ours]
    best = others.idxmin(axis=1)
    broken = [label for label in study.labels("system").values() if label not in means.columns]
    figure = misses.draw(means, ours, width, broken)
    figure.axes[0].locator_params(axis="x", integer=True)
    values = means.assign(fastest_static=best, bevy_below_ms=below).rename_axis("missing_from").reset_index()
    changing = (
        f"the fastest of them goes from {best.iloc[0]} to {best.iloc[-1]}"
        if best.nunique() > 1
        else f"it is {best.iloc[0]}"
    )
    caption = (
        f"Bevy below the fastest static grouping by {spread(below.min(), below.max(), 1)} ms in bins of {width} "
        f"missing experts (paper 0.9 to 4.3 ms at every point); {changing}. {study.scale}, steps of all seeds pooled."
    )
    return Drawing(figure, values, "Figure 11: step time against missing experts", caption, study.missing())

"""Figure 5: a request that misses more in the first layers keeps missing more."""

from __future__ import annotations

from analysis.drawing import Drawing, sheet
from analysis.request_misses import extra_by_rank, missing
from analysis.runs import open_journal
from analysis.study import Study
from policies.core.types import UserError

FIRST_LAYERS = 4
PAPER_AXIS = 16.0
_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")
_MARKERS = ("o", "s", "^", "D")


def draw(study: Study) -> Drawing:
    """A line a rank over the layers after the first four."""
    import numpy as np  # noqa: PLC0415
    import pandas as pd  # noqa: PLC0415

    study.one_setting("Figure 5")
    if any(run.summary["concurrency"] != 4 for run in study.runs):
        raise UserError("Figure 5 ranks four requests; run experiment=fig5")
    seeds = []
    for run in study.runs:
        config, model, records = open_journal(run.path)
        seeds.append(extra_by_rank(missing(records, model, int(config["warmup"])), FIRST_LAYERS))
    extra = np.mean(seeds, axis=0)
    layers = np.arange(1, extra.shape[1] + 1)
    with sheet(4.6, 2.9) as figure:
        axes = figure.subplots()
        for rank, (line, colour, marker) in enumerate(zip(extra, _COLOURS, _MARKERS, strict=True), 1):
            name = {1: "most misses in layers 0 to 3", 4: "fewest"}.get(rank, f"rank {rank}")
            axes.plot(layers, line, color=colour, marker=marker, markevery=5, markersize=4, label=name)
        for edge in (-PAPER_AXIS, PAPER_AXIS):
            axes.axhline(edge, color="black", linewidth=0.8, linestyle=":")
        axes.annotate(
            "the paper's axis ends here", (layers[0], PAPER_AXIS), xytext=(0, 2), textcoords="offset points",
            ha="left", fontsize=7,
        )  # fmt: skip
        top = max(PAPER_AXIS, float(np.abs(extra).max())) * 1.2
        axes.set(xlabel="Layers after the first four", ylabel="Accumulated extra misses", ylim=(-top, top))
        axes.axhline(0, color="black", linewidth=0.5)
        axes.grid(visible=True)
        figure.legend(loc="outside lower center", ncols=4)
    values = pd.DataFrame(extra.T, columns=[f"rank_{rank}" for rank in range(1, 5)])
    values.insert(0, "layer", layers + FIRST_LAYERS - 1)
    order = "persists" if (np.diff(extra[:, -1]) < 0).all() else "does not persist"
    caption = (
        f"The ranking of the first four layers {order}; the accumulated extra misses end at {extra[0, -1]:+.1f} and "
        f"{extra[-1, -1]:+.1f} (the paper's axis goes from -16 to +16). {study.scale}."
    )
    return Drawing(figure, values, "Figure 5: extra misses by rank", caption, study.missing())

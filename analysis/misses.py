"""Step time against the number of missing experts, system by system (Figure 11).

Owns the bins.  Reads ``steps.parquet`` of finished runs; a step belongs to the bin of its own demand fetches, so
systems are compared at equal misses and not at equal step numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from analysis.runs import SETTING, Run
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

FEWEST_STEPS = 10
"""A bin with fewer steps of some system is left out: its mean would say more of chance than of scheduling."""


def by_misses(runs: Sequence[Run], width: int) -> pd.DataFrame:
    """Mean step time in ms by bin of ``width`` missing experts (rows, their lower edges) and system (columns).

    Steps of all seeds are pooled; warm-up steps do not count.  Only bins where every system has at least
    ``FEWEST_STEPS`` steps are kept.

    Raises:
        UserError: the runs differ in more than system and seed, or no bin is full enough.
    """
    import pandas as pd  # noqa: PLC0415

    settings = {tuple(str(run.summary.get(key)) for key in SETTING) for run in runs}
    if len(settings) > 1:
        raise UserError(f"the runs have {len(settings)} settings; give those of one model, device, workload and cache")
    frames = []
    for run in runs:
        steps = pd.read_parquet(run.path / "steps.parquet", columns=["step", "step_s", "demand_fetches"])
        measured = steps[steps["step"] >= run.summary["warmup"]]
        frames.append(measured.assign(system=run.label("system"), bin=measured["demand_fetches"] // width * width))
    pooled = pd.concat(frames)
    groups = pooled.groupby(["bin", "system"])["step_s"]
    means = groups.mean().unstack() * 1e3
    counts = groups.count().unstack(fill_value=0)
    full = means[(counts >= FEWEST_STEPS).all(axis=1)]
    if full.empty:
        raise UserError(
            f"no bin of {width} missing experts has {FEWEST_STEPS} steps of every system; run more steps or seeds"
        )
    order = list(dict.fromkeys(run.label("system") for run in runs))
    ordered: pd.DataFrame = full[order]
    return ordered


def table(means: pd.DataFrame, ours: str) -> str:
    """The bins as text, with the fastest other system and how far ``ours`` lies below it, in ms."""
    others = means.drop(columns=ours)
    shown = means.round(1).assign(
        fastest_other=others.idxmin(axis=1), below_by_ms=(others.min(axis=1) - means[ours]).round(1)
    )
    return shown.rename_axis(index="missing from", columns=None).to_string() + "\n"


def draw(means: pd.DataFrame, ours: str, width: int, broken: Sequence[str] = ()) -> Figure:
    """One line a system; ``ours`` is drawn over the others, ``broken`` ones without a result are named."""
    import matplotlib.style  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    from analysis.bars import STYLE  # noqa: PLC0415

    with matplotlib.style.context(STYLE):
        figure = Figure(figsize=(5.2, 3.7), layout="constrained")
        axes = figure.subplots()
        marks = zip(
            ("o", "s", "^", "D", "v", "P", "X"),
            ("#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#0072B2", "#999999"),
            strict=False,
        )
        for system in means:
            mine = system == ours
            mark, colour = ("*", "#D55E00") if mine else next(marks)
            axes.plot(
                means.index + width / 2,
                means[system],
                marker=mark,
                color=colour,
                label=system,
                linewidth=2.0 if mine else 1.2,
                markersize=7 if mine else 4,
                zorder=3 if mine else 2,
            )
        axes.set(xlabel="Missing experts per step", ylabel="Step time (ms)")
        axes.grid(visible=True)
        for label in broken:
            axes.plot([], [], color="black", marker="x", linestyle="none", label=f"{label}: no result")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def pick(runs: Sequence[Run], prefix: str = "bevy") -> str:
    """The label of the one system whose name is ``prefix``.  Raises UserError if there is none."""
    labels = {run.label("system") for run in runs if run.summary.get("system") == prefix}
    if len(labels) != 1:
        raise UserError(f"expected runs of system={prefix} among those given; run it in the same study")
    return labels.pop()

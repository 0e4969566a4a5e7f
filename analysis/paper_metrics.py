"""Metrics of ``paper_ranges.yaml``: from the runs of a setting to the numbers that the paper prints about them.

A metric takes a ``View`` and returns one number a setting, none if the runs that it needs are not there.  A statement
gives 1 for true and 0 for false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.runs import Run, open_journal
from analysis.study import Study, speedups
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd

LFU_BASELINES = ("llama_cpp_lfu", "finemoe_lfu", "specmd_lfu")


@dataclass(frozen=True, slots=True)
class View:
    """The runs of one setting; ``precision``: the tables of ``python -m sim.precision`` beside them."""

    study: Study
    precision: Sequence[Path] = ()

    def means(self, metric: str) -> pd.DataFrame:
        """Means over seeds by setting (rows) and system (columns)."""
        keys = ["model", "device", "workload", "concurrency", "cache"]
        table: pd.DataFrame = self.study.frame.pivot_table(index=keys, columns="system", values=metric, sort=False)
        return table

    def of(self, metric: str, system: str) -> list[float]:
        """``metric`` of ``system``, one a setting."""
        table = self.means(metric)
        return [float(value) for value in table[system].dropna()] if system in table else []

    def against(self, metric: str, system: str, base: str) -> pd.DataFrame:
        """Two columns, ``system`` and ``base``, of the settings that have both."""
        table = self.means(metric).reindex(columns=[system, base]).dropna()
        return table.set_axis(["system", "base"], axis=1)


Metric = Callable[[View], list[float]]


def ratio(name: str) -> Metric:
    """A column of ``analysis.study.speedups``."""
    return lambda view: [float(value) for value in _ratios(view, name)]


def ratio_quantile(name: str, quantile: float) -> Metric:
    """A quantile of it over the settings."""

    def metric(view: View) -> list[float]:
        values = _ratios(view, name)
        return [float(values.quantile(quantile))] if len(values) else []

    return metric


def ratio_mean(view: View) -> list[float]:
    """The mean of Bevy's speedup over the fastest baseline."""
    values = _ratios(view, "bevy_over_fastest")
    return [float(values.mean())] if len(values) else []


def _ratios(view: View, name: str) -> pd.Series[float]:
    column: pd.Series[float] = speedups(view.study)[name].dropna()
    return column


def fetch_time(pick: str) -> Metric:
    """``mean``, ``min`` or ``max`` over the measured steps of conventional batching, s."""

    def metric(view: View) -> list[float]:
        import pandas as pd  # noqa: PLC0415

        from analysis.figures.fig4 import fetch_times_ms  # noqa: PLC0415

        runs = _runs(view, "llama_cpp_lfu")
        return [float(pd.concat([fetch_times_ms(run) for run in runs]).agg(pick)) / 1e3] if runs else []

    return metric


def extra_misses(rank: int | None) -> Metric:
    """Of Figure 5: the furthest value at the last layer; with ``rank`` None, whether the ranking persists."""

    def metric(view: View) -> list[float]:
        import numpy as np  # noqa: PLC0415

        from analysis.figures.fig5 import FIRST_LAYERS  # noqa: PLC0415
        from analysis.request_misses import extra_by_rank, missing  # noqa: PLC0415

        seeds = []
        for run in _runs(view, "llama_cpp_lfu"):
            config, model, records = open_journal(run.path)
            seeds.append(extra_by_rank(missing(records, model, int(config["warmup"])), FIRST_LAYERS))
        if not seeds:
            return []
        last = np.mean(seeds, axis=0)[:, -1]
        return [float((np.diff(last) < 0).all())] if rank is None else [float(np.abs(last).max())]

    return metric


def below_static(view: View) -> list[float]:
    """Bevy's distance to the fastest static grouping in each bin of missing experts, s."""
    found = _static_bins(view)
    return [] if found is None else [float(value) / 1e3 for value in found["below_ms"]]


def static_changes(view: View) -> list[float]:
    """Whether the fastest static grouping depends on the misses."""
    found = _static_bins(view)
    return [] if found is None else [float(found["fastest"].nunique() > 1)]


def _static_bins(view: View) -> pd.DataFrame | None:
    import pandas as pd  # noqa: PLC0415

    from analysis.misses import by_misses, pick  # noqa: PLC0415

    runs = [run for run in view.study.runs if str(run.summary["system"]).startswith(("static_", "bevy"))]
    runs = [run for run in runs if run.summary["system"] == "bevy" or str(run.summary["system"]).startswith("static_")]
    try:
        ours = pick(runs)
        means = by_misses(runs, 20)
    except UserError:
        return None
    others = means.drop(columns=ours)
    if len(others.columns) < 5:
        return None
    return pd.DataFrame({"below_ms": others.min(axis=1) - means[ours], "fastest": others.idxmin(axis=1)})


def gpu_busy_over_baselines(view: View) -> list[float]:
    """Bevy's GPU busy time over that of each baseline with LFU."""
    tables = [view.against("gpu_busy_s_per_step", "bevy", base) for base in LFU_BASELINES]
    return [float(value) for table in tables for value in table["system"] / table["base"]]


def fetches_over_llama_cpp(view: View) -> list[float]:
    """Fetches of FineMoE and SpecMD with LFU over those of llama.cpp with LFU."""
    tables = [view.against("fetches_per_step", system, "llama_cpp_lfu") for system in LFU_BASELINES[1:]]
    return [float(value) for table in tables for value in table["system"] / table["base"]]


def change(metric: str, system: str, *, relative: bool = False) -> Metric:
    """``system`` less Bevy, or the share of Bevy's."""

    def evaluate(view: View) -> list[float]:
        table = view.against(metric, system, "bevy")
        less = table["system"] - table["base"]
        return [float(value) for value in (less / table["base"] if relative else less)]

    return evaluate


def idle_rises_in_none(view: View) -> list[float]:
    """Whether no other order lengthens the GPU's idle time."""
    orders = ("bevy_fifo", "bevy_global_srtf", "bevy_both")
    changes = [change("gpu_idle_s_per_step", system)(view) for system in orders]
    return [float(all(value <= 0 for values in changes for value in values))] if all(changes) else []


def precision(falls: bool) -> Metric:
    """Of Figure 2: whether precision falls; or whether the randomised cache lies between none and actual."""

    def metric(view: View) -> list[float]:
        from analysis.figures.fig2 import curves, read  # noqa: PLC0415

        found = []
        for path in view.precision:
            table = read(path)
            for predictor in table["predictor"].unique():
                lines = curves(table, predictor)
                none, last = lines["actual"].iloc[0], lines.iloc[-1]
                between = last["actual"] < last["randomized"] < none
                found.append(float(last["actual"] < none if falls else between))
        return found

    return metric


def deadlock_free(*, share: bool) -> Metric:
    """Entries that 16 requests of Qwen3.6 need to run ahead, or their share of all experts."""

    def metric(_: View) -> list[float]:
        from omegaconf import OmegaConf  # noqa: PLC0415

        from conf.compose import FOLDER  # noqa: PLC0415
        from conf.models import ModelConfig  # noqa: PLC0415

        node: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / "model" / "qwen3_6_35b_a3b.yaml"))
        spec = ModelConfig.from_config(node).spec
        entries = 16 * spec.top_k
        return [entries / spec.n_total if share else float(entries)]

    return metric


def config_value(key: str) -> Metric:
    """The different values of a setting among the runs that have it."""

    def metric(view: View) -> list[float]:
        values: dict[float, None] = {}
        for run in view.study.runs:
            node: Any = run.config
            for part in key.split("."):
                node = node.get(part) if isinstance(node, Mapping) else None
            if node is not None:
                values[float(node)] = None
        return sorted(values)

    return metric


def _runs(view: View, system: str) -> list[Run]:
    return [run for run in view.study.runs if run.summary["system"] == system]


METRICS: dict[str, Metric] = {
    **{name: ratio(name) for name in (
        "bevy_over_fastest", "bevy_over_llama_cpp", "prefetch_over_llama_cpp", "finemoe_over_llama_cpp",
    )},
    "bevy_over_fastest_mean": ratio_mean,
    "bevy_over_fastest_median": ratio_quantile("bevy_over_fastest", 0.5),
    "bevy_over_fastest_lower_quartile": ratio_quantile("bevy_over_fastest", 0.25),
    "bevy_over_fastest_upper_quartile": ratio_quantile("bevy_over_fastest", 0.75),
    "precision_falls": precision(True),
    "precision_random_between": precision(False),
    "fetch_time_mean": fetch_time("mean"),
    "fetch_time_least": fetch_time("min"),
    "fetch_time_most": fetch_time("max"),
    "ranking_persists": extra_misses(None),
    "extra_misses_furthest": extra_misses(0),
    "deadlock_free_entries": deadlock_free(share=False),
    "deadlock_free_share": deadlock_free(share=True),
    "bevy_step_less_link_busy": lambda view: view.of("step_less_link_busy_s", "bevy"),
    "bevy_gpu_overlapped_share": lambda view: view.of("gpu_overlapped_share", "bevy"),
    "bevy_gpu_busy_over_baselines": gpu_busy_over_baselines,
    "prefetchers_fetches_over_llama_cpp": fetches_over_llama_cpp,
    "bevy_below_static": below_static,
    "fastest_static_changes": static_changes,
    "fifo_gpu_busy_change": change("gpu_busy_s_per_step", "bevy_fifo"),
    "fifo_gpu_idle_change": change("gpu_idle_s_per_step", "bevy_fifo"),
    "global_srtf_gpu_busy_change": change("gpu_busy_s_per_step", "bevy_global_srtf"),
    "gpu_idle_rises_in_none": idle_rises_in_none,
    "prefetch_throughput_change": change("tokens_per_s", "bevy_prefetch", relative=True),
    "bevy_prefetches_per_step": lambda view: view.of("prefetched_per_step", "bevy_prefetch"),
}  # fmt: skip


def metric(name: str) -> Metric:
    """The metric of this name; ``config.KEY`` is a setting's value."""
    return config_value(name.removeprefix("config.")) if name.startswith("config.") else METRICS[name]

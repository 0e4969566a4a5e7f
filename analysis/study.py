"""Finished and failed cells as one table.

Owns what makes cells comparable here: model, device, workload, requests and the cache that was *asked for* (a
predictor that keeps tables takes its memory out of it), and that a failed cell is a row without numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.runs import Run, as_requested, find_runs, run_row
from policies.core.types import UserError

if TYPE_CHECKING:
    import pandas as pd

SETTING = ["model", "device", "workload", "concurrency", "cache"]
"""Columns that say where systems are compared; seeds are averaged."""

BASELINES = ("llama_cpp", "finemoe", "specmd")
_FAILED = ".failed.json"


@dataclass(frozen=True, slots=True)
class Study:
    """``runs`` in their order; ``frame``: a row for each of them and for each failed cell; ``failures``: why."""

    runs: Sequence[Run]
    frame: pd.DataFrame
    failures: Mapping[str, str] = field(default_factory=dict)

    def means(self, *metrics: str) -> pd.DataFrame:
        """Means over seeds, a row a system and setting; all seeds failed: no number."""
        keys = [*SETTING, "system"]
        means: pd.DataFrame = self.frame.groupby(keys, sort=False)[list(metrics)].mean().reset_index()
        return means

    def labels(self, group: str) -> dict[str, str]:
        """Names for people of the systems, models, devices or workloads, in their order."""
        found = self.frame[[group, f"{group}_label"]].drop_duplicates(group)
        return dict(zip(found[group], found[f"{group}_label"], strict=True))

    def one_setting(self, figure: str, vary: Sequence[str] = ()) -> None:
        """Raise UserError if more differs between the cells than ``vary``, systems and seeds."""
        for key in (*SETTING, "steps", "warmup"):
            values = self.frame[key].unique() if key not in vary else ()
            if len(values) > 1:
                named = ", ".join(str(value) for value in values)
                raise UserError(f"{figure} compares runs of one {key}, these have {named}; give those of one study")

    @property
    def scale(self) -> str:
        """Steps, warm-up and seeds, for a caption."""
        steps, warmup = (int(self.frame[key].max()) for key in ("steps", "warmup"))
        seeds = self.frame["seed"].nunique()
        return f"{steps} steps of which {warmup} warm up, {seeds} seed{'s'[: seeds > 1]}"

    def missing(self) -> tuple[str, ...]:
        """The failed cells with their reasons."""
        return tuple(f"{cell}: {reason}" for cell, reason in self.failures.items())


def find_study(paths: Sequence[Path]) -> Study:
    """The runs at or under ``paths``, and the failed cells beside them.

    Raises:
        UserError: there is no finished run.
    """
    import pandas as pd  # noqa: PLC0415

    runs = [as_requested(run) for run in find_runs(paths)]
    rows = [_row(run) for run in runs]
    failures: dict[str, str] = {}
    for failure in _failures(paths):
        failures[str(failure["cell"])] = f"{failure['kind']}: {failure['reason']}"
        if failure.get("settings"):
            rows.append(_gap(failure["settings"]))
    return Study(runs, pd.DataFrame(rows), failures)


def speedups(study: Study) -> pd.DataFrame:
    """Ratios of throughput in each setting (runs of one seed are divided, then averaged); a row a setting.

    ``bevy_over_fastest`` (of the baselines that are there), ``bevy_over_llama_cpp``, ``prefetch_over_llama_cpp`` (the
    faster of FineMoE and SpecMD), ``finemoe_over_llama_cpp``, ``specmd_over_llama_cpp``.  A setting without a needed
    system has no number.
    """
    import pandas as pd  # noqa: PLC0415

    table = study.frame.pivot_table(
        index=[*SETTING, "seed"], columns="system", values="tokens_per_s", sort=False, dropna=False
    ).dropna(how="all")
    table = table.reindex(columns=["bevy", *BASELINES])
    prefetchers = table[["finemoe", "specmd"]]
    whole = table[list(BASELINES)].notna().all(axis=1)
    ratios = pd.DataFrame(
        {
            "bevy_over_fastest": (table["bevy"] / table[list(BASELINES)].max(axis=1)).where(whole),
            "bevy_over_llama_cpp": table["bevy"] / table["llama_cpp"],
            "prefetch_over_llama_cpp": prefetchers.max(axis=1).where(prefetchers.notna().all(axis=1))
            / table["llama_cpp"],
            "finemoe_over_llama_cpp": table["finemoe"] / table["llama_cpp"],
            "specmd_over_llama_cpp": table["specmd"] / table["llama_cpp"],
        }
    )
    means: pd.DataFrame = ratios.groupby(level=SETTING, sort=False).mean().reset_index()
    return means


def _row(run: Run) -> dict[str, Any]:
    row = run_row(run)
    row["cache"] = _cache(run.config, row["cache_fraction"])
    busy_s = row["gpu_busy_s_per_step"]
    row["gpu_idle_s_per_step"] = row["step_s_mean"] - busy_s
    row["gpu_overlapped_share"] = row["busy_both"] * row["step_s_mean"] / busy_s if busy_s else None
    row["step_less_link_busy_s"] = row["step_s_mean"] - row["link_busy_s_per_step"]
    row["prefetched_per_step"] = row["prefetches_needed_per_step"] + row["prefetches_wasted_per_step"]
    return row


def _gap(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a cell that failed: who it was, and no numbers."""
    row: dict[str, Any] = {key: settings[key] for key in ("concurrency", "seed", "steps", "warmup")}
    row["cache"] = _cache(settings, float("nan"))
    for group in ("system", "model", "device", "workload"):
        row[group] = settings[group]["name"]
        row[f"{group}_label"] = settings[group].get("label") or settings[group]["name"]
    return row


def _cache(config: Mapping[str, Any], effective: float) -> float:
    """The asked share of all experts, as it was written: 0.3 whatever whole number of slots it gave."""
    node = config["cache"]
    return float(node["fraction"]) if node.get("slots") is None else round(effective, 4)


def _failures(paths: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    """What the failed cells in the studies of ``paths`` left."""
    folders = [path.parent if (path / "summary.json").is_file() else path for path in paths]
    for folder in dict.fromkeys(folders):
        for path in sorted(folder.rglob(f"*{_FAILED}")):
            if path.name.startswith("."):
                continue
            try:
                failure = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                failure = {}
            yield {"cell": path.name.removesuffix(_FAILED), "kind": "failed", "reason": "no reason readable", **failure}

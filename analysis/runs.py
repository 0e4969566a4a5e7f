"""Finished runs on disk: finding them, reading them, one table row each.

Owns the way from folders to ``Run`` values and to a frame.  Reads ``summary.json``, ``config.yaml`` and, when
asked, the journal; a folder without a summary is a run that has not finished and is passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policies.core.journal import Record, read_journal
from policies.core.types import ModelSpec, UserError

if TYPE_CHECKING:
    import pandas as pd

SETTING = ("backend", "model", "device", "workload", "concurrency", "cache_fraction", "cache_slots", "steps", "warmup")
"""Keys of a summary that must agree for two systems to be comparable; the seed may differ."""

_FAMILIES = ("llama_cpp", "", "static", "bevy")


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run: its folder, its ``summary.json`` and its resolved config."""

    path: Path
    summary: Mapping[str, Any]
    config: Mapping[str, Any]

    def label(self, group: str) -> str:
        """The name for people of the run's ``system``, ``model``, ``device`` or ``workload``."""
        part = self.config.get(group)
        label = part.get("label") or part.get("name") if isinstance(part, Mapping) else part
        return str(label or self.summary.get(group, "?"))


def as_requested(run: Run) -> Run:
    """The run with the cache that was asked for, where its predictor's tables took some of it.

    Systems are compared at equal memory, so this is the setting that they share.
    """
    if not (run.summary.get("predictor") or {}).get("memory_bytes"):
        return run
    from conf.models import ModelConfig  # noqa: PLC0415
    from policies.build import cache_slots  # noqa: PLC0415

    spec = ModelConfig.from_config(run.config["model"]).spec
    slots = cache_slots(run.config, spec)
    return replace(run, summary={**run.summary, "cache_slots": slots, "cache_fraction": slots / spec.n_total})


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """The finished runs at or under ``paths``: run folders as given, those of a study baselines first.

    Raises:
        UserError: a path does not exist, holds no finished run, or its files cannot be read.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if (path / "summary.json").is_file():
            runs = [_load(path)]
        else:
            # Names with a leading dot are folders that a run is still writing.
            folders = [summary.parent for summary in path.rglob("summary.json")]
            whole = [folder for folder in folders if not any(p[0] == "." for p in folder.relative_to(path).parts)]
            runs = sorted(map(_load, whole), key=lambda run: _rank(as_requested(run)))
        if not runs:
            raise UserError(
                f"{path} holds no finished run; give a folder runs/STUDY/CELL with a summary.json, or a study"
            )
        found.update((run.path, run) for run in runs)
    return list(found.values())


def _rank(run: Run) -> tuple[Any, ...]:
    """By setting, then baselines, static groupings (few groups first), Bevy and its variants."""
    system = str(run.summary.get("system", ""))
    family = next((f for f in reversed(_FAMILIES) if f and system.startswith(f)), "")
    setting = tuple(str(run.summary.get(key)) for key in SETTING)
    return (setting, _FAMILIES.index(family), system.count("_"), system, str(run.summary.get("seed")), str(run.path))


def _load(path: Path) -> Run:
    from omegaconf import OmegaConf  # noqa: PLC0415

    try:
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        config = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"), resolve=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no readable run folder ({error}); run the cell again") from error
    except Exception as error:  # OmegaConf passes on whatever its YAML reader raises
        raise UserError(f"{path}/config.yaml cannot be read ({type(error).__name__}); run the cell again") from error
    if not isinstance(summary, dict) or not isinstance(config, dict):
        raise UserError(f"{path} is no run folder: summary.json and config.yaml must hold mappings; run the cell again")
    return Run(path, summary, {str(key): value for key, value in config.items()})


def open_journal(path: Path) -> tuple[Mapping[str, Any], ModelSpec, Iterator[Record]]:
    """The config, the model and the records of a run folder's journal.

    Raises:
        UserError: there is no journal, or it cannot be read.
    """
    file = path / "journal.jsonl.gz"
    if not file.is_file():
        raise UserError(f"{path} has no journal.jsonl.gz; give the folder of a run, runs/STUDY/CELL")
    header, records = read_journal(file)
    try:
        return header["config"], ModelSpec(**header["model"]), records
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} names no config and model in its first line; run the cell again") from error


def run_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """``run_row`` of each run."""
    import pandas as pd  # noqa: PLC0415

    return pd.DataFrame([run_row(run) for run in runs])


def run_row(run: Run) -> dict[str, Any]:
    """Every plain value of a run's summary, labels, and the values that tables and figures share.

    Added: ``fetches_per_step`` (demand and prefetches, used or not), ``prefetch_wasted_share`` (of all
    prefetches), ``groups_of_1_share``, ``groups_of_3_up_share``, the bounds by their own names,
    ``*_label`` for system, model, device and workload, and ``path``.
    """
    summary = run.summary
    row: dict[str, Any] = {key: value for key, value in summary.items() if not isinstance(value, dict | list)}
    row["path"] = str(run.path)
    row.update({f"{group}_label": run.label(group) for group in ("system", "model", "device", "workload")})
    row.update(summary.get("bounds", {}))
    needed = summary["prefetches_needed_per_step"]
    wasted = summary["prefetches_wasted_per_step"]
    row["fetches_per_step"] = summary["demand_fetches_per_step"] + needed + wasted
    row["prefetch_wasted_share"] = wasted / (needed + wasted) if needed + wasted else None
    share = summary.get("group_size_share", {})
    row["groups_of_1_share"] = share.get("1", 0.0)
    row["groups_of_3_up_share"] = sum(value for size, value in share.items() if int(size) >= 3)
    return row

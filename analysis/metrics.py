"""The metrics of a run, computed from its journal alone.

Owns the names and formulas of ``steps.parquet`` and of the metric keys of ``summary.json``.  Knows nothing of
how the run was made: a simulator's journal and a machine's go through the same lines.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.account import Account, Step
from analysis.bounds import optimal_fetches
from analysis.runs import open_journal
from policies.core.types import ModelSpec, UserError

if TYPE_CHECKING:
    import pandas as pd

STATES = ("busy_both", "link_only", "gpu_only", "neither")
"""The four states of (link, GPU): both busy, only the link, only the GPU, neither."""

LITTLE_TO_OVERLAP = 0.3
"""rho below which fetching is too short against computing for any overlap to pay (measured on CPU and disk)."""


def step_frame(steps: Sequence[Step], expert_bytes: int) -> pd.DataFrame:
    """One row a step; times in seconds, ``bytes`` in bytes, everything else counts.

    Per row, with the definitions of ``analysis.account.Step``:

    - ``step_s = busy_both_s + link_only_s + gpu_only_s + neither_s``;
      ``link_busy_s = busy_both_s + link_only_s``; ``gpu_busy_s = busy_both_s + gpu_only_s``;
    - ``bound_s = max(gpu_busy_s, link_busy_s)``: no overlap makes the step shorter;
    - ``bytes = (demand_fetches + prefetches) * expert_bytes``;
    - ``distinct_experts``: distinct (layer, expert) that any request of the step needs;
    - ``hit_rate = 1 - (demand_fetches + prefetches_needed + hosted) / distinct_experts``: the share of them that was in
      the cache without a fetch of this step or the CPU's work.  An expert that a step fetches twice counts twice, which
      ``repeated_fetches`` tells.
    - ``groups_of_1``, ``groups_of_2``, ...: batches by the number of requests in them.
    """
    import pandas as pd  # noqa: PLC0415

    largest = max((max(step.group_sizes, default=0) for step in steps), default=0)
    columns: dict[str, Any] = {
        "step": [step.step for step in steps],
        "begin_s": [step.begin_s for step in steps],
        "end_s": [step.end_s for step in steps],
        "step_s": [step.step_s for step in steps],
        "tokens": [len(step.requests) for step in steps],
        **{f"{state}_s": [getattr(step, f"{state}_s") for step in steps] for state in STATES},
    }
    counts = (
        "demand_fetches",
        "prefetches",
        "prefetches_needed",
        "prefetches_late",
        "prefetches_wasted",
        "prefetches_later_hit",
        "repeated_fetches",
        "hosted",
        "jobs",
    )
    columns.update({name: [getattr(step, name) for step in steps] for name in counts})
    columns["groups"] = [step.group_sizes.total() for step in steps]
    columns.update({f"groups_of_{size}": [step.group_sizes[size] for step in steps] for size in range(1, largest + 1)})
    columns["distinct_experts"] = [len(step.needed) for step in steps]
    frame = pd.DataFrame(columns)
    frame["link_busy_s"] = frame["busy_both_s"] + frame["link_only_s"]
    frame["gpu_busy_s"] = frame["busy_both_s"] + frame["gpu_only_s"]
    frame["bound_s"] = frame[["link_busy_s", "gpu_busy_s"]].max(axis=1)
    frame["bytes"] = (frame["demand_fetches"] + frame["prefetches"]) * expert_bytes
    missed = frame["demand_fetches"] + frame["prefetches_needed"] + frame["hosted"]
    frame["hit_rate"] = 1 - missed / frame["distinct_experts"]
    return frame


def summarise(
    steps: Sequence[Step], frame: pd.DataFrame, model: ModelSpec, capacity: int, warmup: int
) -> dict[str, Any]:
    """The metric keys of ``summary.json``, over the steps after the first ``warmup``.

    Args:
        steps: all steps of the run, in order.
        frame: their ``step_frame``.
        model: the routing shape.
        capacity: cache entries, for the offline optimum.
        warmup: how many steps at the start are left out (they still fill the optimum's cache).

    Shares and rates are ratios of sums (a long step weighs more than a short one), ``..._per_step`` are means
    over steps, and percentiles interpolate linearly.  ``inter_token_s_*`` pool, over all requests, the times
    between the ends of consecutive steps that a request takes part in.  ``rho`` is the link's busy time over
    the GPU's in this run.

    Raises:
        UserError: no step is left to measure.
    """
    measured = frame.iloc[warmup:]
    if measured.empty:
        raise UserError(f"the journal has {len(frame)} finished steps and warmup takes {warmup}; raise steps")
    total = measured.sum()
    count = len(measured)
    length_s = float(total["step_s"])
    step_s = measured["step_s"].to_numpy()
    sizes: Counter[int] = Counter()
    for step in steps[warmup:]:
        sizes.update(step.group_sizes)
    gaps_s = [gap_s for step in steps[warmup:] for _, gap_s in step.token_gaps_s]
    link_s, gpu_s = float(total["link_busy_s"]), float(total["gpu_busy_s"])
    prefetches = int(total["prefetches"])
    on_time = int(total["prefetches_needed"] - total["prefetches_late"])
    rho = link_s / gpu_s if gpu_s > 0 else None
    lockstep = all(step.lockstep for step in steps)
    bound_s = float(measured["bound_s"].mean())
    return {
        "tokens_per_s": float(total["tokens"]) / length_s,
        "step_s_mean": length_s / count,
        **{f"step_s_p{p}": float(np.percentile(step_s, p)) for p in (50, 95, 99)},
        **{f"inter_token_s_p{p}": float(np.percentile(gaps_s, p)) if gaps_s else None for p in (50, 99)},
        "tokens_per_step": float(total["tokens"]) / count,
        "demand_fetches_per_step": float(total["demand_fetches"]) / count,
        "prefetches_per_step": prefetches / count,
        "prefetches_needed_per_step": float(total["prefetches_needed"]) / count,
        "prefetches_late_per_step": float(total["prefetches_late"]) / count,
        "prefetches_wasted_per_step": float(total["prefetches_wasted"]) / count,
        "prefetches_later_hit_per_step": float(total["prefetches_later_hit"]) / count,
        "prefetch_on_time_share": on_time / prefetches if prefetches else None,
        "repeated_fetches_per_step": float(total["repeated_fetches"]) / count,
        "bytes_per_step": float(total["bytes"]) / count,
        "distinct_experts_per_step": float(total["distinct_experts"]) / count,
        "hosted_per_step": float(total["hosted"]) / count,
        "hit_rate": 1
        - float(total["demand_fetches"] + total["prefetches_needed"] + total["hosted"])
        / float(total["distinct_experts"]),
        **{state: float(total[f"{state}_s"]) / length_s for state in STATES},
        "gpu_busy_s_per_step": gpu_s / count,
        "link_busy_s_per_step": link_s / count,
        "link_bytes_per_s": float(total["bytes"]) / link_s if link_s > 0 else None,
        "jobs_per_step": float(total["jobs"]) / count,
        "groups_per_step": float(total["groups"]) / count,
        "group_size_share": {str(size): sizes[size] / sizes.total() for size in sorted(sizes)},
        "rho": rho,
        "bounds": {
            "max_compute_fetch_s": bound_s,
            "step_over_bound": length_s / count / bound_s if bound_s > 0 else None,
            **optimal_fetches(steps, model, capacity, warmup),
        },
        "warnings": _warnings(rho, lockstep),
    }


def _warnings(rho: float | None, lockstep: bool) -> list[str]:
    if rho is None or rho >= LITTLE_TO_OVERLAP:
        return []
    line = f"rho = fetch time / compute time is {rho:.2f}, below {LITTLE_TO_OVERLAP}: there is little to overlap"
    if not lockstep:
        line += " (judge by a conventional-batching run of this setting; split groups compute longer and lower rho)"
    return [line]


class Metrics:
    """The metrics of one run, from the records of its journal: hears them while the run is made, or reads them."""

    def __init__(self) -> None:
        self._account = Account()
        self.record = self._account.record
        """``record(t_s, events, commands)``: the next record."""

    def write(self, run_dir: Path, config: Mapping[str, Any], model: ModelSpec) -> dict[str, Any]:
        """Write ``steps.parquet`` of a run directory and return the metric keys of its ``summary.json``.

        Args:
            run_dir: the run directory.
            config: the run's resolved config.
            model: the model as it was run: a trace may have a smaller top-k.

        Raises:
            UserError: nothing is left to measure after the warm-up.
        """
        from conf.models import ModelConfig  # noqa: PLC0415
        from policies.build import cache_slots  # noqa: PLC0415

        steps = self._account.steps
        frame = step_frame(steps, ModelConfig.from_config(config["model"]).expert_bytes)
        metrics = summarise(steps, frame, model, cache_slots(config, model), config["warmup"])
        target = run_dir / "steps.parquet"
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        frame.to_parquet(unfinished, compression="zstd", index=False)
        os.replace(unfinished, target)
        return metrics


def write_metrics(run_dir: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """``Metrics.write`` from the ``journal.jsonl.gz`` of a run directory.

    Raises:
        UserError: the journal is broken, or nothing is left to measure after the warm-up.
    """
    _, model, records = open_journal(run_dir)
    metrics = Metrics()
    for record in records:
        metrics.record(record.t_s, record.events, record.commands)
    return metrics.write(run_dir, config, model)

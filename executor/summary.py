"""What a finished run says of itself: ``summary.json`` of a run directory.

Owns which of a run's facts are kept, its validity and its warnings.  Changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from executor import host, stand_in
from executor.generate import Completion
from policies.build import cache_slots

if TYPE_CHECKING:
    from executor.run import OpenRun

HELD_SHARE = 0.95
"""A paced link that gave less than this share of its rate was not held to it, if reads came late."""

LATE_SHARE = 0.05
"""More reads or batches than this that came late are worth a warning."""


def summarise(run: OpenRun, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``summary.json``; ``metrics`` from the finished journal."""
    settings, machine, store, core = run.settings, run.machine, run.store, run.core
    spec, mode, counters = core.model, run.link.mode, run.link.counters
    slots = cache_slots(settings, spec)
    invalid = [*run.faults, *(host.why_invalid(run.meter, mode.measures_disk) if machine.store == "disk" else [])]
    times, batches = run.backend.times, max(1, run.backend.times.batches)
    live = run.prompts is not None
    return {
        "backend": "executor",
        **{group: settings[group]["name"] for group in ("system", "model", "device", "workload")},
        **{key: settings[key] for key in ("concurrency", "warmup", "seed")},
        "steps": run.steps,
        "requested_steps": settings["steps"],
        "cache_fraction": slots / spec.n_total,
        "cache_slots": slots,
        "runahead": core.runahead,
        "layers_in_waves": core.layers_in_waves,
        "mode": "live" if live else "replay",
        **stand_in.describe(machine, run.device),
        "pack": {
            "name": store.manifest.name,
            "dtype": store.manifest.dtype,
            "random": store.manifest.random,
            "expert_bytes": store.expert_bytes,
        },
        "read_mode": mode.describe(),
        "kernels": {"name": "torch"} if run.fast is None else {"name": "triton", **run.fast.describe()},
        "valid": not invalid,
        "invalid": invalid,
        "bytes_read": run.meter.asked_bytes,
        "bytes_read_from_device": run.meter.device_bytes,
        "device_read_ratio": run.meter.ratio,
        "read_over_needed": counters.bytes_read / max(1, counters.fetches * store.stride),
        "pack_cached_share": host.cached_share(store.experts_path),
        "paced_late_share": run.link.late_share,
        "paced_late_batches_share": times.late / batches if run.device else None,
        "foreign_experts": times.foreign,
        "routing": run.routing,
        "clocks": run.clocks.describe(),
        "machine": host.versions(),
        "requests": _latencies(run.completions),
        **metrics,
        "warnings": [
            *([f"runahead {core.runahead}"] if core.runahead.startswith("off") else []),
            *([f"random weights ({store.manifest.name}): for timing only"] if store.manifest.random else []),
            *([f"invalid: {reason}" for reason in invalid]),
            *_paced_warnings(run, metrics["link_bytes_per_s"]),
            *stand_in.warnings(run.device),
            *run.warnings,
            *run.clocks.warnings(),
            *metrics["warnings"],
        ],
        "host_us_per_batch": {
            "decide_and_submit": 1e6 * run.clock.busy_s / batches,
            "start": 1e6 * times.start_s / batches,
            "notice": 1e6 * times.notice_s / batches,
            "compute": 1e6 * times.compute_s / batches,
            "blocked": 1e6 * times.blocked_s / batches,
            "handle_calls": run.clock.calls / batches,
        },
        "host_load_average": host.load_average(),
    }


def _paced_warnings(run: OpenRun, seen: float | None) -> list[str]:
    lines = []
    sharing, late = stand_in.link_of(run.machine, run.device), run.link.late_share or 0.0
    if sharing is not None and seen is not None and late > LATE_SHARE and seen < HELD_SHARE * sharing.bytes_per_s:
        lines.append(
            f"the source could not hold the paced {sharing.bytes_per_s / 1e9:.2f} GB/s: {seen / 1e9:.2f} seen, "
            f"{late:.0%} of the reads late; lower the rate"
        )
    late = run.backend.times.late / max(1, run.backend.times.batches)
    if run.device is not None and late > LATE_SHARE:
        lines.append(
            f"{late:.0%} of the batches took longer than on {run.device.label}: it is faster than this machine"
        )
    return lines


def _latencies(completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """Each request's latencies in seconds, by the engine's own tokens and clock."""
    rows = []
    for completion in completions:
        gaps = sorted(completion.inter_token_s)
        rows.append(
            {
                "request": completion.request,
                "prompt_tokens": completion.prompt_tokens,
                "tokens": len(completion.tokens),
                "ended": completion.ended,
                "first_token_s": completion.first_token_s if completion.tokens else None,
                "inter_token_s_p50": gaps[len(gaps) // 2] if gaps else None,
                "inter_token_s_max": gaps[-1] if gaps else None,
            }
        )
    return rows

"""Print what a trace looks like: shapes, skew, reuse, overlap, stragglers and cache hit rates.

usage: python -m traces.info FILE [steps=N] [seed=N]

  steps=N   lockstep steps of which the second half counts for hit rates and stragglers (default 256)
  seed=N    order in which requests take their places (default 0)

Hit rates: one cache over all layers, its size a share of all experts; the union of the requests' experts at each
(step, layer) is looked up, hits first, and pinned.  hit = resident / needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, UserError
from traces import statistics, stragglers
from traces.command import parse, run, whole_number
from traces.convert import layer_range
from traces.format import Array, Trace
from traces.trace_file import TraceFile

FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
LAGS = (1, 2, 4, 8, 16, 32, 64)
TOGETHER = (1, 2, 4, 8, 12, 16)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    arguments = parse(argv, ("steps", "seed"), positional="file")
    if "file" not in arguments:
        raise UserError("which file? usage: python -m traces.info FILE")
    steps = whole_number(arguments, "steps", least=2) or 256
    seed = whole_number(arguments, "seed", least=0) or 0
    file = TraceFile(arguments["file"])
    trace = file.read(columns=())
    print("\n".join(_shapes(trace, file.columns)))
    able = sum(request.n_decode > 0 for request in trace.requests)
    if not able:
        print("no decode tokens: nothing more to say")
        return 0
    print("\n".join(["", *_popularity(trace), "", *_reuse(trace), *_overlap(trace, able)]))
    print("\n".join(["", *_hit_rates(trace, [b for b in (1, 8) if b <= able], steps, seed)]))
    if able >= stragglers.REQUESTS:
        print("\n".join(["", *_stragglers(trace, steps, seed)]))
    return 0


def _shapes(trace: Trace, columns: Sequence[str]) -> list[str]:
    model = trace.model
    decode = [request.n_decode for request in trace.requests]
    seed = "" if trace.seed is None else f", seed {trace.seed}"
    return [
        f"model      {model.name}: {model.n_layers} MoE layers (layers {layer_range(trace)}) x "
        f"{model.n_experts} experts, top-{model.top_k}",
        f"source     {trace.source}{seed}",
        f"requests   {len(decode)}, decode tokens {min(decode)} to {max(decode)}, {sum(decode)} in all; prefill tokens "
        f"{trace.n_tokens - sum(decode)}",
        f"columns    {', '.join(columns) or 'expert ids only'}",
        f"digest     {trace.digest}",
    ]


def _popularity(trace: Trace) -> list[str]:
    counts = statistics.popularity(trace)
    rows = [
        _row(f"  hottest {fraction:.0%}", _spread(statistics.hottest_share(counts, fraction)))
        for fraction in (0.1, 0.3, 0.5)
    ]
    return [
        "popularity: share of a layer's selections, mean over layers [least, most]",
        *rows,
        _row("  entropy/max", _spread(statistics.relative_entropy(counts))),
        _row("  Gini", _spread(statistics.gini(counts))),
    ]


def _reuse(trace: Trace) -> list[str]:
    found = statistics.reuse(trace, LAGS)
    return [
        "reuse: probability that an expert is used again",
        _row("  steps later", [f"{lag}" for lag in found]),
        _row("  same request", [_number(float(by_layer.mean())) for by_layer in found.values()]),
    ]


def _overlap(trace: Trace, able: int) -> list[str]:
    model = trace.model
    lines = [_row("  random choice", [_number(model.top_k / model.n_experts)])]
    frequency = statistics.inclusion(trace)
    if able > 1:
        lines.append(_row("  other request", [_number(float(statistics.overlap(frequency, model.top_k).mean()))]))
    together = [b for b in TOGETHER if b <= able]
    return [
        *lines,
        "",
        "union: distinct experts of a layer in one step, share of its experts",
        _row("  requests", [f"{b}" for b in together]),
        _row("  union", [_number(statistics.union_share(frequency, b)) for b in together]),
    ]


def _hit_rates(trace: Trace, together: Sequence[int], steps: int, seed: int) -> list[str]:
    # A command is a composition root: the one place of this package that names policies.
    from policies.eviction import LFU, LRU, Belady  # noqa: PLC0415
    from policies.walk import walk  # noqa: PLC0415

    model = trace.model
    lines = []
    for b in together:
        ids = statistics.lockstep(trace, b, steps, seed)
        batches = statistics.batches(ids)
        lines += [
            f"hit rate at concurrency {b}, second half of {len(ids)} steps; - where the union does not fit",
            _row("  cache size", [f"{fraction:.0%}" for fraction in FRACTIONS]),
        ]
        policies: dict[str, Callable[[], EvictionPolicy]] = {
            "LRU": LRU,
            "LFU in_cache": partial(LFU, count="in_cache"),
            "LFU keep": LFU,
            "Belady": partial(Belady, batches),
        }
        for name, policy in policies.items():
            rates = []
            for fraction in FRACTIONS:
                try:
                    warmup = len(ids) // 2 * model.n_layers
                    found = walk(batches, int(fraction * model.n_total), policy(), warmup=warmup)
                    rates.append(_number(found.hit_rate))
                except CapacityError:
                    rates.append("-")
            lines.append(_row(f"  {name}", rates))
    return lines


def _stragglers(trace: Trace, steps: int, seed: int) -> list[str]:
    from policies.eviction import LFU  # noqa: PLC0415

    found = stragglers.straggling(trace, steps, seed, LFU)
    together, size = stragglers.REQUESTS, f"{stragglers.FRACTION:.0%}"
    if found is None:
        return [f"stragglers: the union of {together} requests exceeds a cache of {size}"]
    return [
        f"stragglers: misses of {together} requests at {size}, LFU keep, {stragglers.GROUPS} draws",
        _row("  correlation of lower and upper half of the layers", [_number(float(found["halves"]))]),
        _row("  coefficient of variation of a request's misses", [_number(float(found["variation"]))]),
        _row("  above the mean in layers 0-3, by rank there", [f"{x:+.1f}" for x in np.atleast_1d(found["early"])]),
        _row("  above the mean in all layers, by that rank", [f"{x:+.1f}" for x in np.atleast_1d(found["all"])]),
    ]


def _spread(by_layer: Array) -> list[str]:
    return [_number(float(by_layer.mean())), f"[{_number(float(by_layer.min()))}, {_number(float(by_layer.max()))}]"]


def _number(value: float) -> str:
    return f"{value:.3f}"


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:<16}" + "".join(f"{cell:>8}" if len(cell) < 8 else f"  {cell}" for cell in cells)


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))

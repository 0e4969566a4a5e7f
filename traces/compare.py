"""One table of several traces' routing statistics beside what is known of large trained models.

usage: python -m traces.compare FILE [FILE ...]

The ranges are those of Qwen3-30B and 3.6-35B, Gemma-4-26B, gpt-oss-20b, DeepSeek-V2-Lite and OLMoE (README has the
sources).  Recall: share of a gate's experts among the k that the later gate ranks first on an earlier gate's input,
or on the residual behind it in its own layer's norm.  Misses: of each of four requests in a cache of 30% with LFU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from policies.core.types import UserError
from policies.eviction import LFU
from traces import statistics, stragglers
from traces.command import run
from traces.format import NEXT_NORM_SCORES, NEXT_SCORES, Array, Trace
from traces.trace_file import TraceFile

LAGS = (1, 4, 16, 64)
TOGETHER = 8
STRAGGLING = "misses of lower, upper layers, r"
STRAGGLING_STEPS = 256
RANGES = {
    "hottest 10%": ".20 to .44",
    "hottest 30%": ".45 to .73",
    "hottest 50%": ".65 to .89",
    "entropy / max": ".87 to .98",
    "reuse at lag 1, in k/E": "3.0 to 12",
    "reuse at lag 4, in k/E": "2.2 to 7.7",
    "reuse at lag 16, in k/E": "2.1 to 6.0",
    "reuse at lag 64, in k/E": "1.8 to 5.2",
    "another request, in k/E": "1.4 to 2.9",
    "union of 8, of independent choice": ".85 to .92",
    STRAGGLING: ".60 to .86",
}
"""Popularity of whole workloads; reuse, overlap and misses of single requests' traces."""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    if not argv:
        raise UserError("which files? usage: python -m traces.compare FILE [FILE ...]")
    stems = [Path(path).stem for path in argv]
    names = [path if stems.count(stem) > 1 else stem for path, stem in zip(argv, stems, strict=True)]
    columns = {name: measure(TraceFile(path)) for name, path in zip(names, argv, strict=True)}
    rows = list(dict.fromkeys(name for column in columns.values() for name in column))
    width = max(len(row) for row in rows)
    print(f"{'':<{width}}  {'large models':>13}" + "".join(f"{name[-13:]:>15}" for name in columns))
    for row in rows:
        cells = [column.get(row) for column in columns.values()]
        shown = "".join(f"{'-' if cell is None else f'{cell:.3f}':>15}" for cell in cells)
        print(f"{row:<{width}}  {RANGES.get(row, '-'):>13}{shown}")
    return 0


def measure(file: TraceFile) -> dict[str, float]:
    """The statistics of one trace by name; what its requests or columns do not allow is left out."""
    recorded = [name for name in (*NEXT_SCORES, *NEXT_NORM_SCORES) if name in file.columns]
    trace = file.read(columns=recorded)
    chance = trace.model.top_k / trace.model.n_experts
    counts = statistics.popularity(trace)
    found = {f"hottest {share:.0%}": float(statistics.hottest_share(counts, share).mean()) for share in (0.1, 0.3, 0.5)}
    found["entropy / max"] = float(statistics.relative_entropy(counts).mean())
    for lag, by_layer in statistics.reuse(trace, LAGS).items():
        found[f"reuse at lag {lag}, in k/E"] = float(by_layer.mean()) / chance
    frequency = statistics.inclusion(trace)
    if len(frequency) > 1:
        found["another request, in k/E"] = float(statistics.overlap(frequency, trace.model.top_k).mean()) / chance
    if len(frequency) >= TOGETHER:
        independent = 1 - (1 - chance) ** TOGETHER
        found[f"union of {TOGETHER}, of independent choice"] = statistics.union_share(frequency, TOGETHER) / independent
    if sum(request.n_decode > 0 for request in trace.requests) >= stragglers.REQUESTS:
        hangs_together = stragglers.straggling(trace, STRAGGLING_STEPS, 0, LFU)
        if hangs_together is not None:
            found[STRAGGLING] = float(hangs_together["halves"])
    for names, norm in ((NEXT_SCORES, ""), (NEXT_NORM_SCORES, ", own norm")):
        for distance, name in enumerate(names, 1):
            if name in recorded and distance < trace.model.n_layers:
                found[f"recall of gate l + {distance}{norm}"] = float(recall(trace, name, distance).mean())
    return found


def recall(trace: Trace, column: str, distance: int) -> Array:
    """Mean recall of gate l + ``distance`` by a column of scores at layer l, of decode tokens: [layers - distance]."""
    k, hits, tokens = trace.model.top_k, 0.0, 0
    for request in trace.requests:
        scores = request.columns[column][request.first_decode :, :-distance]
        best = np.argpartition(-scores.astype(np.float32), k - 1, axis=-1)[..., :k]
        true = request.decode[:, distance:]
        hits = hits + (best[..., :, None] == true[..., None, :]).any(-1).mean(-1).sum(0)
        tokens += len(true)
    shares: Array = np.asarray(hits) / tokens
    return shares


if __name__ == "__main__":
    raise SystemExit(run(main, __doc__))

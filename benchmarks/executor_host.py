"""What the host costs in the executor: microseconds a batch that are not torch's own.

    python -m benchmarks.executor_host [rounds=3] [steps=8]

A random model of the demo's shape (24 layers x 32 experts, top-4) with experts of 12 kB, so that neither products nor
reads hide the host; 8 requests, 30% cache, one thread.  Systems take turns in one process; least and median of rounds.

handle       a decision: the journal of the run re-fed to a fresh core, per record
decide       from an event's arrival to the next wait: core, journal's line and submission, per record and per batch
start        submit -> the compute thread takes the batch
notice       the batch is done -> the driver has the event
host a batch decide + start + notice, with the decisions for its fetches; the target is 60 us beyond torch's own time
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from conf.cells import recorded
from executor.compose import settings_of
from executor.interleave import take_turns
from executor.pack import random_source
from executor.pack_writer import write_pack
from executor.run import OpenRun
from policies.build import build_core
from policies.core.journal import read_journal, refeed
from policies.core.types import ModelSpec

SYSTEMS = ("llama_cpp_lfu", "static_4_4", "bevy")
SMALL = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def one_round(pack: Path, steps: int, folder: Path) -> dict[str, dict[str, float]]:
    """Microseconds of each kind by system."""
    fixed = ["concurrency=8", "threads=1", "allow_buffered=true", "workload=chat", "workload.context_tokens=16"]
    overrides = [f"pack={pack}", *fixed, f"steps={50 + steps}", "warmup=50", f"system={','.join(SYSTEMS)}"]
    cells = [recorded(settings) for settings in settings_of(overrides)]
    runs: list[OpenRun] = []
    paths = [folder / f"{i}.jsonl.gz" for i in range(len(cells))]
    with ExitStack() as opened:
        for cell, path in zip(cells, paths, strict=True):
            runs.append(opened.enter_context(OpenRun(cell, path, runs[0].decoder if runs else None)))
        take_turns(runs, lambda: False, lambda: None)
    return {str(run.settings["system"]["name"]): _costs(run, path) for run, path in zip(runs, paths, strict=True)}


def _costs(run: OpenRun, journal: Path) -> dict[str, float]:
    header, records = read_journal(journal)
    every = list(records)
    core = build_core(run.settings, ModelSpec(**header["model"]), run.machine.readers)
    began = time.process_time()
    refeed(core, every)
    handle_s = (time.process_time() - began) / len(every)
    times, clock = run.backend.times, run.clock
    batches = times.batches
    found = {
        "handle": handle_s,
        "decide a record": clock.busy_s / clock.calls,
        "decide a batch": clock.busy_s / batches,
        "start": times.start_s / batches,
        "notice": times.notice_s / batches,
        "host a batch": (clock.busy_s + times.start_s + times.notice_s) / batches,
        "torch a batch": times.compute_s / batches,
    }
    return {name: 1e6 * seconds for name, seconds in found.items()}


def main(arguments: Sequence[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    rounds, steps = int(given.get("rounds", 3)), int(given.get("steps", 8))
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        write_pack(random_source("demo", 0, SMALL), folder / "pack", "bf16")
        found = [one_round(folder / "pack", steps, folder) for _ in range(rounds)]
    print(f"{'us, least (median)':<18}" + "".join(f"{system:>22}" for system in SYSTEMS))
    for kind in found[0][SYSTEMS[0]]:
        values = [[costs[system][kind] for costs in found] for system in SYSTEMS]
        print(f"{kind:<18}" + "".join(f"{min(v):>12.0f} ({statistics.median(v):>6.0f}) " for v in values))


if __name__ == "__main__":
    main(sys.argv[1:])

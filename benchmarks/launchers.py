"""``python -m benchmarks.launchers [cells=4,24] [repeats=3]``: what a launcher costs, local processes beside Ray.

Runs one small sweep with two local worker processes and on a Ray cluster of two one-CPU nodes that it starts and stops
on this machine, in turn, and prints for each

start       seconds until the first cell could run and after the last: the command, its workers, its report
a cell      seconds of wall time that each further cell adds to the sweep
overhead    milliseconds of that which are not the cell's own (``host_wall_s``, two cells at a time)

from the straight line through the two numbers of ``cells``.  The results of both must be equal byte by byte.  Without
Ray (``pip install "hydra-ray-launcher>=1.2.2" "joblib<1.6"``) only the local launcher is timed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.kill_sweep import contents
from policies.core.types import UserError
from traces import command

ROOT = Path(__file__).resolve().parents[1]
SWEEP = ("system=bevy", "model=demo", "workload=demo_chat", "steps=16", "warmup=8", "concurrency=4", "workers=2")
LAUNCHERS: dict[str, tuple[str, ...]] = {"local": (), "ray": ("hydra/launcher=cluster",)}
WORKERS = 2


def main(arguments: list[str]) -> int:
    settings = command.parse(arguments, ("cells", "repeats"))
    numbers = settings.get("cells", "4,24").split(",")
    if len(numbers) != 2:
        raise UserError("cells takes a small number of cells and a larger one, as in cells=4,24")
    few, many = (command.whole_number({"cells": number}, "cells") or 1 for number in numbers)
    if few >= many:
        raise UserError("cells takes a small number of cells and a larger one, as in cells=4,24")
    repeats = command.whole_number(settings, "repeats") or 3
    names = ["local", *(["ray"] if importlib.util.find_spec("ray") and _has_launcher() else [])]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder, _cluster("ray" in names) as environment:
        for repeat in range(repeats):
            results = []
            for name in names:
                (few_s, _, _), (many_s, own_s, files) = (
                    _sweep(name, cells, Path(folder) / f"{name}{cells}_{repeat}", environment) for cells in (few, many)
                )
                a_cell_s = (many_s - few_s) / (many - few)
                found[name].append((few_s - few * a_cell_s, a_cell_s, 1e3 * (a_cell_s - own_s / WORKERS)))
                results.append(files)
            if any(files != results[0] for files in results):
                raise UserError("the launchers' results differ")
    print(f"{'launcher':10s} {'start, s':>18s} {'a cell, s':>20s} {'overhead, ms a cell':>24s}")
    for name, rows in found.items():
        shown = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in zip(*rows, strict=True)]
        print(f"{name:10s} {shown[0]:>18s} {shown[1]:>20s} {shown[2]:>24s}")
    if len(names) > 1:
        print(f"all files of {many} runs, {repeats} times, are equal byte by byte, host timings aside")
    else:
        print("Ray and its Hydra launcher are not installed: only local processes were timed")
    return 0


def _has_launcher() -> bool:
    return importlib.util.find_spec("hydra_plugins.hydra_ray_launcher") is not None


def _sweep(
    launcher: str, cells: int, runs: Path, environment: Mapping[str, str]
) -> tuple[float, float, dict[str, bytes]]:
    """Run so many cells: seconds, a cell's own seconds (mean), and the files of all runs."""
    seeds = ",".join(str(seed) for seed in range(cells))
    words = [*SWEEP, *LAUNCHERS[launcher], f"seed={seeds}", f"runs={runs}", "study=launchers"]
    began_s = time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "sim", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    took_s = time.perf_counter() - began_s
    if process.returncode:
        raise UserError(f"the sweep with {launcher} ended with {process.returncode}: {process.stderr[-500:]}")
    own = [json.loads(path.read_text())["host_wall_s"] for path in runs.rglob("summary.json")]
    return took_s, statistics.fmean(own), contents(runs)


@contextmanager
def _cluster(wanted: bool) -> Iterator[dict[str, str]]:
    """A Ray cluster of two nodes with one CPU each; yields the environment in which a sweep finds it."""
    if not wanted:
        yield dict(os.environ)
        return
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        yield {**os.environ, "RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(command.run(main, f"usage: {__doc__}"))

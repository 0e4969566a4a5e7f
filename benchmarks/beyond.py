"""Beyond the paper: every idea against batching, static groups and Bevy, over a grid of cells, into one table.

    python -m benchmarks.beyond out=beyond.csv [workers=N] [key=LIST ...]

  half=report           requests that the results are taken from; tune: the others, for choosing settings
  routes=LIST           gpt_oss_20b, deepseek_v2_lite (recorded, from traces=), demo, qwen3_6_35b_a3b, gemma4_26b_a4b
  devices=LIST          m6, thor, rtx4090, h200_ram
  cache=LIST            shares of all experts (default 0.1,0.3,0.5,0.7,0.9)
  requests=LIST         that decode together (default 2,8,16)
  seeds=LIST            selections of requests and their first tokens, or generated requests (default 0,1,2)
  systems=LIST          of SYSTEMS
  steps=60 warmup=24    of a run; only whole_s counts the warm-up
  traces=FOLDER         with gpt_oss_20b.parquet and deepseek_v2_lite.parquet (default runs/beyond_traces)

A cell is a route, a device, a cache size, a number of requests and a seed; all systems of a cell decode the same
tokens.  Recorded requests are halved by their numbers, even ones to tune and odd ones to report; where a half has
fewer than decode together, every request is halved by its tokens.  Generated requests have other seeds.
The table is the same whatever the number of workers.  python -m analysis beyond draws it.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from analysis.account import Step, account
from analysis.bounds import optimal_fetches
from conf.cells import resolved
from conf.compose import composing, expand
from conf.devices import DeviceConfig
from conf.models import ModelConfig
from policies.build import build_core, cache_slots
from policies.core.driver import drive
from policies.core.journal import Record
from policies.core.messages import Command, Event
from policies.core.types import CapacityError, UserError
from sim.backend import SimBackend
from traces import command
from traces.format import RequestTrace, Trace
from traces.generate import generate
from traces.presets import preset_for
from traces.routing import TraceRouting
from traces.trace_file import TraceFile
from traces.workload import TraceWorkload

ROUTES = {
    "gpt_oss_20b": "gpt_oss_20b.parquet",
    "deepseek_v2_lite": "deepseek_v2_lite.parquet",
    "demo": "traces/demo/chat.parquet",
    "qwen3_6_35b_a3b": None,
    "gemma4_26b_a4b": None,
}
"""Models, and where their routes come from; None: generated, agentic."""

CONTEXT_TOKENS = 2000
DEVICES = ("m6", "thor", "rtx4090", "h200_ram")
HALVES = ("report", "tune")

SYSTEMS: Mapping[str, Callable[[int], tuple[str, ...]]] = {
    "batch": lambda n: ("system=llama_cpp_lfu",),
    "halves": lambda n: (f"system=static_{(n + 1) // 2}_{n // 2}",),
    "pairs": lambda n: ("system=static_" + "_".join(["2"] * (n // 2) + ["1"] * (n % 2)),),
    "bevy": lambda n: ("system=bevy",),
    "bevy_retention": lambda n: ("system=bevy_retention",),
    "auto_lfu": lambda n: ("system=auto", "cache=lfu"),
    "auto": lambda n: ("system=auto",),
    "bevy_cpu": lambda n: ("system=bevy_cpu",),
}
"""What is compared: the overrides of each system for so many requests.  bevy_cpu: where the device has a CPU."""

KEYS = ("half", "route", "requests", "seed", "cache", "device", "system")
VALUES = ("step_s", "whole_s", "gpu_s", "link_s", "fetches", "optimal_fetches", "group_size", "runahead")
COLUMNS = (*KEYS, *VALUES)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is asked for."""

    half: str
    routes: Sequence[str]
    devices: Sequence[str]
    cache: Sequence[float]
    requests: Sequence[int]
    seeds: Sequence[int]
    systems: Sequence[str]
    steps: int
    warmup: int
    traces: Path

    def tasks(self) -> list[tuple[str, int, int, float]]:
        """(route, requests, seed, cache): seed by seed, and of a seed the long ones first: no worker ends late."""
        order = {"qwen3_6_35b_a3b": 0, "gemma4_26b_a4b": 1, "deepseek_v2_lite": 2, "gpt_oss_20b": 3, "demo": 4}
        found = product(self.routes, self.requests, self.seeds, self.cache)
        return sorted(found, key=lambda task: (task[2], order[task[0]] - 0.2 * task[1], task[3]))


class Memory:
    """Takes a journal's place and keeps the records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.records.append(Record(t_s, tuple(events), tuple(commands)))


@cache
def settings_of(system: str, route: str, requests: int) -> dict[str, Any]:
    """The resolved settings of a system; device and cache size are set by who asks."""
    with composing():
        overrides = (*SYSTEMS[system](requests), f"model={route}", f"concurrency={requests}")
        (point,) = expand(overrides)
    return resolved(point.config)


@cache
def device_of(device: str, route: str) -> DeviceConfig:
    """The device as it serves the model of the route."""
    with composing():
        (point,) = expand(["system=bevy", f"model={route}", f"device={device}"])
    found = resolved(point.config)
    return DeviceConfig.from_config(found["device"], ModelConfig.from_config(found["model"]))


@lru_cache(maxsize=2)
def trace_of(grid_traces: Path, route: str) -> Trace:
    """All recorded requests of a route."""
    file = ROUTES[route]
    assert file is not None
    path = Path(file) if "/" in file else grid_traces / file
    return TraceFile(path).read(columns=())


def requests_of(grid: Grid, route: str, requests: int, seed: int) -> tuple[Trace, int]:
    """The requests of one half, and the decode token at which they begin."""
    if ROUTES[route] is None:
        model = ModelConfig.from_config(settings_of("bevy", route, requests)["model"])
        drawn = seed if grid.half == "report" else 1000 + seed
        return generate(preset_for(route, "agentic"), model.spec, requests, grid.steps, drawn), 0
    trace = trace_of(grid.traces, route)
    parity = 1 if grid.half == "report" else 0
    chosen = [request for place, request in enumerate(trace.requests) if place % 2 == parity]
    if len(chosen) < requests:
        chosen = [_half(request, grid.half == "report") for request in trace.requests]
    room = min(request.n_decode for request in chosen) - grid.steps
    if room < 0:
        raise UserError(f"steps={grid.steps}: the half of {route} has requests of {room + grid.steps} tokens only")
    return replace(trace, requests=tuple(chosen)), room * (seed % 3) // 2


def _half(request: RequestTrace, second: bool) -> RequestTrace:
    decode = request.decode
    middle = len(decode) // 2
    return RequestTrace(request.request, decode[middle:] if second else decode[:middle])


def run_cell(grid: Grid, task: tuple[str, int, int, float]) -> list[dict[str, Any]]:
    """All devices and systems of one task, a row each."""
    route, requests, seed, cache = task
    trace, start = requests_of(grid, route, requests, seed)
    rows = []
    for device, system in product(grid.devices, grid.systems):
        if system == "bevy_cpu" and device_of(device, route).host_times is None:
            continue
        key = dict(zip(KEYS, (grid.half, route, requests, seed, cache, device, system), strict=True))
        try:
            rows.append(key | simulate(grid, key, trace, start))
        except CapacityError:  # not even one request's experts at one layer
            continue
    return rows


def simulate(grid: Grid, key: Mapping[str, Any], trace: Trace, start: int) -> dict[str, Any]:
    """One run, in memory.  ``VALUES`` are means over the steps after the warm-up; ``whole_s`` is over all steps."""
    settings = settings_of(key["system"], key["route"], key["requests"])
    settings = {**settings, "cache": {**settings["cache"], "fraction": key["cache"]}}
    model = ModelConfig.from_config(settings["model"])
    device = device_of(key["device"], key["route"])
    workload = TraceWorkload(
        trace, key["requests"], grid.steps, seed=key["seed"], selection="random", start=start,
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    core = build_core(settings, trace.model, device.fetch_slots, device.host_times)
    memory = Memory()
    backend = SimBackend(model, device, TraceRouting(trace, workload), workload.context_tokens)
    drive(core, workload, backend, journal=memory)  # type: ignore[arg-type]
    steps = account(memory.records)
    measured = steps[grid.warmup :]
    optimum = None
    if key["system"] == grid.systems[0]:
        optimum = optimal_fetches(steps, trace.model, cache_slots(settings, trace.model), grid.warmup)
    whole_s = sum(step.step_s for step in steps) / len(steps)
    return _values(measured, optimum) | {"whole_s": whole_s, "runahead": core.runahead.split(":")[0]}


def _values(steps: Sequence[Step], optimum: Mapping[str, Any] | None) -> dict[str, Any]:
    count = len(steps)
    batches = sum(step.group_sizes.total() for step in steps)
    return {
        "step_s": sum(step.step_s for step in steps) / count,
        "gpu_s": sum(step.busy_both_s + step.gpu_only_s for step in steps) / count,
        "link_s": sum(step.busy_both_s + step.link_only_s for step in steps) / count,
        "fetches": sum(step.demand_fetches for step in steps) / count,
        "optimal_fetches": optimum and optimum["belady_fetches_per_step"],
        "group_size": sum(step.jobs for step in steps) / batches,
    }


def sweep(grid: Grid, workers: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each task, as they are finished."""
    for route, requests, system in product(grid.routes, grid.requests, grid.systems):
        settings_of(system, route, requests)  # composed once, before the workers are forked
    for device, route in product(grid.devices, grid.routes):
        device_of(device, route)
    tasks = [(grid, task) for task in grid.tasks()]
    if workers == 1:
        yield from (run_cell(*task) for task in tasks)
        return
    with get_context("fork").Pool(workers) as pool:
        yield from pool.imap_unordered(_work, tasks)


def _work(task: tuple[Grid, tuple[str, int, int, float]]) -> list[dict[str, Any]]:
    return run_cell(*task)


def write(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """The table, in the order of its keys; whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    with unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for row in sorted(rows, key=lambda row: [row[key] for key in KEYS]):
            table.writerow({key: f"{v:.7g}" if isinstance(v, float) else v for key, v in row.items()})
    os.replace(unfinished, out)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    lists = {"routes": list(ROUTES), "devices": list(DEVICES), "systems": list(SYSTEMS), "half": list(HALVES)}
    given = command.parse(argv, ("out", "workers", "steps", "warmup", "traces", "cache", "requests", "seeds", *lists))
    if "out" not in given:
        raise UserError("out= is missing; usage: python -m benchmarks.beyond out=beyond.csv")
    half, *more = _words(given, "half", "report", lists["half"])
    if more:
        raise UserError("half= takes one of report and tune")
    grid = Grid(
        half=half,
        routes=_words(given, "routes", ",".join(ROUTES), lists["routes"]),
        devices=_words(given, "devices", ",".join(DEVICES), lists["devices"]),
        cache=[float(word) for word in given.get("cache", "0.1,0.3,0.5,0.7,0.9").split(",")],
        requests=[int(word) for word in given.get("requests", "2,8,16").split(",")],
        seeds=[int(word) for word in given.get("seeds", "0,1,2").split(",")],
        systems=_words(given, "systems", ",".join(SYSTEMS), lists["systems"]),
        steps=command.whole_number(given, "steps", 2) or 60,
        warmup=command.whole_number(given, "warmup", 0) or 24,
        traces=Path(given.get("traces", "runs/beyond_traces")),
    )
    began_s = time.perf_counter()
    rows: list[dict[str, Any]] = []
    tasks = len(grid.tasks())
    out = Path(given["out"])
    for done, more_rows in enumerate(sweep(grid, command.whole_number(given, "workers") or os.cpu_count() or 1), 1):
        rows += more_rows
        if done % 4 == 0 or done == tasks:
            write(rows, out)  # what is there stays if the time runs out
            print(f"{done} of {tasks} tasks, {len(rows)} rows, {time.perf_counter() - began_s:.0f} s", flush=True)
    return 0


def _words(given: Mapping[str, str], key: str, default: str, known: Sequence[str]) -> list[str]:
    words = given.get(key, default).split(",")
    for word in words:
        if word not in known:
            raise UserError(f"{key}={word}: expected of {', '.join(known)}")
    return words


if __name__ == "__main__":
    raise SystemExit(command.run(main, __doc__))

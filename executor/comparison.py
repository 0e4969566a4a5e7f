"""The cells of a benchmark on this machine: which take turns, what they share, and whether the machine stood still.

Owns the grouping, the sentinel and what becomes of a group that breaks.  How metrics are computed is given as
``measure``.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conf.cells import cell_name, check, recorded
from executor import host
from executor.calibrate import Setting, calibrate, link_run
from executor.calibrate import describe as describe_profile
from executor.compose import settings_of
from executor.interleave import CHUNK_STEPS, interleave, until
from executor.machine import MemoryPack, set_threads
from executor.model import Decoder
from executor.profile import Calibration, LinkRun, as_seen
from executor.run import Measure, OpenRun, validate
from executor.settings import MachineSettings
from executor.stand_in import describe, stand_in
from executor.store import ExpertStore
from executor.weights import open_decoder
from policies.build import cache_slots
from policies.core.types import UserError

SENTINEL_STEPS = 8
SENTINEL_DRIFT = 0.10
"""If the sentinel's step time moved by more than this share, the cells cannot be compared with each other."""

OF_A_SYSTEM = ("system", "schedule", "prefetch")
"""Settings in which the cells of a group may differ, beside the cache's eviction."""

OF_THE_MACHINE = (
    *("pack", "store", "link", "bytes_per_s", "readers", "fetch_slots", "allow_buffered", "torch_device"),
    *("kernels", "graphs", "threads"),
)
"""Settings that a calibration takes from the cell that it is for."""

BASELINE = "llama_cpp_lfu"
CALIBRATION_STEPS = 4

ONE = ("pack", "torch_device", "threads", "study", "runs")
"""Settings that have one value in a benchmark."""

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turns:
    """Cells that take turns; in everything but the system they are equal."""

    cells: tuple[Cell, ...]

    @property
    def title(self) -> str:
        """The setting in words."""
        cell = self.cells[0]
        machine = MachineSettings.from_settings(cell)
        timing = describe(machine, stand_in(cell, machine))
        cache = cell["cache"]
        size = f"{cache['slots']} slots" if cache["slots"] is not None else f"{cache['fraction']:.0%} cache"
        source = {"disk": "disk", "ram": "host memory"}[machine.store]
        return (
            f"{size}, {cell['concurrency']} requests, {cell['workload']['name']}, experts from {source}, "
            f"link {timing['link']}, batches {timing['batches']}"
        )

    @property
    def folders(self) -> tuple[Path, ...]:
        """The run directory of each cell."""
        return tuple(Path(str(cell["runs"])) / str(cell["study"]) / cell_name(cell) for cell in self.cells)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``done``: groups with the summaries of their cells; ``failed``: title and reason; ``sentinel_s``: first, last."""

    done: tuple[tuple[Turns, tuple[dict[str, Any], ...]], ...]
    failed: tuple[tuple[str, str], ...]
    sentinel_s: tuple[float, float]

    @property
    def drift(self) -> float:
        """The sentinel's last step time over its first."""
        return self.sentinel_s[1] / self.sentinel_s[0]


def plan(overrides: Sequence[str], turns: int, more: Path | None = None) -> list[Turns]:
    """The groups of a command line's cells.  ``turns``: of each system, of ``CHUNK_STEPS`` measured steps.

    Raises UserError for what cannot run or be compared; nothing has started by then.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in settings_of(overrides, more):
        cell["steps"] = cell["warmup"] + turns * CHUNK_STEPS
        check(cell)
        if cell["journal"] is not None or cell["record_trace"] is not None:
            raise UserError("journal= and record_trace= are for single runs; leave them out of a benchmark")
        groups.setdefault(_setting(cell), []).append(cell)
    cells = [cell for group in groups.values() for cell in group]
    for key in ONE:
        if len({str(cell[key]) for cell in cells}) > 1:
            raise UserError(f"{key} has several values; a benchmark is made with one")
    for cell in cells:
        validate(recorded(cell))
    return [Turns(tuple(group)) for group in groups.values()]


def _setting(cell: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in cell.items() if key not in OF_A_SYSTEM}
    return json.dumps({**rest, "cache": [cell["cache"][key] for key in ("fraction", "slots")]}, sort_keys=True)


Ended = Callable[[Turns, Sequence[Mapping[str, Any]], Mapping[str, Any] | None], None]
"""Hears of a group as soon as it has ended: its cells' summaries, and the device profile that predicts it, or None."""


def run_groups(
    groups: Sequence[Turns], *, measure: Measure, seconds: float | None, workload: Sequence[str] | None, ended: Ended
) -> Outcome:
    """Let every group take its turns, between two runs of the first cell alone.

    ``seconds``: how long all but the last sentinel may take; what a group has is its share of what is left, but at
    least a few steps, and if less is left than the shortest took it is left out.  ``workload``: the words that
    choose it, if the machine is to be calibrated with it.  A group that breaks is named and the others go on.
    """
    began_s = time.perf_counter()
    first = groups[0].cells[0]
    with ExitStack() as stack:
        shared, memory = share(groups, stack)
        profiles = Profiles(shared, memory, workload)
        before_s = sentinel_s(first, shared, memory)
        done, failed, took_s = [], [], float("inf")
        for number, group in enumerate(groups):
            begun_s = time.perf_counter()
            left_s = float("inf") if seconds is None else began_s + seconds - begun_s
            place = f"{number + 1} of {len(groups)}"
            if done and left_s < took_s:
                failed.append((group.title, f"left out: {max(0.0, left_s):.0f} s were left of seconds={seconds:.0f}"))
                _say(f"{place} left out: {group.title}")
                continue
            try:
                profiles.measure(group)
            except Exception as error:
                failed.append((group.title, f"not calibrated: {_reason(error)}"))
            try:
                now_s = time.perf_counter()
                left_s, begun_s = left_s - (now_s - begun_s), now_s
                deadline_s = now_s + max(0.0, left_s) / (len(groups) - number)
                stop, on_round = until(deadline_s, group.cells[0]["steps"])
                pairs = list(zip(group.cells, group.folders, strict=True))
                turns = {"stop": stop, "on_round": on_round, "shared": shared, "memory": _memory_of(group, memory)}
                summaries = tuple(interleave(pairs, measure=measure, **turns))
                _release()
                ended(group, summaries, profiles.of(group, summaries))
                done.append((group, summaries))
                took_s = min(took_s, time.perf_counter() - begun_s)
                _say(f"{place} done: {group.title}")
            except Exception as error:
                failed.append((group.title, _reason(error)))
                _say(f"{place} FAILED: {group.title}: {_reason(error)}")
                _release()
        after_s = sentinel_s(first, shared, memory)
    return Outcome(tuple(done), tuple(failed), (before_s, after_s))


class Profiles:
    """Device profiles for the simulator: of the device stood in for, or of this machine, measured once a setting."""

    def __init__(self, shared: Decoder, memory: MemoryPack | None, workload: Sequence[str] | None) -> None:
        """``workload``: the words that choose it; None: this machine is not calibrated."""
        self._shared, self._memory, self._workload = shared, memory, workload
        self._found: dict[tuple[str, ...], tuple[Calibration, LinkRun] | None] = {}  # None: it broke

    def measure(self, group: Turns) -> None:
        """Calibrate this machine for a group, if that is wanted and was not yet done in its setting."""
        cell = group.cells[0]
        machine = MachineSettings.from_settings(cell)
        if self._workload is None or machine.mode != "replay" or stand_in(cell, machine) is not None:
            return
        setting = self._setting(cell, machine)
        key = (*setting.words, str(setting.concurrency))
        if key in self._found:
            return
        setting = replace(setting, predicting=_predicting(group))
        _say(f"calibrating with {setting.concurrency} requests")
        self._found[key] = None
        store = ExpertStore.open(machine.pack)
        found = calibrate(setting, context_tokens=None)
        cache = f"cache.slots={cache_slots(cell, store.spec)}"
        self._found[key] = found, link_run(setting, found, store.spec.n_layers, cache)
        _say(describe_profile(*self._found[key]))
        _release()

    def of(self, group: Turns, summaries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The profile for a group that has run; None where nothing can be predicted."""
        cell = group.cells[0]
        machine = MachineSettings.from_settings(cell)
        if machine.mode != "replay":
            return None
        if stand_in(cell, machine) is not None:
            device: Mapping[str, Any] = cell["device"]
            return device
        setting = self._setting(cell, machine)
        measured = self._found.get((*setting.words, str(setting.concurrency)))
        if measured is None:
            return None
        found, link = measured
        base = next((i for i, each in enumerate(group.cells) if each["system"]["name"] == BASELINE), 0)
        rate = summaries[base]["link_bytes_per_s"]
        rate = found.copy_bytes_per_s or rate or link.bytes_per_s
        batching = group.cells[base]["system"]["name"] == BASELINE
        waited_us = summaries[base]["host_us_per_batch"]["blocked"] if batching else None
        seen = {"bytes_per_s": rate, "readers": machine.readers, "warmup": cell["warmup"], "waited_us": waited_us}
        return as_seen("here", ExpertStore.open(machine.pack), found, link, run=group.folders[base], **seen)

    def _setting(self, cell: Mapping[str, Any], machine: MachineSettings) -> Setting:
        given = {key: getattr(machine, key) for key in OF_THE_MACHINE if getattr(machine, key) is not None}
        words = tuple(
            f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in given.items()
        )
        memory = self._memory if machine.store == "ram" else None
        words += tuple(self._workload or ())
        return Setting(words, int(cell["concurrency"]), CALIBRATION_STEPS, self._shared, memory)


def _predicting(group: Turns) -> str | None:
    """The first system that prefetches by predictions, if any does."""
    names = (str(cell["system"]["name"]) for cell in group.cells if cell["prefetch"].get("predictor"))
    return next(names, None)


def share(groups: Sequence[Turns], stack: ExitStack) -> tuple[Decoder, MemoryPack | None]:
    """What all runs use: the shared weights, and the pack in memory if any run fetches from there."""
    machines = [MachineSettings.from_settings(cell) for group in groups for cell in group.cells]
    store = ExpertStore.open(machines[0].pack)
    set_threads(machines[0].threads)
    shared = open_decoder(store, 1, 2, machines[0].torch_device)
    shared.check_rows()
    if all(machine.store == "disk" for machine in machines):
        return shared, None
    pinned = machines[0].torch_device == "cuda"
    return shared, stack.enter_context(closing(MemoryPack(store, pinned=pinned)))


def _memory_of(group: Turns, memory: MemoryPack | None) -> MemoryPack | None:
    return memory if group.cells[0]["store"] == "ram" else None


def sentinel_s(cell: Cell, shared: Decoder, memory: MemoryPack | None) -> float:
    """Seconds a step of ``cell``, alone."""
    steps = {"steps": cell["warmup"] + SENTINEL_STEPS}
    memory = memory if cell["store"] == "ram" else None
    with tempfile.TemporaryDirectory() as folder:
        run = OpenRun(recorded({**cell, **steps}), Path(folder) / "journal.jsonl.gz", shared, memory)
        with run:
            run.decode(max(0, int(cell["warmup"]) - run.steps))
            before_s = run.clock.now()
            count = run.decode(SENTINEL_STEPS)
            took_s = run.clock.now() - before_s
    _release()
    if not count:
        raise UserError("the sentinel decoded no step: the workload ends within the warm-up; give it more steps")
    return took_s / count


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _release() -> None:
    """Give device memory back: the next group's caches have other sizes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def record(outcome: Outcome, arguments: Sequence[str]) -> dict[str, Any]:
    """What ``bench.json`` beside the run directories says."""
    return {
        "command": list(arguments),
        "machine": host.versions(),
        "load_average": host.load_average(),
        "sentinel_step_s": list(outcome.sentinel_s),
        "sentinel_drift": outcome.drift,
        "groups": [
            {"title": group.title, "runs": [folder.name for folder in group.folders]} for group, _ in outcome.done
        ],
        "failed": [{"title": title, "reason": reason} for title, reason in outcome.failed],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

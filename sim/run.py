"""One simulated run: from resolved settings to the files of a run directory.

Owns the composition of model, device, workload, core, backend and journal, and the summary.  The metrics are
computed by whoever is given as ``measure``, who hears the journal's records: their analysis is not this world's
business.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from conf import rundir
from conf.devices import DeviceConfig
from conf.models import ModelConfig
from policies.build import build_core, build_predictor, cache_slots
from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.journal import Journal
from policies.core.messages import Command, Compute, Event, Fetch, StepBegin
from policies.core.types import ExpertId, ModelSpec
from sim.backend import SimBackend
from sim.charge import charge
from traces.calibration import require_columns
from traces.load import load_workload


class Meter(Protocol):
    """Measures one run: hears every record of its journal, then writes what it found."""

    @property
    def record(self) -> Callable[[float, Sequence[Event], Sequence[Command]], None]:
        """``record(t_s, events, commands)``."""
        ...

    def write(self, folder: Path, settings: Mapping[str, Any], model: ModelSpec, /) -> dict[str, Any]:
        """Write ``steps.parquet`` and return the metrics of the summary."""
        ...


def validate(settings: Mapping[str, Any]) -> None:
    """Build everything of a run that is built quickly.  Raises UserError where ``simulate`` would."""
    model = ModelConfig.from_config(settings["model"])
    device = DeviceConfig.from_config(settings["device"], model)
    build_core(settings, model.spec, device.fetch_slots, device.host_times)
    require_columns(settings, build_predictor(settings, model.spec))
    if settings["workload"].get("kind") == "trace":
        keys = ("model", "workload", "concurrency", "steps", "seed")
        _read_trace(json.dumps({key: settings[key] for key in keys}))


@lru_cache(maxsize=8)
def _read_trace(settings: str) -> None:
    """Load a recorded workload once for all systems that are to run on it.  Raises UserError if it does not fit."""
    config = json.loads(settings)
    load_workload(config, ModelConfig.from_config(config["model"]).spec)


def simulate(settings: Mapping[str, Any], folder: Path, progress: bool, *, measure: Callable[[], Meter]) -> None:
    """Run one cell; writes ``journal.jsonl.gz``, ``steps.parquet`` and ``summary.json`` into ``folder``.

    ``progress``: a bar over the steps, if standard error is a terminal.  Raises UserError for bad settings.
    """
    began_s = time.perf_counter()
    model = ModelConfig.from_config(settings["model"])
    device = DeviceConfig.from_config(settings["device"], model)
    predictor = build_predictor(settings, model.spec)
    loaded = load_workload(settings, model.spec, predictor)
    settings, device, paid = charge(settings, device, model, loaded.model, predictor)
    core = build_core(settings, loaded.model, device.fetch_slots, device.host_times)
    backend = SimBackend(model, device, loaded.routing, loaded.workload.context_tokens, jobs_in=core.jobs_in)
    header = {"config": dict(settings), "model": asdict(loaded.model), "trace": loaded.digest}
    with tqdm(total=settings["steps"], unit="step", disable=None if progress else True) as bar:
        meter = measure()
        kind = MeteredJournal if bar.disable else CountingJournal
        with kind(folder / "journal.jsonl.gz", header, meter) as journal, _collector_paused():
            steps = StepCounter(bar, journal)
            drive(core, loaded.workload, backend, journal=journal, check=settings["check"], on_step=steps)
    simulated_s = time.perf_counter() - began_s
    metrics = meter.write(folder, settings, loaded.model)
    slots = cache_slots(settings, loaded.model)
    requested = {"steps": settings["steps"], "cache_fraction": settings["cache"]["fraction"], "runahead": "on"}
    effective = {"steps": steps.count, "cache_fraction": slots / loaded.model.n_total, "runahead": core.runahead}
    differ = [key for key in requested if requested[key] != effective[key] and effective[key] != "not used"]
    summary = {
        "backend": "sim",
        **{group: settings[group]["name"] for group in ("system", "model", "device", "workload")},
        **{key: settings[key] for key in ("concurrency", "steps", "warmup", "seed")},
        "cache_fraction": effective["cache_fraction"],
        "cache_slots": slots,
        "runahead": core.runahead,
        "layers_in_waves": core.layers_in_waves,
        "requested": {key: requested[key] for key in differ},
        "effective": {key: effective[key] for key in differ},
        "device_constants": device.describe(),
        "routing": loaded.describe,
        "predictor": paid,
        **metrics,
        "warnings": [
            *_warnings(core, steps.count, settings["steps"]),
            *loaded.warnings,
            *metrics["warnings"],
            *device.warnings(),
        ],
        "host_wall_s": time.perf_counter() - began_s,
        "host_modelled_per_wall": backend.now() / simulated_s,
        "host_peak_rss_bytes": peak_rss_bytes(),
    }
    rundir.write_json(folder / "summary.json", summary)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Nothing that a run makes refers to itself, and to look for that again and again takes 3 to 8% of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _warnings(core: DecisionCore, steps: int, requested_steps: int) -> list[str]:
    lines = []
    if core.runahead.startswith("off"):
        lines.append(f"runahead {core.runahead}")
    if core.layers_in_waves:
        lines.append(
            f"the experts of a layer exceeded the cache {core.layers_in_waves} times: the requests passed it in waves"
        )
    if steps < requested_steps:
        lines.append(f"the workload ended after {steps} of {requested_steps} steps")
    return lines


class MeteredJournal(Journal):
    """A journal whose records are measured as they are written, so that nobody has to read them again."""

    def __init__(self, path: Path, header: dict[str, Any], meter: Meter) -> None:
        super().__init__(path, header)
        self._measure = meter.record

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Append one ``handle``."""
        super().record(t_s, events, commands)
        self._measure(t_s, events, commands)


class CountingJournal(MeteredJournal):
    """A journal that counts along for the bar: fetches, and the distinct experts of each step."""

    def __init__(self, path: Path, header: dict[str, Any], meter: Meter) -> None:
        super().__init__(path, header, meter)
        self.fetches = 0
        self.distinct = 0
        self._of_step: set[ExpertId] = set()

    def record(self, t_s: float, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Append one ``handle`` and count it."""
        super().record(t_s, events, commands)
        if isinstance(events[0], StepBegin):
            self._of_step.clear()
        for command in commands:
            if isinstance(command, Fetch):
                self.fetches += 1
            elif isinstance(command, Compute):
                before = len(self._of_step)
                self._of_step.update(command.experts)
                self.distinct += len(self._of_step) - before


class StepCounter:
    """Counts finished steps, and tells the bar."""

    def __init__(self, bar: tqdm[Any], journal: Journal) -> None:
        self.count = 0
        self._tokens = 0
        self._bar = bar
        self._journal = journal

    def __call__(self, begin: StepBegin, ended_s: float) -> None:
        """One step of ``begin.requests`` ended at ``ended_s``."""
        self.count += 1
        self._tokens += len(begin.requests)
        if isinstance(self._journal, CountingJournal):
            hits = 1 - self._journal.fetches / self._journal.distinct
            shown = {"tokens/s": f"{self._tokens / ended_s:.1f}", "hit rate": f"{hits:.1%}"}
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()


def peak_rss_bytes() -> int:
    """The most memory that this process has used so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB

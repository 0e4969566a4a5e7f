"""From this machine and a pack to a device profile for the simulator: ``python -m executor.calibrate``.

Owns which runs are made and what of them goes into the profile.  Job times come from the journals of real runs,
so the profile holds what a run meets: products, attention, queues and the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.sharing import DriverSharing
from executor.compose import settings_of
from executor.driver_fit import driver_run, fit_driver, fit_gpu
from executor.job_fit import JobFit, JobSample, contention, fit_jobs
from executor.link_curve import LinkPoint, check_rate, measure_curve, memory_bytes_per_s, pcie_bytes_per_s
from executor.machine import MemoryPack, set_threads
from executor.model import Decoder
from executor.profile import Calibration, LinkRun, profile, write_profile
from executor.settings import MachineSettings
from executor.short_run import ShortRun, short_runs
from executor.sources import DiskSource
from executor.store import ExpertStore
from policies.core.types import UserError
from traces import command

USAGE = """\
python -m executor.calibrate pack=DIR out=DIR [name=NAME] [concurrency=8] [steps=6] [context_tokens=256]
                             [readers=8] [bytes_per_s=RATE] [allow_buffered=true]

Measures this machine with a pack and writes a device profile and the pack's model for the simulator:

  out/device/NAME.yaml   link by size and readers, job time by experts and requests, clocks, versions, spread
  out/model/MODEL.yaml

  python -m sim --config-dir out device=NAME model=MODEL concurrency=8

  bytes_per_s   the link paced to this rate, instead of as fast as it goes
"""

MISSING_FRACTION = 0.3
"""A cache in which experts are missing."""

MEMORY_SHARE = 0.8
"""Of a device's free memory that the caches of runs in turns take."""


def systems(concurrency: int) -> tuple[str, ...]:
    """Groups of all, of two and of one: what job times are fitted to."""
    pairs = [2] * (concurrency // 2) + [1] * (concurrency % 2)
    groupings = ("static_" + "_".join(map(str, sizes)) for sizes in (pairs, [1] * concurrency))
    return tuple(dict.fromkeys(("llama_cpp_lfu", *groupings)))


@dataclass(frozen=True, slots=True)
class Setting:
    """What is calibrated.

    ``words``: pack, workload and the machine's settings.  ``shared``, ``memory``: as for ``OpenRun``.
    ``predicting``: a system that prefetches by predictions, if the driver's time for them is to be known.
    """

    words: tuple[str, ...]
    concurrency: int
    steps: int
    shared: Decoder | None = None
    memory: MemoryPack | None = None
    predicting: str | None = None

    def runs(self, *each: Sequence[str], shared: Decoder | None = None, time_experts: bool = False) -> list[ShortRun]:
        """A few steps of each, in turns; ``each``: the system and its cache."""
        own = (*self.words, f"concurrency={self.concurrency}")
        words = [(*own, *more) for more in each]
        return short_runs(words, self.steps, shared or self.shared, self.memory, time_experts=time_experts)


def calibrate(setting: Setting, *, context_tokens: int | None) -> Calibration:
    """Measure link and job times.  ``context_tokens``: of the requests, for the record; None: they differ.

    Raises UserError if a figure is above a physical limit, or the runs cannot be made.
    """
    (settings,) = settings_of([*setting.words, "system=llama_cpp_lfu"])
    machine = MachineSettings.from_settings(settings)
    store = ExpertStore.open(machine.pack)
    memory, pcie = memory_bytes_per_s(machine.torch_device), pcie_bytes_per_s(store.experts_path)
    curve = _disk_curve(store, pcie) if machine.store == "disk" else []
    jobs = (_jobs_beside_driver if machine.kernels == "triton" else _jobs)(setting, store, machine.torch_device)
    if jobs.fit.expert_s > 0 and machine.kernels != "triton":
        rate = store.expert_bytes / jobs.fit.expert_s
        check_rate("an expert's products", rate, [("this machine's memory rate", memory)])
    more = (jobs.clocks, context_tokens, jobs.driver, jobs.copy_bytes_per_s)
    return Calibration(tuple(curve), jobs.fit, jobs.samples, memory, pcie, *more)


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What runs of several groupings showed."""

    fit: JobFit
    samples: tuple[JobSample, ...]
    clocks: Mapping[str, Any] | None
    driver: DriverSharing | None = None
    copy_bytes_per_s: float | None = None


def _jobs(setting: Setting, store: ExpertStore, device: str) -> _Jobs:
    """From batches of all requests, of two and of one, with every expert at hand if the device holds them."""
    runs: list[ShortRun] = []
    for system in systems(setting.concurrency):
        where = (f"system={system}", f"cache.fraction={_fitting(store, _free_bytes(device) / 2)}", "settle=1")
        runs += setting.runs(where, shared=runs[0].decoder if runs else None, time_experts=True)
    samples = tuple(sample for run in runs for sample in run.samples)
    experts_s = [run.expert_s for run in runs if run.expert_s is not None]
    fit = fit_jobs(samples, store.spec.n_layers, float(np.median(experts_s)) if experts_s else None)
    return _Jobs(fit, samples, runs[-1].clocks)


def _jobs_beside_driver(setting: Setting, store: ExpertStore, device: str) -> _Jobs:
    """Where the driver launches batches itself: its own time beside the GPU's, from runs that take turns.

    With every expert at hand (if the device holds so many caches): batches of one job of all requests, of two and of
    one, and of a job for each request.  With experts missing: what a read and, if a system makes any, a prediction
    cost.
    """
    count = setting.concurrency
    grouped = systems(count)
    units: list[int | None] = [1, -(-count // 2), count][: len(grouped)]
    quiet = [*zip(grouped, units, strict=True), ("bevy", None)]
    missing = [(grouped[0], 1), *([(setting.predicting, 1)] if setting.predicting else [])]
    enough = min(1.0, max(MISSING_FRACTION, 2 * count * store.spec.top_k / store.n_total))
    whole = _fitting(store, MEMORY_SHARE * _free_bytes(device) / (len(quiet) + len(missing) * enough))
    caches = [whole] * len(quiet) + [enough] * len(missing)
    names, own_units = zip(*quiet, *missing, strict=True)
    words = [(f"system={name}", f"cache.fraction={c}", "settle=4") for name, c in zip(names, caches, strict=True)]
    runs = setting.runs(*words)
    drivers = [
        driver_run(run.records, run.samples, run.waited_s or 0.0, own) for run, own in zip(runs, own_units, strict=True)
    ]
    driver = fit_driver(drivers)
    resident = [run.samples for run in runs[: len(quiet)]]
    fit = fit_gpu(resident, drivers[: len(quiet)], driver)
    samples = tuple(sample for each in resident for sample in each)
    return _Jobs(fit, samples, runs[-1].clocks, driver, runs[-1].copy_bytes_per_s)


def _disk_curve(store: ExpertStore, pcie: float | None) -> list[LinkPoint]:
    with contextlib.closing(DiskSource(store)) as source:
        direct = source.mode.measures_disk
    limits = [("the drive's PCIe link", pcie), ("this machine's memory rate", memory_bytes_per_s())]
    curve = measure_curve(store, direct=direct)
    for point in curve:
        check_rate(f"reading with {point.readers} readers", point.bytes_per_s, limits)
    return curve


def link_run(setting: Setting, found: Calibration, n_layers: int, *more: str) -> LinkRun:
    """Bevy over the link for a few steps: the rate that it sees, and how much reading slows computing.

    Where the driver copies itself the rate is that of copies alone, and where it launches batches itself reading slows
    none of them: what is lost in a run is the driver's time.
    """
    if found.copy_bytes_per_s is not None:
        return LinkRun(found.copy_bytes_per_s, 1.0, True)
    (run,) = setting.runs((*more, "system=bevy"))
    in_order = "link=paced" in (*setting.words, *more) or {"store=ram", "torch_device=cuda"} <= set(setting.words)
    slower = contention(run.samples, found.fit, n_layers) if found.driver is None else 1.0
    return LinkRun(run.bytes_per_s, slower, in_order)


def _free_bytes(device: str) -> float:
    try:
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        return free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 4 << 30


def _fitting(store: ExpertStore, n_bytes: float) -> float:
    """The largest cache of so many bytes, as a share of all experts."""
    return round(min(1.0, max(n_bytes / (store.n_total * store.stride), 2 * store.spec.top_k / store.n_total)), 4)


def run(arguments: Sequence[str]) -> int:
    """The command, with its arguments; raises instead of exiting."""
    keys = ("pack", "out", "name", "concurrency", "steps", "context_tokens", "readers", "bytes_per_s", "allow_buffered")
    given = command.parse(arguments, keys)
    for key in ("pack", "out"):
        if key not in given:
            raise UserError(f"{key}= is missing; --help shows the usage")
    counts = {"concurrency": 8, "steps": 6, "context_tokens": 256, "readers": 8}
    counts |= {key: command.whole_number(given, key) or default for key, default in counts.items()}
    name = given.get("name", "calibrated")
    buffered = command.flag(given, "allow_buffered")
    store = ExpertStore.open(given["pack"])
    set_threads(None)
    concurrency, context = counts["concurrency"], counts["context_tokens"]
    words = [f"pack={given['pack']}", "workload=chat", f"workload.context_tokens={context}"]
    words += [f"readers={counts['readers']}", f"allow_buffered={str(buffered).lower()}"]
    words += [f"threads={torch.get_num_threads()}"]
    pace = [f"bytes_per_s={given['bytes_per_s']}", "link=paced"] if "bytes_per_s" in given else []
    setting = Setting(tuple(words), concurrency, counts["steps"])
    found = calibrate(setting, context_tokens=context)
    link = link_run(setting, found, store.spec.n_layers, *pace)
    node = profile(name, store, found, link, readers=counts["readers"])
    device, model = write_profile(Path(given["out"]), store, node)
    print(describe(found, link))
    print(f"{device}\n{model}")
    print(f"python -m sim --config-dir {given['out']} device={name} model={model.stem} concurrency={concurrency}")
    return 0


def describe(found: Calibration, link: LinkRun) -> str:
    """The profile in three lines, or four where the driver has constants of its own."""
    fit = found.fit
    best = max(found.curve, key=lambda point: point.bytes_per_s, default=None)
    alone = (
        f"{best.bytes_per_s / 1e9:.2f} GB/s ({best.readers} readers of {best.size_bytes / 1e6:.2f} MB)" if best else "-"
    )
    job = " + ".join(
        f"{1e3 * seconds:.3f} ms{what}"
        for seconds, what in ((fit.layer_s, ""), (fit.expert_s, " an expert"), (fit.request_s, " a request"))
    )
    seen = f"in a run of Bevy; alone at most {alone}" if found.copy_bytes_per_s is None else "in copies alone"
    own = found.driver
    driver = (
        []
        if own is None
        else [
            f"  driver {1e6 * own.batch_s:.0f} us a batch + {1e6 * own.job_s:.0f} a job + {1e6 * own.request_s:.0f} a "
            f"request + {1e6 * own.prediction_s:.0f} a request with predictions + {1e6 * own.fetch_s:.0f} a read"
        ]
    )
    return "\n".join(
        [
            f"  link   {link.bytes_per_s / 1e9:.2f} GB/s {seen}",
            f"  job    {job}; head {1e3 * fit.head_s:.2f} ms; spread {fit.spread:.0%} over {fit.samples} jobs",
            f"  beside a read a job takes {link.contention:.2f} times as long",
            *driver,
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, 2 for bad input or a figure above a physical limit, 130 if interrupted."""
    return command.run(run, USAGE, arguments, "nothing was written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

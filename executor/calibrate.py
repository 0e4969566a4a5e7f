"""From this machine and a pack to a device profile for the simulator: ``python -m executor.calibrate``.

Owns which runs are made and what of them goes into the profile.  Job times come from the journals of real runs,
so the profile holds what a run meets: products, attention, queues and the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.cells import recorded
from executor import host
from executor.compose import settings_of
from executor.driver_fit import DriverRun, driver_run, fit_driver, fit_gpu
from executor.experts import add_experts
from executor.job_fit import JobSample, contention, fit_jobs, job_samples
from executor.link_curve import LinkPoint, check_rate, measure_curve, memory_bytes_per_s, pcie_bytes_per_s
from executor.machine import MemoryPack, set_threads
from executor.model import Decoder
from executor.profile import Calibration, LinkRun, profile, write_profile
from executor.run import OpenRun
from executor.settings import MachineSettings
from executor.sources import DiskSource
from executor.store import ExpertStore
from policies.core.journal import Record, read_journal
from policies.core.messages import Fetch, FetchDone, StepBegin
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

WARMUP = 48
"""Steps that fill the cache before a short run, all but ``settle`` of them in the core alone."""


def systems(concurrency: int) -> tuple[str, ...]:
    """Groups of all, of two and of one: what job times are fitted to."""
    pairs = [2] * (concurrency // 2) + [1] * (concurrency % 2)
    groupings = ("static_" + "_".join(map(str, sizes)) for sizes in (pairs, [1] * concurrency))
    return tuple(dict.fromkeys(("llama_cpp_lfu", *groupings)))


@dataclass(frozen=True, slots=True)
class ShortRun:
    """A few steps of one system, seen through its journal; seconds and bytes are sums over ``steps`` real steps.

    ``copy_bytes_per_s``: of copies from host memory alone, and ``driver``: where the driver launches and copies itself.
    """

    samples: list[JobSample]
    steps: int
    step_s: float
    fetched_bytes: int
    link_busy_s: float
    expert_s: float | None
    copy_bytes_per_s: float | None
    decoder: Decoder
    clocks: dict[str, Any] | None
    driver: DriverRun | None

    @property
    def compute_s(self) -> float:
        """Time in batches."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def bytes_per_s(self) -> float:
        """What the link gave while it was busy."""
        return self.fetched_bytes / self.link_busy_s if self.link_busy_s else 0.0


def short_run(
    overrides: Sequence[str],
    steps: int,
    shared: Decoder | None = None,
    time_experts: bool = False,
    memory: MemoryPack | None = None,
) -> ShortRun:
    """Run one system for ``steps`` steps after a warm-up.  Raises UserError if its reads were no device's.

    ``time_experts``: then also time single experts in its slots, where torch computes them.
    """
    (settings,) = settings_of([*overrides, f"steps={WARMUP + steps}", f"warmup={WARMUP}"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl.gz"
        with OpenRun(recorded(settings), path, shared, memory) as run:
            run.decode()
            alone_s = expert_seconds(run) if time_experts and run.fast is None else None
            copies = copy_bytes_per_s(run) if run.link.poll is not None else None
        records = [record for record in read_journal(path)[1] if record.t_s > 0]
    invalid = host.why_invalid(run.meter, run.link.mode.measures_disk) if run.machine.store == "disk" else []
    if invalid and not run.machine.allow_buffered:
        raise UserError(f"the calibration is invalid: {invalid[0]}")
    begins = [r.t_s for r in records if isinstance(r.events[0], StepBegin)]
    samples, waited_s = job_samples(records), run.backend.times.blocked_s
    return ShortRun(
        samples=samples,
        steps=len(begins),
        step_s=records[-1].t_s - begins[0],
        fetched_bytes=sum(isinstance(c, Fetch) for r in records for c in r.commands) * run.store.stride,
        link_busy_s=_link_busy_s(records),
        expert_s=alone_s,
        copy_bytes_per_s=copies,
        decoder=run.decoder,
        clocks=run.clocks.describe(),
        driver=driver_run(records, samples, waited_s) if run.fast is not None else None,
    )


def expert_seconds(run: OpenRun, at_once: int = 16, most: int = 256) -> float:
    """Seconds that one more expert adds to a job: gather, products and sum over one tile, weights read from memory."""
    decoder, weights = run.decoder, run.slots.weights
    slots = [entry.slot for entry in run.core.cache.entries.values()][:most]
    rows = decoder.tile
    x = torch.randn(rows + 1, decoder.hidden, device=decoder.device).to(decoder.dtype)
    out = torch.zeros(rows + 1, decoder.hidden, device=decoder.device)
    mix = torch.full((rows + 1, at_once), 0.1, device=decoder.device)
    users = {number: list(range(rows)) for number in range(at_once)}

    def timed(chunk: Sequence[int]) -> float:
        began = time.perf_counter()
        add_experts(
            out,
            x,
            mix,
            users,
            weights_of=lambda number: weights(chunk[number]),
            activation=decoder.activation,
            tile=decoder.tile,
        )
        if decoder.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    chunks = [slots[i : i + at_once] for i in range(0, len(slots) - at_once + 1, at_once)]
    if not chunks:
        raise UserError(f"the cache holds {len(slots)} experts, calibration needs {at_once}; use a larger one")
    times = run.backend.call(lambda: [timed(chunk) for chunk in chunks])
    return float(np.median(times)) / at_once


def copy_bytes_per_s(run: OpenRun, most: int = 512) -> float:
    """Rate of copies of cached experts into the slots in which they lie, queued one behind the other."""
    residents = {expert: entry.slot for expert, entry in list(run.core.cache.entries.items())[:most]}
    began_s = time.perf_counter()
    run.backend.read(residents)
    for expert in residents:
        run.backend.landed(expert)
    return len(residents) * run.store.stride / (time.perf_counter() - began_s)


def _link_busy_s(records: Sequence[Record]) -> float:
    flying: set[int] = set()
    busy_s, last_s = 0.0, records[0].t_s
    for record in records:
        busy_s += (record.t_s - last_s) * bool(flying)
        last_s = record.t_s
        flying -= {event.fetch for event in record.events if isinstance(event, FetchDone)}
        flying |= {command.fetch for command in record.commands if isinstance(command, Fetch)}
    return busy_s


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

    def run(self, *more: str, shared: Decoder | None = None, time_experts: bool = False) -> ShortRun:
        """A few steps; ``more``: the system and its cache."""
        words = [*self.words, f"concurrency={self.concurrency}", *more]
        return short_run(words, self.steps, shared or self.shared, time_experts, self.memory)


def calibrate(setting: Setting, *, context_tokens: int | None) -> Calibration:
    """Measure link and job times.  ``context_tokens``: of the requests, for the record; None: they differ.

    Raises UserError if a figure is above a physical limit, or the runs cannot be made.
    """
    (settings,) = settings_of([*setting.words, "system=llama_cpp_lfu"])
    machine = MachineSettings.from_settings(settings)
    store = ExpertStore.open(machine.pack)
    runs: list[ShortRun] = []
    shared = setting.shared
    for system in systems(setting.concurrency):
        where = (f"cache.fraction={_fitting(store, machine.torch_device)}", "settle=1")
        runs.append(setting.run(f"system={system}", *where, shared=shared, time_experts=True))
        shared = runs[-1].decoder
    samples = [sample for run in runs for sample in run.samples]
    experts_s = [run.expert_s for run in runs if run.expert_s is not None]
    memory = memory_bytes_per_s(machine.torch_device)
    drivers = [run.driver for run in runs if run.driver is not None]
    driver = copies = None
    if drivers:
        missing = _missing(setting, store, shared)
        driver = fit_driver([*drivers, *(run.driver for run in missing if run.driver is not None)])
        fit = fit_gpu([run.samples for run in runs], drivers, driver)
        copies = missing[0].copy_bytes_per_s
    else:
        fit = fit_jobs(samples, store.spec.n_layers, float(np.median(experts_s)) if experts_s else None)
    if experts_s and fit.expert_s > 0:
        check_rate("an expert's products", store.expert_bytes / fit.expert_s, [("this machine's memory rate", memory)])
    pcie = pcie_bytes_per_s(store.experts_path)
    curve = _disk_curve(store, pcie) if machine.store == "disk" else []
    clocks = runs[-1].clocks
    return Calibration(tuple(curve), fit, tuple(samples), memory, pcie, clocks, context_tokens, driver, copies)


def _missing(setting: Setting, store: ExpertStore, shared: Decoder | None) -> list[ShortRun]:
    """Runs that read: what a read and a prediction cost the driver."""
    needed = setting.concurrency * store.spec.top_k
    where = (f"cache.fraction={max(MISSING_FRACTION, 2 * needed / store.n_total)}", "settle=4")
    chosen = [systems(setting.concurrency)[0], systems(setting.concurrency)[-1], setting.predicting]
    return [setting.run(f"system={system}", *where, shared=shared) for system in chosen if system is not None]


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

    Where the driver copies itself the rate is that of copies alone: what it loses in a run is the driver's time.
    """
    if found.copy_bytes_per_s is not None:
        return LinkRun(found.copy_bytes_per_s, 1.0, True)
    run = setting.run(*more, "system=bevy")
    in_order = "link=paced" in (*setting.words, *more) or {"store=ram", "torch_device=cuda"} <= set(setting.words)
    return LinkRun(run.bytes_per_s, contention(run.samples, found.fit, n_layers), in_order)


def _fitting(store: ExpertStore, device: str) -> float:
    """The largest cache that takes up to half of the device's memory that is free."""
    try:
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
        free = free or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        free = 4 << 30
    return round(min(1.0, max(free / 2 / (store.n_total * store.stride), 2 * store.spec.top_k / store.n_total)), 4)


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
    own = found.driver
    driver = (
        []
        if own is None
        else [
            f"  driver {1e6 * own.batch_s:.0f} us a batch + {1e6 * own.request_s:.0f} a request "
            f"+ {1e6 * own.prediction_s:.0f} a request with predictions + {1e6 * own.fetch_s:.0f} a read"
        ]
    )
    return "\n".join(
        [
            f"  link   {link.bytes_per_s / 1e9:.2f} GB/s in a run of Bevy; alone at most {alone}",
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

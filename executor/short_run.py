"""A few steps of a system on this machine, for what a calibration reads from them.

Owns how such runs are made: alone, or in turns of a step so that what changes in seconds meets all of them alike.
Knows no profile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conf.cells import recorded
from executor import host
from executor.compose import settings_of
from executor.driver_fit import from_step
from executor.experts import add_experts
from executor.job_fit import JobSample, job_samples
from executor.machine import MemoryPack
from executor.model import Decoder
from executor.run import OpenRun
from policies.core.journal import Record, read_journal
from policies.core.messages import Fetch, FetchDone, StepBegin
from policies.core.types import UserError

WARMUP = 48
"""Steps that fill the cache before a short run, all but ``settle`` of them in the core alone."""


@dataclass(frozen=True, slots=True)
class ShortRun:
    """A few steps of one system, seen through its journal; seconds and bytes are sums over ``steps`` real steps.

    ``expert_s``: of one expert alone, if it was timed; ``copy_bytes_per_s``: of copies from host memory alone, and
    ``waited_s``: how long the driver had nothing to do, where it copies and launches itself.  None elsewhere.
    """

    records: Sequence[Record]
    samples: list[JobSample]
    steps: int
    step_s: float
    fetched_bytes: int
    link_busy_s: float
    expert_s: float | None
    copy_bytes_per_s: float | None
    waited_s: float | None
    decoder: Decoder
    clocks: dict[str, Any] | None

    @property
    def compute_s(self) -> float:
        """Time in batches."""
        return sum(sample.seconds for sample in self.samples)

    @property
    def bytes_per_s(self) -> float:
        """What the link gave while it was busy."""
        return self.fetched_bytes / self.link_busy_s if self.link_busy_s else 0.0


def short_runs(
    each: Sequence[Sequence[str]],
    steps: int,
    shared: Decoder | None = None,
    memory: MemoryPack | None = None,
    *,
    time_experts: bool = False,
) -> list[ShortRun]:
    """Run these systems (their settings' words) for ``steps`` steps each after a warm-up, taking turns.

    ``time_experts``: then also time single experts in their slots, where torch computes them.
    Raises UserError if their reads were no device's.
    """
    runs: list[OpenRun] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"journal{number}.jsonl.gz" for number in range(len(each))]
        with ExitStack() as stack:
            for words, path in zip(each, paths, strict=True):
                (settings,) = settings_of([*words, f"steps={WARMUP + steps}", f"warmup={WARMUP}"])
                run = OpenRun(recorded(settings), path, runs[0].decoder if runs else shared, memory)
                runs.append(stack.enter_context(run))
            for run in runs:
                run.decode(WARMUP - run.steps)
            settled_s = [run.backend.times.blocked_s for run in runs]
            for _ in range(steps):
                for run in runs:
                    run.decode(1)
            waited_s = [run.backend.times.blocked_s - before_s for run, before_s in zip(runs, settled_s, strict=True)]
            experts_s = [expert_seconds(run) if time_experts and run.fast is None else None for run in runs]
            rates = [copy_bytes_per_s(run) if run.link.poll is not None else None for run in runs]
        journals = [list(read_journal(path)[1]) for path in paths]
    settled = [from_step(journal, WARMUP) for journal in journals]
    return [_seen(*each) for each in zip(runs, settled, waited_s, experts_s, rates, strict=True)]


def _seen(run: OpenRun, records: list[Record], waited_s: float, expert_s: float | None, rate: float | None) -> ShortRun:
    invalid = host.why_invalid(run.meter, run.link.mode.measures_disk) if run.machine.store == "disk" else []
    if invalid and not run.machine.allow_buffered:
        raise UserError(f"the calibration is invalid: {invalid[0]}")
    begins = [record.t_s for record in records if isinstance(record.events[0], StepBegin)]
    return ShortRun(
        records=records,
        samples=job_samples(records),
        steps=len(begins),
        step_s=records[-1].t_s - begins[0],
        fetched_bytes=sum(isinstance(c, Fetch) for r in records for c in r.commands) * run.store.stride,
        link_busy_s=_link_busy_s(records),
        expert_s=expert_s,
        copy_bytes_per_s=rate,
        waited_s=None if run.fast is None else waited_s,
        decoder=run.decoder,
        clocks=run.clocks.describe(),
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

"""What a job costs on a GPU: graphs queued back to back, and in a loop with its experts' ids, one and two in flight.

    python -m benchmarks.gpu_job out=DIR [parts=jobs,step,transformers] [context=4096] [graphs=true] [early=true]
                                 [models=qwen3_6_35b_a3b,gemma4_26b_a4b]

jobs          Qwen3.6 (a full-attention and a DeltaNet layer) and Gemma4 (a sliding and a full one), experts in Q4_0,
              for groups of 1, 2, 4, 8: microseconds a job
              queued     launched back to back, several descriptors and layers in turns: the GPU's own time
              queued 2   the same on two streams
              loop       launch, wait, read the ids, launch: one job in flight; `host` is what that adds to queued
              loop 2     two jobs in flight on two streams, waiting for the older; `host 2` is what it adds to queued 2
              kernels    (file only) what each kernel takes, for groups of 1 and 8
              floor      distinct expert bytes, weights and state over the bandwidth of a large copy, measured here
              and the loop beside 8 threads that read 1.77 MB pieces of a cached file, and their speed
step          Qwen3.6 in full size, every expert resident, 8 requests: milliseconds a decode step, see ``gpu_step``
transformers  the same weights in bf16 decoded by transformers, see ``gpu_step``

early=false: small kernels wait for the one before to end before they are started.

Medians of three rounds, spread as (least .. most).  Weights are random: times only.  Without a GPU: tiny sizes, plain
torch, to see that it runs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_step import measure_step
from benchmarks.gpu_world import GpuWorld, layer_bytes, make_world, state_bytes
from executor import host
from executor.fast.decoder import FastDecoder, JobSlot
from executor.fast.ops import Ops, reference_ops, triton_ops
from executor.rows import RowRuleError
from policies.core.types import Phase
from traces import command

SIZES = (1, 2, 4, 8)
MODELS = {"qwen3_6_35b_a3b": (8, {2: "full", 0: "DeltaNet"}), "gemma4_26b_a4b": (6, {0: "sliding", 4: "full"})}
"""Layers that are built, and the MoE layers whose jobs are timed with the kind of attention behind them."""

ROUNDS = 3
DESCRIPTORS = 6
CUDA = torch.cuda.is_available()


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written a second by a large copy on the device."""
    source = torch.empty((1 << 31) if CUDA else (1 << 24), dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-6 * elapsed_us(lambda i: target.copy_(source), 20))


def elapsed_us(work: Callable[[int], object], count: int) -> float:
    """Microseconds a call of ``count`` calls that are launched back to back."""
    for i in range(5):
        work(i)
    if not CUDA:
        began_s = time.perf_counter()
        for i in range(count):
            work(i)
        return 1e6 * (time.perf_counter() - began_s) / count
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    for i in range(count):
        work(i)
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) * 1e3 / count


class Jobs:
    """Jobs of one MoE layer for groups of ``n``: every launch draws experts anew, in slots drawn anew."""

    def __init__(self, world: GpuWorld, fast: FastDecoder, layer: int, n: int, layers: Sequence[int]) -> None:
        self.world, self.fast, self.layer, self.n, self.layers = world, fast, layer, n, layers
        rng, spec = np.random.default_rng(n), world.decoder.spec
        self._chosen = [[rng.permutation(spec.n_experts)[: spec.top_k].tolist() for _ in range(n)] for _ in range(64)]
        self._slot_of = [dict(enumerate(rng.permutation(world.slots)[: spec.n_experts].tolist())) for _ in range(64)]
        self._count = 0

    @property
    def distinct(self) -> float:
        """Distinct experts a job, on average."""
        return statistics.fmean(len({e for row in rows for e in row}) for rows in self._chosen)

    def launch(self, slot: JobSlot, requests: Sequence[int]) -> None:
        """Start the next job."""
        i = self._count = (self._count + 1) % 64
        for request, experts in zip(requests, self._chosen[i], strict=True):
            self.world.decoder.requests[request].chosen = experts
        self.fast.launch(slot, Phase.JOB, self.layers[self._count % len(self.layers)], requests, self._slot_of[i])

    def queued_us(self, slots: Sequence[JobSlot], streams: int) -> float:
        """GPU time a job, ``streams`` at a time, of jobs whose descriptors stand; nobody waits for the ids."""
        n = next(size for size in slots[0].graphs.sizes if size >= self.n)
        for i, slot in enumerate(slots):
            self.launch(slot, range(i % streams * self.n, i % streams * self.n + self.n))
            slot.wait()
            self.fast.collect(slot)
        layers = self.layers
        slots[0].enter()
        if streams == 1 or not CUDA:
            return elapsed_us(
                lambda i: slots[i % len(slots)].graphs.run(Phase.JOB, layers[i % len(layers)], n, slots[0].handle),
                240 if CUDA else 3,
            )

        def run(i: int) -> None:
            slots[i % 2].run(Phase.JOB, layers[i // 2 % len(layers)], n)

        for i in range(10):
            run(i)
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for i in range(400):
            run(i)
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - began_s) / 400

    def kernels(self, slot: JobSlot) -> dict[str, float]:
        """Microseconds a job of each kernel, by the profiler."""
        self.launch(slot, range(self.n))
        slot.wait()
        self.fast.collect(slot)
        slot.enter()
        n = next(size for size in slot.graphs.sizes if size >= self.n)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                slot.run(Phase.JOB, self.layer, n)
            torch.cuda.synchronize()
        return {e.key[:60]: round(e.self_device_time_total / 10, 2) for e in found.key_averages()}

    def loop_us(self, slots: Sequence[JobSlot], count: int) -> float:
        """Wall time a job with as many in flight as there are ``slots``, ids in Python included."""
        groups = {id(slot): range(i * self.n, (i + 1) * self.n) for i, slot in enumerate(slots)}
        running = deque(slots)
        for slot in slots:
            self.launch(slot, groups[id(slot)])
        began_s = time.perf_counter()
        for _ in range(count):
            slot = running.popleft()
            slot.wait()
            self.fast.collect(slot)
            self.launch(slot, groups[id(slot)])
            running.append(slot)
        taken_s = time.perf_counter() - began_s
        for slot in slots:
            slot.wait()
            self.fast.collect(slot)
        return 1e6 * taken_s / count

    def floor_us(self, bytes_per_s: float, context: int) -> float:
        """Bytes that must be read, at the speed of a copy."""
        before, after = self.fast.plan.layers[self.layer], self.fast.plan.layers[self.layer + 1]
        needed = self.distinct * self.world.geometry.expert_bytes + layer_bytes(before)[1] + layer_bytes(after)[0]
        return 1e6 * (needed + self.n * state_bytes(after, context)) / bytes_per_s


def job_rows(
    name: str, ops: Ops, device: torch.device, *, context: int, graphs: bool, bytes_per_s: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table of one model, and what its graphs took."""
    layers, kinds = MODELS[name]
    context = context if CUDA else 8
    world = make_world(
        name,
        layers=layers,
        stored="q4_0",
        slots=1400 if CUDA else 40,
        requests=16 if CUDA else 8,
        tokens=context + 64,
        device=device,
    )
    world.open_all(world.decoder.max_requests, context)
    fast = world.fast(ops, DESCRIPTORS, graphs and CUDA)
    try:
        fast.check_rows()
    except RowRuleError as error:
        print(error)
    rows = []
    for layer, kind in kinds.items():
        same = [i for i in range(layers - 1) if _kind(fast, i + 1) == _kind(fast, layer + 1)]
        for n in SIZES if CUDA else (1, 2):
            jobs = Jobs(world, fast, layer, n, same)
            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS if CUDA else 1):
                measured = {
                    "queued": jobs.queued_us(fast.slots, 1),
                    "queued 2": jobs.queued_us(fast.slots[:2], 2),
                    "loop": jobs.loop_us(fast.slots[:1], 400 if CUDA else 3),
                    "loop 2": jobs.loop_us(fast.slots[:2], 400 if CUDA else 3),
                }
                for key, value in measured.items():
                    found.setdefault(key, []).append(value)
            mid = {key: statistics.median(values) for key, values in found.items()}
            row = {"model": name, "attention": kind, "n": n, "context": context, "distinct_experts": jobs.distinct}
            row |= {key: [round(value, 1) for value in (mid[key], min(v), max(v))] for key, v in found.items()}
            row |= {"host": mid["loop"] - mid["queued"], "host 2": mid["loop 2"] - mid["queued 2"]}
            row |= {"floor": jobs.floor_us(bytes_per_s, context)}
            rows.append(row | ({"kernels": jobs.kernels(fast.slots[0])} if CUDA and n in {1, 8} else {}))
    return rows, {"model": name, **fast.describe(), "readers": reader_rows(world, fast, kinds)}


def _kind(fast: FastDecoder, layer: int) -> tuple[str, int | None]:
    state = fast.decoder.states[layer]
    return type(state).__name__, getattr(state, "reach", None)


def reader_rows(world: GpuWorld, fast: FastDecoder, kinds: dict[int, str]) -> dict[str, float]:
    """The loop with 4 requests alone and beside 8 reading threads, and the threads' speed alone and beside it."""
    layer, piece = next(iter(kinds)), 1_770_000
    jobs = Jobs(world, fast, layer, 4 if CUDA else 1, [layer])
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(1 << 20) * (512 if CUDA else 4))
        file.flush()
        done, stop = [0] * 8, threading.Event()

        def read(i: int) -> None:
            buffer, at, size = bytearray(piece), i * piece, os.fstat(file.fileno()).st_size
            while not stop.is_set():
                done[i] += os.preadv(file.fileno(), [buffer], at % (size - piece))
                at += 8 * piece

        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        alone_us = jobs.loop_us(fast.slots[:1], 2000 if CUDA else 3)
        for thread in threads:
            thread.start()
        rates, beside_us = [], 0.0
        for busy in (False, True):
            before, began_s = sum(done), time.perf_counter()
            if busy:
                beside_us = jobs.loop_us(fast.slots[:1], 4000 if CUDA else 3)
            else:
                time.sleep(0.5)
            rates.append((sum(done) - before) / (time.perf_counter() - began_s) / 1e9)
        stop.set()
        for thread in threads:
            thread.join()
    return {"loop_us": alone_us, "beside_us": beside_us, "alone_gb_s": rates[0], "beside_gb_s": rates[1]}


def print_jobs(rows: Sequence[dict[str, Any]]) -> None:
    """A line a job."""
    keys = ("queued", "queued 2", "loop", "loop 2")
    print(f"{'us a job':<30}{'n':>3}" + "".join(f"{key:>24}" for key in keys) + "    host  host 2   floor")
    for row in rows:
        cells = "".join(f"{row[key][0]:>9.1f} ({row[key][1]:.1f}..{row[key][2]:.1f})".rjust(24) for key in keys)
        tail = "".join(f"{row[key]:>8.1f}" for key in ("host", "host 2", "floor"))
        print(f"{row['model'] + ' ' + row['attention']:<30}{row['n']:>3}{cells}{tail}")


def main(arguments: Sequence[str]) -> None:
    given = command.parse(arguments, ("out", "parts", "context", "graphs", "early", "models"))
    parts = given.get("parts", "jobs,step,transformers").split(",")
    context = command.whole_number(given, "context") or 4096
    graphs, early = command.flag(given, "graphs", default=True), command.flag(given, "early", default=True)
    ops = triton_ops(early=early) if CUDA else reference_ops()
    device = torch.device("cuda" if CUDA else "cpu")
    out = Path(given.get("out", "."))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": host.versions(), "clocks": [], "jobs": [], "graphs": []}
    clocks = host.Clocks(device.type)
    with torch.inference_mode():
        found["copy_bytes_per_s"] = bytes_per_s = copy_bytes_per_s(device)
        print(f"{host.versions()}\ncopy {bytes_per_s / 1e12:.3f} TB/s")
        for name in given.get("models", ",".join(MODELS)).split(",") if "jobs" in parts else ():
            rows, facts = job_rows(name, ops, device, context=context, graphs=graphs, bytes_per_s=bytes_per_s)
            found["jobs"] += rows
            found["graphs"].append(facts)
            clocks.sample()
            print_jobs(rows)
            print(facts, flush=True)
            (out / "gpu_job.json").write_text(json.dumps(found, indent=1))
        if "step" in parts:
            found["step"] = measure_step(bytes_per_s, device, graphs, ops, theirs="transformers" in parts)
            clocks.sample()
            print(json.dumps(found["step"], indent=1))
    found["clocks"] = clocks.describe()
    (out / "gpu_job.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Every candidate configuration of the experts' kernels on a GPU, beside the one that is used.

    python -m benchmarks.kernel_tune out=FOLDER [only=qwen3_6.bf16,gemma4.q4_0] [best=4] [rounds=5]

Candidates: rows, columns, warps and stages of ``executor.kernels``.  They are compiled first, in parallel; then each is
timed at 1 to 16 tokens as ``benchmarks.kernels`` does; then for each number of tokens the ``best`` and the one in use
again, in turns, ``rounds`` times, and only that is a comparison.  error: against float64, 8 tokens.  alone: whether a
row has the same bits alone.  bits: equal for candidates that give the same bits.  Writes tune.csv (all) and best.csv
(the turns).
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernels import (
    ARENA_BYTES,
    GROUPS,
    MODELS,
    TOP_K,
    Row,
    World,
    captured,
    copy_bytes_per_s,
    draw,
    expert_draws,
    inputs,
    replayed,
    timed,
    world,
    write_csv,
)
from executor.kernels import reference
from executor.kernels.experts_float import FloatTuning, float_experts, tuning_of
from executor.kernels.experts_q4 import Q4Tuning, q4_experts
from traces.command import parse, run, whole_number

PROCESSES = 14


class Candidate(NamedTuple):
    """``tuning`` None: what is used, which may differ from one number of tokens to another."""

    name: str
    compute: Callable[..., None]
    tuning: Any

    def call(self, w: World, x: Any, slots: Any, out: Any) -> Callable[[], None]:
        n = slots.shape[0]
        scratch = w.shape.scratch(n, "cuda")
        for buffer in (*scratch, out):
            buffer.fill_(float("nan"))
        rows = torch.arange(n, dtype=torch.int32, device="cuda")
        mix = torch.linspace(0.1, 1.0, 16 * TOP_K, device="cuda").view(16, TOP_K)
        return partial(self.compute, w.shape, x, w.arena, slots, rows, mix, scratch, out, tuning=self.tuning)


def named(compute: Callable[..., None], tunings: Sequence[Any]) -> list[Candidate]:
    """Named by the tuning's values."""

    def words(tuning: Any) -> str:
        return " ".join("-" if value is None else str(int(value)) for value in dataclasses.astuple(tuning))

    return [Candidate(words(tuning), compute, tuning) for tuning in tunings]


def float_candidates(model: str, used: FloatTuning) -> list[FloatTuning]:
    up, down = dataclasses.astuple(used)[:3], dataclasses.astuple(used)[3:]
    ups = [(4, 256, 4), (4, 256, 2), (2, 256, 2), (8, 256, 8), (2, 512, 2), (2, 512, 4), (4, 512, 4), (4, 512, 8)]
    ups += [(1, 512, 2), (8, 512, 8), (2, 1024, 4), (4, 1024, 8)]
    downs = [(8, 64, 4), (8, 64, 8), (8, 64, 2), (4, 64, 2), (4, 64, 4), (16, 64, 8), (8, 32, 4), (8, 32, 2)]
    downs += [(8, 128, 4), (8, 128, 8), (8, 256, 8), (8, 512, 8), (16, 512, 16)]
    both = [((4, 256, warps), one) for warps in (2, 4) for one in ((8, 64, 4), (8, 64, 8), (8, 32, 4))]
    return [FloatTuning(*one, *other) for one, other in dict.fromkeys([
        *((one, down) for one in ups), *((up, one) for one in downs), *(both if model == "gemma4" else ())
    ])]  # fmt: skip


def q4_candidates() -> list[Q4Tuning]:
    small, large = {"up_rows": 32, "up_warps": 2, "up_registers": 128}, {"down_repeat": 2, "down_stages": 2}
    found = [Q4Tuning(**small, down_eager=True), Q4Tuning(down_eager=True), Q4Tuning(**small, **large)]
    found += [Q4Tuning(**large), Q4Tuning(up_stages=2, **large), Q4Tuning(**small, up_stages=2, **large)]
    found += [Q4Tuning(32, 2, 2, up_registers=registers, **large) for registers in (112, 120, 144, 168)]
    found += [Q4Tuning(16, 1, stages, up_registers=128, **large) for stages in (2, 3)]
    return found


def candidates(model: str, dtype: str) -> list[Candidate]:
    """The one in use first."""
    if dtype == "q4_0":
        return [Candidate("used", q4_experts, None), *named(q4_experts, q4_candidates())]
    used = tuning_of(world(model, dtype, 1 << 24).shape)
    return [Candidate("used", float_experts, None), *named(float_experts, float_candidates(model, used))]


def compile_some(model: str, dtype: str, first: int) -> None:
    """Compile every ``PROCESSES``-th candidate into triton's cache on disk."""
    w = world(model, dtype, 32 * 12_000_000)
    for candidate in candidates(model, dtype)[first::PROCESSES]:
        for n in GROUPS if candidate.tuning is None else (1, 2):
            slots = torch.zeros(n, TOP_K, dtype=torch.int32, device="cuda")
            out = torch.empty(n, w.shape.geometry.hidden, device="cuda")
            try:
                candidate.call(w, inputs(w, n), slots, out)()
            except Exception:  # named when it is timed
                break
    torch.cuda.synchronize()


def check(w: World, candidate: Candidate, exact: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> Row:
    """Error, and whether and which bits."""
    rows = []
    for some in (slice(0, len(slots)), slice(0, 1)):
        out = torch.empty(len(slots[some]), w.shape.geometry.hidden, device="cuda")
        candidate.call(w, x[some], slots[some].contiguous(), out)()
        rows.append(out)
    wrong = float((rows[0] - exact).norm() / exact.norm())
    bits = zlib.crc32(rows[0].cpu().numpy().tobytes()) % 10_000
    return {"error": f"{wrong:.1e}", "alone": int(torch.equal(rows[0][:1], rows[1])), "bits": bits}


def exactly(w: World, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """In float64."""
    exact = torch.empty(len(slots), w.shape.geometry.hidden, dtype=torch.float64, device="cuda")
    Candidate("exact", _reference, None).call(w, x, slots, exact)()
    return exact


def _reference(*operands: Any, tuning: None) -> None:
    reference.experts(*operands, compute=torch.float64)


def calls_of(w: World, candidate: Candidate, n: int) -> tuple[list[Callable[[], None]], float]:
    chosen, n_bytes = expert_draws(w, n)
    x, out = inputs(w, n), torch.empty(n, w.shape.geometry.hidden, device="cuda")
    return [candidate.call(w, x, slots, out) for slots in chosen], n_bytes


def tune(case: tuple[str, str], bytes_per_s: float, best: int, rounds: int) -> tuple[list[Row], list[Row]]:
    """The lines of tune.csv and best.csv."""
    w = world(*case, ARENA_BYTES[case[1]])
    x, slots = inputs(w, 8), draw(w, 8, torch.Generator().manual_seed(8)).to("cuda", torch.int32)
    exact, every, again = exactly(w, x, slots), list[Row](), list[Row]()
    able = {}
    for candidate in candidates(*case):
        line: Row = {"case": ".".join(case), "name": candidate.name}
        try:
            line |= check(w, candidate, exact, x, slots)
            for n in GROUPS:
                line[f"us_{n}"] = round(timed(calls_of(w, candidate, n)[0], 7).median_us, 2)
            able[candidate.name] = candidate
        except Exception as error:  # too much shared memory, say
            line["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        every.append(line)
        print(line, flush=True)
    for n in GROUPS:
        order = sorted((line for line in every if line["name"] in able), key=lambda line: line[f"us_{n}"])
        names = dict.fromkeys(["used", *(line["name"] for line in order[:best])])
        sets = {name: calls_of(w, able[name], n) for name in names}
        graphs = {name: captured(calls) for name, (calls, _) in sets.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        for name in list(names) * rounds:
            times[name].append(replayed(graphs[name], len(sets[name][0]), 7).median_us)
        for name, values in sorted(times.items(), key=lambda pair: statistics.median(pair[1])):
            middle, floor_us = statistics.median(values), 1e6 * sets[name][1] / bytes_per_s
            again.append({"case": ".".join(case), "n": n, "name": name, "us": round(middle, 2)})
            again[-1] |= {"least": round(min(values), 2), "most": round(max(values), 2)}
            again[-1] |= {"percent_of_copy": round(100 * floor_us / middle, 1)}
            print(again[-1], flush=True)
    return every, again


def main(argv: Sequence[str]) -> int:
    given = parse(argv, ("out", "only", "best", "rounds"))
    folder = Path(given.get("out", "runs/kernel_tune"))
    folder.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    cases = [
        case for case in itertools.product(MODELS, ARENA_BYTES) if ".".join(case) in given.get("only", ".".join(case))
    ]
    began_s = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(compile_some, *case, i) for case in cases for i in range(PROCESSES)]:
            done.result()
    print(f"compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
    bytes_per_s = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, copy of 4 GiB: {bytes_per_s / 1e12:.3f} TB/s read + written")
    every, again = list[Row](), list[Row]()
    for case in cases:
        found = tune(case, bytes_per_s, whole_number(given, "best") or 4, whole_number(given, "rounds") or 5)
        every, again = every + found[0], again + found[1]
        write_csv(folder / "tune.csv", every)
        write_csv(folder / "best.csv", again)
    print(f"all in {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__))

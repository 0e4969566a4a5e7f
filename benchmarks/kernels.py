"""The decode kernels on a GPU: microseconds a call, share of a large copy's bandwidth, error against float64.

    python -m benchmarks.kernels out=FOLDER [only=experts|others]

A call is timed by events around a CUDA graph that holds calls with different experts, caches or states, so that nothing
is in the L2 cache when it is read again; gaps between the kernels of a call count.  The median of the replays, and the
spread from the least to the largest, in percent of the median.  "% of copy": the bytes that a call must read (distinct
experts; keys, values and states in use, states also written) over its time, against a device-to-device copy of 4 GiB
measured at the start, bytes read plus bytes written.  Routing is uniform: fewer experts are shared than in a model.
Experts are checked against float64 on the decoded weights, with every buffer full of NaN before the call.
Writes kernels.json and kernels.csv.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from executor.geometry import ExpertGeometry
from executor.kernels import reference
from executor.kernels.attention import decode_attention
from executor.kernels.delta import delta_step
from executor.kernels.experts_float import float_experts
from executor.kernels.experts_q4 import q4_experts
from executor.kernels.norm import rms_norm
from executor.kernels.rotary import rotate_and_store
from executor.kernels.router import route
from executor.kernels.values import ExpertsShape, MixRule, attention_scratch, plane_order
from traces.command import parse, run

GROUPS = (1, 2, 4, 8, 16)
TOP_K = 8
MODELS = {"qwen3_6": (2048, 512, 256, "silu"), "gemma4": (2816, 704, 128, "gelu_tanh")}
ARENA_BYTES = {"bf16": 6 << 30, "q4_0": 3 << 30}
COLD_BYTES = 400 << 20
"""What the calls of one graph read together: several times the L2 cache."""

Call = Callable[[], None]
Row = dict[str, Any]


class Timing(NamedTuple):
    """Microseconds a call."""

    median_us: float
    spread_percent: float


def copy_bytes_per_s() -> float:
    """Read plus written, the best of several copies of 4 GiB; in a graph another engine would do it."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    for mark in marks:
        target.copy_(source)
        mark.record()
    torch.cuda.synchronize()
    return 2 * source.numel() / (1e-3 * min(a.elapsed_time(b) for a, b in itertools.pairwise(marks)))


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls, one after the other, in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()  # torch.cuda.graph would also empty the allocator's cache
        for call in calls:
            call()
        graph.capture_end()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, calls: int, replays: int) -> Timing:
    """Run a graph of so many calls again and again."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    each = [1e3 * a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]
    median = statistics.median(each)
    return Timing(median, 100 * (max(each) - min(each)) / median)


def timed(calls: Sequence[Call], replays: int = 12) -> Timing:
    """Run the calls in one graph, again and again."""
    return replayed(captured(calls), len(calls), replays)


# ---------------------------------------------------------------- experts


class World(NamedTuple):
    """Random experts in an arena, and draws of which of them a call uses."""

    shape: ExpertsShape
    arena: Tensor
    n_slots: int
    n_experts: int


def world(model: str, dtype: str, arena_bytes: int) -> World:
    hidden, intermediate, n_experts, activation = MODELS[model]
    geometry = ExpertGeometry(dtype, hidden, intermediate)
    n_slots = arena_bytes // geometry.stride_bytes
    arena = torch.empty(n_slots * geometry.stride_bytes, dtype=torch.uint8, device="cuda")
    slots = arena.view(n_slots, -1)
    if dtype == "q4_0":
        arena.random_()
        for part in geometry.parts:
            if part.element == "float16":
                shape = (n_slots, part.n_bytes // 2)
                scales = (torch.rand(shape, device="cuda") + 0.5) * (0.25 * hidden**-0.5)
                slots[:, part.offset : part.offset + part.n_bytes] = scales.half().view(torch.uint8)
    else:
        arena.view(torch.bfloat16).normal_(std=hidden**-0.5)
    shape = ExpertsShape(geometry, TOP_K, activation)  # type: ignore[arg-type]
    return World(shape, arena, n_slots, n_experts)


def draw(w: World, n: int, generator: torch.Generator) -> Tensor:
    """Slots [n, k]: each token's experts out of the layer's, which lie anywhere in the arena."""
    layer = torch.randperm(w.n_slots, generator=generator)[: w.n_experts]
    return torch.stack([layer[torch.randperm(w.n_experts, generator=generator)[:TOP_K]] for _ in range(n)])


def inputs(w: World, n: int) -> Tensor:
    x = torch.randn(n, w.shape.geometry.hidden, device="cuda")
    if w.shape.geometry.dtype == "q4_0":
        return x[:, plane_order(x.shape[1]).to("cuda")].half()
    return x.bfloat16()


def expert_draws(w: World, n: int) -> tuple[list[Tensor], float]:
    """Slots of calls with different experts, and the mean bytes of a call's distinct experts."""
    generator = torch.Generator().manual_seed(n)
    draws = max(4, COLD_BYTES // (n * TOP_K * w.shape.stride_bytes))
    slots = [draw(w, n, generator) for _ in range(draws)]
    n_bytes = statistics.mean(len(s.unique()) for s in slots) * w.shape.geometry.expert_bytes
    return [s.to("cuda", torch.int32) for s in slots], n_bytes


def expert_calls(w: World, n: int) -> tuple[list[Call], float]:
    """Calls with different experts, and the mean bytes of a call's distinct experts."""
    compute: Any = q4_experts if w.shape.geometry.dtype == "q4_0" else float_experts
    slots, n_bytes = expert_draws(w, n)
    x, scratch = inputs(w, n), w.shape.scratch(n, "cuda")
    rows, mix = torch.arange(n, dtype=torch.int32, device="cuda"), torch.rand(n, TOP_K, device="cuda")
    out = torch.empty(n, w.shape.geometry.hidden, device="cuda")
    fixed = (rows, mix, scratch, out)
    return [partial(compute, w.shape, x, w.arena, chosen, *fixed) for chosen in slots], n_bytes


def error(w: World, n: int) -> float:
    generator = torch.Generator().manual_seed(100 + n)
    slots = draw(w, n, generator).to("cuda", torch.int32)
    x, scratch = inputs(w, n), w.shape.scratch(n, "cuda")
    rows, mix = torch.arange(n, dtype=torch.int32, device="cuda"), torch.rand(n, TOP_K, device="cuda")
    out = torch.full((n, w.shape.geometry.hidden), float("nan"), device="cuda")
    for buffer in scratch:
        buffer.fill_(float("nan"))
    compute: Any = q4_experts if w.shape.geometry.dtype == "q4_0" else float_experts
    compute(w.shape, x, w.arena, slots, rows, mix, scratch, out)
    exact = torch.empty_like(out, dtype=torch.float64)
    reference.experts(w.shape, x, w.arena, slots, rows, mix, scratch, exact, compute=torch.float64)
    return float((out - exact).norm() / exact.norm())


def expert_rows(bytes_per_s: float) -> Iterator[Row]:
    for model, dtype in itertools.product(MODELS, ARENA_BYTES):
        w = world(model, dtype, ARENA_BYTES[dtype])
        for n in GROUPS:
            calls, n_bytes = expert_calls(w, n)
            yield row("experts", f"{model} {dtype}", n, timed(calls), 1e6 * n_bytes / bytes_per_s, wrong=error(w, n))


def row(kernel: str, case: str, n: int, timing: Timing, floor_us: float, *, wrong: float | None = None) -> Row:
    return {
        "kernel": kernel,
        "case": case,
        "tokens": n,
        "us": round(timing.median_us, 2),
        "spread_percent": round(timing.spread_percent, 1),
        "floor_us": round(floor_us, 2),
        "percent_of_copy": round(100 * floor_us / timing.median_us, 1),
        "relative_error": wrong,
    }


# ---------------------------------------------------------------- the other kernels


def numbers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def attention_rows(bytes_per_s: float) -> Iterator[Row]:
    for case, heads, kv_heads, dim, room, lengths in (
        ("16 heads, 2 kv, 256", 16, 2, 256, 8192, (1024, 4096, 8192)),
        ("16 heads, 2 kv, 512", 16, 2, 512, 8192, (4096,)),
        ("16 heads, 8 kv, 256, window 1024", 16, 8, 256, 2048, (1024,)),
    ):
        for n, length in itertools.product((1, 4, 8), lengths):
            n_bytes = 2 * n * kv_heads * length * dim * 2
            layers = max(4, min(24, COLD_BYTES // n_bytes))
            k, v = (torch.randn(layers, 8, kv_heads, room, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            q = torch.randn(n, heads, dim, device="cuda", dtype=torch.bfloat16)
            rows, first = numbers(list(range(n))), numbers([room - length if "window" in case else 0] * n)
            end, out = first + length, torch.empty(n, heads * dim, device="cuda", dtype=torch.bfloat16)
            scratch = attention_scratch(n, heads, room, dim, "cuda")

            fixed = (rows, first, end, scratch, out)
            calls = [partial(decode_attention, q, k[i], v[i], *fixed, scale=0.06) for i in range(layers)]
            yield row("attention", f"{case}, {length} keys", n, timed(calls), 1e6 * n_bytes / bytes_per_s)


def delta_rows(bytes_per_s: float) -> Iterator[Row]:
    channels, heads, key_heads = 8192, 32, 16
    weights = [torch.randn(*s, device="cuda") for s in ((channels, 4), (heads,), (heads,), (128,))]
    for n in (1, 2, 4, 8):
        n_bytes = 2 * n * (heads * 128 * 128 * 4 + channels * 3 * 2)
        layers = max(4, COLD_BYTES // n_bytes)
        conv = torch.randn(layers, n + 1, channels, 3, device="cuda", dtype=torch.bfloat16)
        recurrent = torch.randn(layers, n, heads, 128, 128, device="cuda")
        projected = torch.randn(16, channels + 4096 + 2 * heads, device="cuda", dtype=torch.bfloat16)
        parts = projected.split([channels, 4096, heads, heads], dim=1)
        rows, mixed = numbers(list(range(n))), torch.empty(n, channels, device="cuda")
        out = torch.empty(16, 4096, device="cuda", dtype=torch.bfloat16)

        fixed = (*weights, mixed, out)
        extra = {"key_heads": key_heads, "eps": 1e-6}
        calls = [partial(delta_step, *parts, rows, conv[i], recurrent[i], *fixed, **extra) for i in range(layers)]
        yield row("delta step", "32 heads, 128 x 128", n, timed(calls), 1e6 * n_bytes / bytes_per_s)


def small_rows(_: float) -> Iterator[Row]:
    """Kernels that are launches more than bytes."""
    bf16, eps = {"device": "cuda", "dtype": torch.bfloat16}, {"eps": 1e-6}
    for n in (1, 8):
        rows, mix = numbers(list(range(n))), torch.empty(16, TOP_K, device="cuda")
        ids, rule = torch.empty(n, TOP_K, dtype=torch.int32).pin_memory(), MixRule(True, torch.bfloat16)
        for n_experts in (256, 128):
            logits = torch.randn(16, n_experts, **bf16)
            gate = partial(route, logits, rows, mix, ids, rule, n_experts=n_experts, sequence=numbers([7]))
            yield row("router", f"{n_experts} experts, ids pinned", n, timed([gate] * 20), 0)
        x, add, weight = (torch.randn(*shape, device="cuda") for shape in ((16, 2048), (16, 2048), (2048,)))
        planes = torch.empty(16, 2048, device="cuda", dtype=torch.float16)
        norm = partial(rms_norm, x, rows, [weight], [torch.empty(16, 2048, **bf16)], add=add, planes=planes, **eps)
        yield row("norm", "2048, added, with planes", n, timed([norm] * 20), 0)
        projection = torch.randn(16, 9216, **bf16)
        q = projection[:, :8192].view(16, 16, 512)[..., :256]
        k, v = projection[:, 8192:].view(16, 2, 2, 256).unbind(1)
        table, scale = torch.randn(16, 64, device="cuda"), torch.randn(256, device="cuda")
        targets = torch.empty(16, 16, 256, **bf16), *torch.empty(2, 16, 2, 1024, 256, **bf16)
        weights = {"q_weight": scale, "k_weight": scale, **eps}
        turn = partial(rotate_and_store, q, k, v, table, table, rows, rows, rows, *targets, **weights)
        yield row("rotary", "16 heads, 2 kv, 256, normed", n, timed([turn] * 20), 0)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv, ("out", "only"))
    folder = Path(arguments.get("out", "runs/kernels"))
    folder.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    bytes_per_s = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, copy of 4 GiB: {bytes_per_s / 1e12:.3f} TB/s read + written")
    parts: dict[str, tuple[Callable[[float], Iterator[Row]], ...]] = {
        "experts": (expert_rows,),
        "others": (attention_rows, delta_rows, small_rows),
    }
    rows: list[Row] = []
    for name, makers in parts.items():
        if arguments.get("only", name) != name:
            continue
        for found in itertools.chain.from_iterable(maker(bytes_per_s) for maker in makers):
            rows.append(found)
            wrong = "" if found["relative_error"] is None else f"  error {found['relative_error']:.1e}"
            print(
                f"{found['kernel']:10} {found['case']:44} n={found['tokens']:<2} {found['us']:8.2f} us "
                f"(+-{found['spread_percent']:4.1f}%)  floor {found['floor_us']:7.2f}  "
                f"{found['percent_of_copy']:5.1f}% of copy{wrong}",
                flush=True,
            )
    import triton  # noqa: PLC0415 - for its version only

    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    record = {**versions, "copy_bytes_per_s": bytes_per_s, "rows": rows}
    (folder / "kernels.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_csv(folder / "kernels.csv", rows)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, __doc__))

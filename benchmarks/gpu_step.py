"""A whole decode step of Qwen3.6 in full size with random Q4_0 experts, all resident, for 8 requests.

repeats_its_bits  whether the first steps of empty requests, decoded twice, have the same logits; ``same_bits_late``:
              and without graphs and early starts
direct        the fast path's launches one after the other, one group: no core
systems       the same through core, driver and backend, with one batch in flight or two
floor         distinct expert bytes of the step, weights, state and head over the bandwidth of a large copy
transformers  its own modules and cache on the same weights in bf16 (experts dequantised), with each of its ways to run
              experts; eager, as it decodes unless asked otherwise.  Logits are compared by ``gpu_logits``
"""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from benchmarks.gpu_world import GpuWorld, layer_bytes, make_world, state_bytes, their_model
from executor.fast.backend import StreamBackend
from executor.fast.decoder import FastDecoder
from executor.fast.ops import Ops, triton_ops
from executor.sampling import Greedy
from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.messages import Fetch, StepBegin
from policies.core.types import Phase
from policies.eviction import LFU
from policies.schedule import Alone, LowestLayerFirst, LowestLayerThenSrtf, OneUnit, PerRequest, SameLayer, Sizes

CUDA = torch.cuda.is_available()
REQUESTS = 8
CONTEXT = 1024 if CUDA else 8
STEPS = 20 if CUDA else 2
COMPARED = 4


class Arrived:
    """A reader with nothing to read: every expert lies where it belongs."""

    alive = True

    def submit(self, fetch: Fetch) -> None:
        raise AssertionError("an expert is missing although all are resident")


class Steps:
    """A workload of ``count`` steps of all requests, each at the same position every time."""

    def __init__(self, requests: Sequence[int], count: int) -> None:
        self._requests, self._left, self.began_s = tuple(requests), count, list[float]()

    def begin(self, now_s: float) -> StepBegin | None:
        self.began_s.append(now_s)
        self._left -= 1
        return StepBegin(len(self.began_s), self._requests) if self._left >= 0 else None


def direct_step(world: GpuWorld, fast: FastDecoder, requests: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Logits of one step in one group, and how many distinct experts it read."""
    slot, spec, distinct = fast.slots[0], world.decoder.spec, 0
    for layer in range(-1, spec.n_layers + 1):
        phase = Phase.ENTRY if layer < 0 else Phase.JOB if layer < spec.n_layers else Phase.HEAD
        numbers = sorted({e for r in requests for e in world.decoder.requests[r].chosen}) if phase is Phase.JOB else []
        distinct += len(numbers)
        fast.launch(slot, phase, layer, requests, {expert: expert for expert in numbers})
        slot.wait()
        if phase is not Phase.HEAD:
            fast.collect(slot)
    logits = fast.logits(slot)
    fast.collect(slot)
    return logits, distinct


def step_floor_ms(world: GpuWorld, fast: FastDecoder, distinct: float, bytes_per_s: float) -> float:
    plan = fast.plan
    needed = distinct * world.geometry.expert_bytes + plan.head.numel() * plan.head.element_size()
    needed += sum(sum(layer_bytes(layer)) + REQUESTS * state_bytes(layer, CONTEXT) for layer in plan.layers)
    return 1e3 * needed / bytes_per_s


SYSTEMS: dict[str, dict[str, Any]] = {
    "llama_cpp": {"partition": OneUnit, "batching": Alone, "compute_slots": 1},
    "static 4:4, 2 in flight": {"partition": lambda: Sizes([4, 4]), "batching": Alone, "compute_slots": 2},
    "bevy": {"partition": PerRequest, "batching": SameLayer, "compute_slots": 1},
    "bevy, 2 in flight": {"partition": PerRequest, "batching": SameLayer, "compute_slots": 2},
}


def driven_ms(world: GpuWorld, fast: FastDecoder, system: dict[str, Any]) -> dict[str, float]:
    """Steps through the core, whose cache holds every expert in its own slot."""
    spec = world.decoder.spec
    core = DecisionCore(
        spec,
        spec.n_total,
        LFU(),
        partition=system["partition"](),
        batching=system["batching"](),
        compute_order=LowestLayerFirst(),
        fetch_order=LowestLayerThenSrtf(),
        compute_slots=system["compute_slots"],
    )
    for expert in range(spec.n_total):
        entry = core.cache.reserve(expert, 1)
        assert entry is not None
        entry.slot = expert
        entry.started = entry.resident = True
        core.cache.unpin((expert,))
    done: Any = queue.SimpleQueue()
    work = Steps(range(REQUESTS), STEPS)
    with StreamBackend(fast, Arrived(), done, sampler=Greedy()) as backend:
        drive(core, work, backend)
        times = backend.times
    steps = [b - a for a, b in zip(work.began_s, work.began_s[1:], strict=False)][1:]
    return {
        "ms": 1e3 * statistics.median(steps),
        "least": 1e3 * min(steps),
        "most": 1e3 * max(steps),
        "batches_a_step": times.batches / STEPS,
        "us_a_batch": 1e6 * sum(steps) / len(steps) / (times.batches / STEPS),
        "launch_us": 1e6 * times.start_s / times.batches,
        "collect_us": 1e6 * times.notice_s / times.batches,
        "blocked_us": 1e6 * times.blocked_s / times.batches,
    }


def measure_step(bytes_per_s: float, device: torch.device, graphs: bool, ops: Ops, theirs: bool) -> dict[str, Any]:
    """All of it; see above."""
    layers = None if CUDA else 4
    world = make_world(
        "qwen3_6_35b_a3b",
        layers=layers,
        stored="q4_0",
        slots=None,
        requests=REQUESTS,
        tokens=CONTEXT + 64,
        device=device,
    )
    fast = world.fast(ops, 2, graphs and CUDA)
    found: dict[str, Any] = {"graphs": fast.describe(), "context": CONTEXT, "requests": REQUESTS}
    ours = _first_steps(world, fast)
    found["repeats_its_bits"] = all(map(torch.equal, ours, _first_steps(world, fast)))
    if CUDA:
        late = world.fast(triton_ops(early=False), 1, graphs=False)
        found["same_bits_late"] = all(map(torch.equal, ours, _first_steps(world, late)))
    world.open_all(REQUESTS, CONTEXT)
    direct_step(world, fast, range(REQUESTS))
    times, distinct = [], []
    for _ in range(STEPS):
        began_s = time.perf_counter()
        logits, count = direct_step(world, fast, range(REQUESTS))
        logits.argmax(-1).tolist()
        times.append(time.perf_counter() - began_s)
        distinct.append(count)
    found["floor_ms"] = step_floor_ms(world, fast, statistics.fmean(distinct), bytes_per_s)
    found["direct"] = {"ms": 1e3 * statistics.median(times), "least": 1e3 * min(times), "most": 1e3 * max(times)}
    for name, system in SYSTEMS.items():
        slots, fast.slots = fast.slots, fast.slots[: system["compute_slots"]]
        found[name] = driven_ms(world, fast, system)
        fast.slots = slots
    found["over_floor"] = found["direct"]["ms"] / found["floor_ms"]
    if theirs:
        found["transformers"] = transformers_ms(world, device)
        best = min(way["ms"] for way in found["transformers"].values() if "ms" in way)
        found["faster_than_transformers"] = best / found["direct"]["ms"]
    return found


def _first_steps(world: GpuWorld, fast: FastDecoder) -> list[torch.Tensor]:
    """Logits of requests that begin with a token of their own and are fed fixed tokens."""
    for request in range(REQUESTS):
        world.decoder.open(request, 3 + request)
    world.decoder.settle()
    found = []
    for step in range(COMPARED):
        found.append(direct_step(world, fast, range(REQUESTS))[0].float().clone())
        for request in range(REQUESTS):
            world.decoder.feed(request, 3 + request + step)
    for request in range(REQUESTS):
        world.decoder.close(request)
    return found


def transformers_ms(world: GpuWorld, device: torch.device) -> dict[str, Any]:
    """Milliseconds a step of transformers' own decode, by its way to run experts."""
    model = their_model(world)
    found: dict[str, Any] = {}
    for way in ("grouped_mm", "batched_mm", "eager"):
        try:
            found[way] = _their_steps(model, way, world.config, device)
        except Exception as error:  # a way that this card or version lacks is a finding, too
            found[way] = {"error": str(error).splitlines()[0][:200]}
    return found


def _their_steps(model: Any, way: str, config: Any, device: torch.device) -> dict[str, float]:
    """Decode after a prompt of CONTEXT tokens, which goes expert by expert in any case."""
    model.set_experts_implementation("eager")
    cache = transformers.DynamicCache(config=config)
    prompt = torch.randint(3, config.vocab_size, (REQUESTS, CONTEXT), device=device)
    token = _timed(lambda: model(prompt, cache=cache, use_cache=True, logits_to_keep=1))[1].logits[:, -1:].argmax(-1)
    model.set_experts_implementation(way)
    times = []
    for _ in range(STEPS):
        fed = token

        def one(fed: torch.Tensor = fed) -> Any:
            return model(fed, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)

        taken_s, token = _timed(one)
        times.append(taken_s)
    times = times[3:] or times
    return {"ms": 1e3 * statistics.median(times), "least": 1e3 * min(times), "most": 1e3 * max(times)}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = work()
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s, result

"""Small worlds for the core's tests: seeded routing, and backends that complete commands in any order."""

from __future__ import annotations

import random

from policies.core.core import DecisionCore
from policies.core.messages import (
    Command,
    Compute,
    ComputeDone,
    Event,
    Fetch,
    FetchDone,
    Gate,
    HostCompute,
    HostDone,
    StepBegin,
)
from policies.core.protocols import EvictionPolicy
from policies.core.types import ModelSpec, Phase
from policies.eviction import LFU, LRU
from policies.schedule import (
    Alone,
    Fifo,
    GlobalSrtf,
    LowestLayerFirst,
    LowestLayerThenSrtf,
    OneUnit,
    PerRequest,
    SameLayer,
    Sizes,
)

SCHEDULES = {
    "llama_cpp": (OneUnit(), Alone(), LowestLayerFirst(), LowestLayerThenSrtf()),
    "static_2_1": (Sizes([2, 1]), Alone(), LowestLayerFirst(), LowestLayerThenSrtf()),
    "singles": (PerRequest(), Alone(), LowestLayerFirst(), LowestLayerThenSrtf()),
    "bevy": (PerRequest(), SameLayer(), LowestLayerFirst(), LowestLayerThenSrtf()),
    "bevy_fifo": (PerRequest(), SameLayer(), Fifo(), LowestLayerThenSrtf()),
    "bevy_srtf": (PerRequest(), SameLayer(), LowestLayerFirst(), GlobalSrtf()),
    "bevy_both": (PerRequest(), SameLayer(), Fifo(), GlobalSrtf()),
}


def make_core(name, model: ModelSpec, capacity: int, eviction: EvictionPolicy | None = None, **options) -> DecisionCore:
    partition, batching, compute, fetch = SCHEDULES[name]
    return DecisionCore(
        model,
        capacity,
        eviction or (LRU() if name == "llama_cpp" else LFU(count="keep")),
        partition=partition,
        batching=batching,
        compute_order=compute,
        fetch_order=fetch,
        **options,
    )


class Routes:
    """Skewed routing, a pure function of (seed, step, request, layer); predictions are right half of the time."""

    def __init__(self, model: ModelSpec, seed: int, predict: bool = False):
        self.model, self.seed, self.predict = model, seed, predict

    def _chosen(self, step, request, layer):
        rng = random.Random(f"{self.seed}/{step}/{request}/{layer}")
        m = self.model
        order = sorted(range(m.n_experts), key=lambda e: rng.random() * (1 + e))
        return tuple(m.expert(layer, e) for e in order[: m.top_k])

    def gates(self, step, requests, layer):
        return tuple(self._gate(step, request, layer) for request in requests)

    def _gate(self, step, request, layer):
        predicted = ()
        if self.predict and layer + 1 < self.model.n_layers:
            rng = random.Random(f"{self.seed}/{step}/{request}/{layer}/p")
            true = self._chosen(step, request, layer + 1)
            other = [self.model.expert(layer + 1, e) for e in range(self.model.n_experts)]
            mixed = dict.fromkeys(e if rng.random() < 0.5 else rng.choice(other) for e in true)
            predicted = tuple((e, 1.0 / (i + 1)) for i, e in enumerate(mixed))
        return Gate(self._chosen(step, request, layer), predicted)


class Steps:
    """``count`` steps of the same requests."""

    def __init__(self, count, requests):
        self.todo = [StepBegin(step, tuple(requests)) for step in range(count)]

    def begin(self, now_s):
        return self.todo.pop(0) if self.todo else None


class AnyOrder:
    """Completes any outstanding commands, one to three at a time, in an order drawn from a seed."""

    def __init__(self, routes: Routes, seed: int, most: int = 3):
        self.routes, self.most = routes, most
        self.rng = random.Random(seed)
        self.outstanding: list[Command] = []
        self.step = -1
        self.time = 0.0

    def now(self):
        return self.time

    def idle(self, until_s):
        self.time = until_s

    def submit(self, command):
        if isinstance(command, Compute) and command.phase is Phase.ENTRY:
            self.step += 1
        self.outstanding.append(command)

    def wait(self) -> list[Event]:
        assert self.outstanding, "the core waits and nothing is outstanding"
        self.time += 1.0
        self.rng.shuffle(self.outstanding)
        count = self.rng.randint(1, min(self.most, len(self.outstanding)))
        done, self.outstanding = self.outstanding[:count], self.outstanding[count:]
        return [self.answer(command) for command in done]

    def answer(self, command) -> Event:
        if isinstance(command, Fetch):
            return FetchDone(command.fetch)
        if isinstance(command, HostCompute):
            return HostDone(command.task)
        layer = command.layer + 1
        if layer >= self.routes.model.n_layers:
            return ComputeDone(command.batch)
        return ComputeDone(command.batch, self.routes.gates(self.step, command.requests, layer))

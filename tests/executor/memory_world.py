"""Slots and a reader without files: experts are copied from memory by threads, after delays of a given kind."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import DEVICE, Experts

from executor.backend import TorchBackend
from executor.experts import ExpertWeights
from executor.reader import Completions
from executor.sampling import Greedy
from policies.core.core import DecisionCore
from policies.core.messages import Fetch, FetchDone, StepBegin
from policies.core.types import ModelSpec
from policies.eviction import LFU, LRU, ExpectedUse
from policies.prefetch import Ranked
from policies.schedule import (
    Alone,
    Auto,
    Fifo,
    LowestLayerFirst,
    LowestLayerThenSrtf,
    OneUnit,
    PerRequest,
    SameLayer,
    Sizes,
)


class MemorySlots:
    """One buffer per slot, overwritten in place as a real arena is."""

    def __init__(self, like: ExpertWeights, slots: int) -> None:
        self.arena = [ExpertWeights(*(torch.full_like(w, float("nan")) for w in like)) for _ in range(slots)]

    def weights(self, slot: int) -> ExpertWeights:
        return self.arena[slot]


class MemoryReader:
    """``fail_at``: the number of the read (from 1) that posts an error; ``silent_at``: that kills its thread."""

    def __init__(
        self,
        experts: Experts,
        slots: MemorySlots,
        done: Completions,
        *,
        threads: int = 4,
        delay_s: float = 0.0,
        seed: int = 0,
        fail_at: int = 0,
        silent_at: int = 0,
    ) -> None:
        self._table = [table[i] for table in experts for i in sorted(table)]
        self._slots, self._done, self._delay_s = slots, done, delay_s
        self._rng, self._fail_at, self._silent_at = random.Random(seed), fail_at, silent_at
        self._todo: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self.reads = 0
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, fetch: Fetch) -> None:
        self._todo.put(fetch)

    def close(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (fetch := self._todo.get()) is not None:
            self.reads += 1
            if self.reads == self._silent_at:
                return
            if self.reads == self._fail_at:
                self._done.put(OSError(5, f"read of expert {fetch.expert} failed"))
                continue
            if self._delay_s:
                time.sleep(self._rng.random() * self._delay_s)
            for to, weights in zip(self._slots.weights(fetch.slot), self._table[fetch.expert], strict=True):
                to.copy_(weights)
            if DEVICE.type == "cuda":
                torch.cuda.current_stream().synchronize()  # a fetch is done when its bytes are there
            self._done.put((FetchDone(fetch.fetch), time.perf_counter()))


SYSTEMS: dict[str, dict[str, Any]] = {
    "llama_cpp": {"partition": OneUnit, "batching": Alone, "eviction": LRU},
    "llama_cpp_lfu": {"partition": OneUnit, "batching": Alone, "eviction": LFU},
    "static": {"partition": lambda: Sizes([2, 3]), "batching": Alone, "eviction": LFU},
    "bevy": {"partition": PerRequest, "batching": SameLayer, "eviction": LFU},
    "bevy_fifo": {"partition": PerRequest, "batching": SameLayer, "eviction": LFU, "order": Fifo},
    "bevy_two": {"partition": PerRequest, "batching": SameLayer, "eviction": LFU, "compute_slots": 2},
    "bevy_retention": {"partition": PerRequest, "batching": SameLayer, "eviction": ExpectedUse},
    "auto": {"partition": Auto, "eviction": ExpectedUse},
    "bevy_prefetch": {"partition": PerRequest, "batching": SameLayer, "eviction": LFU, "prefetch": True},
}


def make_core(system: str, model: ModelSpec, capacity: int, fetch_slots: int = 4) -> DecisionCore:
    s = SYSTEMS[system]
    shape = (model.n_layers, model.n_experts) if s["eviction"] is ExpectedUse else ()
    partition = s["partition"]()
    return DecisionCore(
        model,
        capacity,
        s["eviction"](*shape),
        partition=partition,
        batching=s["batching"]() if "batching" in s else partition,
        compute_order=s.get("order", LowestLayerFirst)(),
        fetch_order=LowestLayerThenSrtf(),
        prefetch=Ranked(max_in_flight=2, hold=False) if s.get("prefetch") else None,
        fetch_slots=fetch_slots,
        compute_slots=s.get("compute_slots", 1),
    )


class Recorder(Greedy):
    """Greedy, and keeps every request's logits."""

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}

    def choose(self, requests: Sequence[int], logits: torch.Tensor) -> list[int]:
        for request, row in zip(requests, logits, strict=True):
            self.logits.setdefault(request, []).append(row.clone())
        return super().choose(requests, logits)


class FixedSteps:
    """``steps`` steps of the same requests, each fed the token that it decoded."""

    def __init__(self, backend: TorchBackend, requests: Sequence[int], steps: int) -> None:
        self._backend, self._requests, self._steps, self._step = backend, tuple(requests), steps, -1

    def begin(self, now_s: float) -> StepBegin | None:
        self._step += 1
        if self._step == self._steps:
            return None
        if self._step:
            for request in self._requests:
                self._backend.decoder.feed(request, self._backend.tokens[request])
        return StepBegin(self._step, self._requests)

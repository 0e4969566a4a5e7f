"""Small worlds for the simulator's tests: devices of round numbers, routing by table, a tape of events."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from conf.devices import DeviceConfig
from conf.job_times import Affine
from conf.models import Attention, ModelConfig
from conf.sharing import DriverSharing, FairShare, GpuSharing
from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone, Gate, StepBegin, StepEnd
from policies.eviction import LFU
from policies.schedule import Alone, LowestLayerFirst, LowestLayerThenSrtf, OneUnit, PerRequest, SameLayer, Sizes
from sim.backend import SimBackend

CONF = Path(__file__).resolve().parents[2] / "conf"
A, B, C, K = 5.0, 1.0, 0.5, 7.0  # seconds: a layer, an expert, a request, the head
SHARE = 0.4  # of A before the experts


@cache
def _read(path):
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{path}.yaml"))


def load(path):
    """A fresh copy of conf/<path>.yaml."""
    return deepcopy(_read(path))


def tiny(n_layers=2, n_experts=8, top_k=1):
    """A model whose expert is 1,000,000 bytes x 3."""
    return ModelConfig(
        name="tiny",
        label="tiny",
        hidden=1000,
        n_layers=n_layers,
        n_experts=n_experts,
        top_k=top_k,
        expert_intermediate=500,
        vocabulary=10,
        quantisation="bf16",
        attention=(Attention("full", n_layers, 1, 1, 10),),
    )


def device(model, link=None, gpu=None, request_s=C, token_s=0.0, driver=None):
    """``link``: 1 MB/s fair among 8 readers unless given, so an expert of 3 MB takes 3 s alone."""
    times = Affine(model.n_layers, A, SHARE, B, lambda tokens: request_s + token_s * tokens, K)
    return DeviceConfig(
        name="round",
        label="round",
        link=link or FairShare(1e6, 8),
        gpu=gpu or GpuSharing(),
        times=times,
        fetch_slots=8,
        times_from="test",
        sources={},
        driver=driver or DriverSharing(),
    )


class Table:
    """Routing ``table[step][request][layer]`` = expert indices; steps repeat."""

    def __init__(self, model, table):
        self.model, self.table = model, table
        self.asked = []

    def gates(self, step, requests, layer):
        self.asked.append((step, requests, layer))
        rows = self.table[step % len(self.table)]
        return tuple(Gate(tuple(self.model.spec.expert(layer, e) for e in rows[r][layer])) for r in requests)


@dataclass
class Steps:
    count: int
    requests: tuple[int, ...]
    done: int = 0

    def begin(self, now_s):
        if self.done == self.count:
            return None
        self.done += 1
        return StepBegin(self.done - 1, self.requests)


@dataclass
class Tape:
    """Takes the place of a journal; keeps intervals."""

    began: dict = field(default_factory=dict)
    computes: list = field(default_factory=list)  # (command, start, end)
    fetches: list = field(default_factory=list)
    ends: list = field(default_factory=list)  # time of each StepEnd

    def record(self, now_s, events, commands):
        for event in events:
            if isinstance(event, ComputeDone):
                self.computes.append((*self.began.pop(("C", event.batch)), now_s))
            elif isinstance(event, FetchDone):
                self.fetches.append((*self.began.pop(("F", event.fetch)), now_s))
        for command in commands:
            if isinstance(command, Compute):
                self.began["C", command.batch] = (command, now_s)
            elif isinstance(command, Fetch):
                self.began["F", command.fetch] = (command, now_s)
            elif isinstance(command, StepEnd):
                self.ends.append(now_s)


def core(model, capacity, kind="bevy", **options):
    units = {"bevy": PerRequest(), "batch": OneUnit()}
    partition = units[kind] if isinstance(kind, str) else Sizes(kind)
    batching = SameLayer() if kind == "bevy" else Alone()
    return DecisionCore(
        model.spec,
        capacity,
        LFU(count="keep"),
        partition=partition,
        batching=batching,
        compute_order=LowestLayerFirst(),
        fetch_order=LowestLayerThenSrtf(),
        **options,
    )


def play(model, dev, table, requests, *, capacity=None, kind="bevy", steps=1, contexts=lambda _: 0, **options):
    """Decode ``steps`` steps; returns the tape and the backend."""
    tape = Tape()
    decider = core(model, capacity or model.spec.n_total, kind, fetch_slots=dev.fetch_slots, **options)
    backend = SimBackend(model, dev, Table(model, table), contexts, jobs_in=decider.jobs_in)
    drive(decider, Steps(steps, tuple(range(requests))), backend, journal=tape, check=True)
    return tape, backend


def union_s(intervals):
    """Length of the union of (start, end) pairs."""
    total = end = 0.0
    for a, b in sorted(intervals):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total

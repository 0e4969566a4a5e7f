"""Small finished runs: the real decision core on a world of fixed durations, without the simulator."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from analysis.metrics import write_metrics
from conf.models import ModelConfig
from policies.build import build_core
from policies.core.driver import drive
from policies.core.journal import Journal
from policies.core.messages import Command, Compute, ComputeDone, Event, Fetch, FetchDone, Gate, StepBegin
from policies.core.types import ModelSpec, Phase

CONF = Path(__file__).resolve().parents[2] / "conf"


class World:
    """Fetches take 1.0 to 1.6 ms and batches 0.4 ms and more; prefetches guess the next layer half right."""

    def __init__(self, model: ModelSpec, predict: bool, seed: int) -> None:
        self.model, self.predict = model, predict
        self.time_s = 0.0
        self.pending: list[tuple[float, int, Event]] = []
        rng = np.random.default_rng(seed)
        shape = (64, 8, model.n_layers, model.n_experts)
        skew = -1.2 * np.log(1 + np.arange(model.n_experts))
        self.choice = np.argsort(-(skew + rng.gumbel(size=shape)), axis=-1)[..., : model.top_k + 2].tolist()
        self.step = 0

    def now(self) -> float:
        return self.time_s

    def idle(self, until_s: float) -> None:
        self.time_s = until_s

    def submit(self, command: Command) -> None:
        event: Event
        if isinstance(command, Fetch):
            event, length_s = FetchDone(command.fetch), 1e-3 + 1e-4 * (command.fetch % 7)
            order = command.fetch
        else:
            assert isinstance(command, Compute)
            gates: tuple[Gate, ...] = ()
            if command.phase is not Phase.HEAD and command.layer + 1 < self.model.n_layers:
                gates = tuple(self.gate(request, command.layer + 1) for request in command.requests)
            event, length_s = ComputeDone(command.batch, gates), 4e-4 + 3e-5 * len(command.experts)
            order = command.batch
        heapq.heappush(self.pending, (self.time_s + length_s, order, event))

    def gate(self, request: int, layer: int) -> Gate:
        def experts(at: int, first: int, last: int) -> list[int]:
            return [self.model.expert(at, e) for e in self.choice[self.step][request][at][first:last]]

        k = self.model.top_k
        guesses = []
        if self.predict and layer + 1 < self.model.n_layers:
            guesses = [(e, 1.0) for e in experts(layer + 1, k // 2, k + 2)]
        return Gate(tuple(experts(layer, 0, k)), tuple(guesses))

    def wait(self) -> list[Event]:
        self.time_s, _, event = heapq.heappop(self.pending)
        found = [event]
        while self.pending and self.pending[0][0] == self.time_s:
            found.append(heapq.heappop(self.pending)[2])
        return found

    def ended(self, begin: StepBegin, _: float) -> None:
        self.step = begin.step + 1


class Steps:
    """Four requests, each step at once after the other."""

    def __init__(self, steps: int) -> None:
        self.left = list(range(steps))

    def begin(self, now_s: float) -> StepBegin | None:
        return StepBegin(self.left.pop(0), (0, 1, 2, 3)) if self.left else None


def _node(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> MakeRun:
    """``make_run(system, seed=0, prefetch=False, study=...)`` gives the folder of a finished run of 8 steps."""
    root = tmp_path_factory.mktemp("runs")

    def make(system: str, seed: int = 0, prefetch: bool = False, study: str = "study", **extra: Any) -> Path:
        folder: Path = root / study / f"{system}-{seed}"
        if folder.exists():
            return folder
        schedule = "batch" if system.startswith("llama") else "bevy"
        oracle = {
            "policy": {"_target_": "policies.prefetch.Ranked", "max_in_flight": 2, "hold": False},
            "predictor": None,
        }
        config = {
            "system": {"name": system, "label": {"bevy": "Bevy"}.get(system, system)},
            "model": _node("model", "gpt_oss_20b"),
            "device": {"name": "bench", "label": "Bench"},
            "workload": {"name": "made", "label": "Made up"},
            "schedule": _node("schedule", schedule),
            "cache": {"fraction": 0.4, "slots": None, "eviction": {"_target_": "policies.eviction.LRU"}},
            "prefetch": oracle if prefetch else {"policy": None, "predictor": None},
            "concurrency": 4,
            "steps": 8,
            "warmup": 3,
            "seed": seed,
            "study": study,
        }
        model = ModelConfig.from_config(config["model"]).spec
        core = build_core(config, model, fetch_slots=4)
        world = World(model, prefetch, seed)
        folder.mkdir(parents=True)
        with Journal(folder / "journal.jsonl.gz", {"config": config, "model": asdict(model), "trace": "x"}) as journal:
            drive(core, Steps(8), world, journal=journal, check=True, on_step=world.ended)
        summary = {
            "backend": "sim",
            "system": system,
            "model": "gpt_oss_20b",
            "device": "bench",
            "workload": "made",
            "concurrency": 4,
            "cache_fraction": 0.4,
            "cache_slots": core.cache.capacity,
            "steps": 8,
            "warmup": 3,
            "seed": seed,
            "runahead": core.runahead,
            **write_metrics(folder, config),
            **extra,
        }
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        (folder / "summary.json").write_text(json.dumps(summary, allow_nan=False))
        return folder

    return make

"""The fitted M6 against what the paper prints of it."""

import pytest
from sim_world import Tape, core, load, union_s

from conf.devices import DeviceConfig
from conf.models import ModelConfig
from policies.core.driver import drive
from sim.backend import SimBackend
from traces.generate import generate
from traces.presets import preset_for
from traces.routing import TraceRouting
from traces.workload import TraceWorkload

STEPS = 12


@pytest.fixture(scope="module")
def world():
    model = ModelConfig.from_config(load("model/gemma4_26b_a4b"))
    traces = [generate(preset_for(model.name, "agentic"), model.spec, 8, STEPS, seed) for seed in range(4)]
    return model, DeviceConfig.from_config(load("device/m6"), model), traces


def compute_s(world, sizes, tokens):
    """Mean compute of a step in fixed groups."""
    model, dev, traces = world
    total_s = 0.0
    for trace in traces:
        workload = TraceWorkload(trace, sum(sizes), STEPS, requests=sum(sizes))
        backend = SimBackend(model, dev, TraceRouting(trace, workload), lambda _: tokens)
        tape = Tape()
        drive(core(model, model.spec.n_total, sizes, fetch_slots=dev.fetch_slots), workload, backend, journal=tape)
        total_s += union_s([(start, end) for _, start, end in tape.computes])
    return total_s / (STEPS * len(traces))


@pytest.mark.parametrize(
    ("sizes", "paper_ms"), [([6], 56.5), ([3, 3], 74.6), ([2, 2, 2], 90.1), ([1, 1, 1, 1, 1, 1], 126.8)]
)
def test_compute_of_six_requests_in_groups(world, sizes, paper_ms):
    """Figure 4a."""
    assert compute_s(world, sizes, 1000) * 1e3 == pytest.approx(paper_ms, rel=0.02)


def test_compute_of_eight_requests_in_one_batch(world):
    """Figure 10a: Bevy's 125.2 ms of compute are 1.6 to 1.7 times the baselines'."""
    assert 125.2 / 1.7 <= compute_s(world, [8], 7000) * 1e3 <= 125.2 / 1.6

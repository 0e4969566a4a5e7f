"""Any order of completions, any capacity from the minimum upward: no deadlock, invariants hold, no pin is left."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import SCHEDULES, AnyOrder, Routes, Steps, make_core

from policies.core.driver import drive
from policies.core.types import ModelSpec
from policies.eviction import LFU, LRU, LeastStale
from policies.prefetch import Ranked

MODEL = ModelSpec("tiny", n_layers=3, n_experts=6, top_k=2)
REQUESTS = range(3)


def run(name, capacity, seed, *, steps=2, fetch_slots=2, check=True, **options):
    routes = Routes(MODEL, seed, predict="prefetch" in options)
    core = make_core(name, MODEL, capacity, fetch_slots=fetch_slots, **options)
    world = AnyOrder(routes, seed)
    drive(core, Steps(steps, REQUESTS), world, check=check)
    assert not core.jobs
    assert all(entry.refs == 0 for entry in core.cache.entries.values())
    assert core.demand_in_flight == 0
    return core


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    capacity=st.integers(MODEL.top_k, MODEL.n_total),
    fetch_slots=st.integers(1, 8),
    compute_slots=st.integers(1, 2),
    seed=st.integers(0, 2**20),
)
def test_any_schedule_any_capacity(name, capacity, fetch_slots, compute_slots, seed):
    core = run(name, capacity, seed, fetch_slots=fetch_slots, compute_slots=compute_slots)
    ahead = len(REQUESTS) * MODEL.top_k <= capacity
    assert core.runahead == ("not used" if name == "llama_cpp" else "on" if ahead else core.runahead)
    assert core.runahead.startswith("off") == (name != "llama_cpp" and not ahead)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["llama_cpp", "bevy"]),
    capacity=st.integers(MODEL.top_k + 2, MODEL.n_total),
    hold=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_prefetches_never_block_a_demand(name, capacity, hold, seed):
    run(name, capacity, seed, fetch_slots=4, prefetch=Ranked(max_in_flight=2, hold=hold))


@pytest.mark.parametrize("eviction", [LRU, lambda: LFU(count="in_cache"), lambda: LeastStale(n_experts=6)])
def test_other_evictions_survive_the_minimum(eviction):
    for seed in range(20):
        run("bevy", len(REQUESTS) * MODEL.top_k, seed, eviction=eviction())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_ten_thousand_completion_orders(name):
    """1,430 orders for each of seven schedules, capacities in turn from the smallest that holds one request."""
    rng = random.Random(name)
    for case in range(1430):
        capacity = MODEL.top_k + case % (MODEL.n_total - MODEL.top_k + 1)
        run(name, capacity, rng.randrange(2**30), steps=1, fetch_slots=1 + case % 5)

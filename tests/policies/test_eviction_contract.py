"""What every eviction policy must do, and the victims of each against a reference that scans everything."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from eviction_world import (
    CAPACITY,
    N_EXPERTS,
    N_LAYERS,
    NaiveFineMoE,
    NaiveLeastStale,
    NaiveLFU,
    NaiveLRU,
    NaivePerLayer,
    SmallCache,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import policies.eviction
from policies.core.messages import Gate
from policies.core.types import CapacityError, UserError
from policies.eviction import LFU, LRU, Belady, ExpectedUse, FineMoEScore, LeastStale, PerLayer, Random
from policies.eviction import lfu as lfu_module
from policies.eviction.smallest import SmallestFirst

SHAPE = {"n_layers": N_LAYERS, "n_experts": N_EXPERTS, "capacity": CAPACITY}
POLICIES = {
    "lru": (LRU, NaiveLRU),
    "lfu keep": (LFU, partial(NaiveLFU, "keep")),
    "lfu in_cache": (partial(LFU, "in_cache"), partial(NaiveLFU, "in_cache")),
    "lfu decay": (partial(LFU, "decay", half_life_steps=2), partial(NaiveLFU, "decay", half_life_steps=2)),
    "least-stale leftmost": (
        partial(LeastStale, N_EXPERTS, "spatial", "leftmost"),
        partial(NaiveLeastStale, "spatial", "leftmost"),
    ),
    "least-stale just passed": (
        partial(LeastStale, N_EXPERTS, "spatial", "just_passed"),
        partial(NaiveLeastStale, "spatial", "just_passed"),
    ),
    "least-stale fifo": (partial(LeastStale, N_EXPERTS, "fifo"), partial(NaiveLeastStale, "fifo", "leftmost")),
    "finemoe float": (FineMoEScore, partial(NaiveFineMoE, "float")),
    "finemoe integer": (partial(FineMoEScore, "integer"), partial(NaiveFineMoE, "integer")),
    "random": (partial(Random, 3), None),
    "per-layer lru": (partial(PerLayer, LRU, **SHAPE), NaivePerLayer),
    "expected use": (partial(ExpectedUse, N_LAYERS, N_EXPERTS), None),  # its formula: test_expected_use.py
    "per-layer random": (partial(PerLayer, Random, **SHAPE), None),
}
# Belady knows the future, which these random calls do not keep to: test_eviction_oracles.py has its tests.
COVERED = {LRU, LFU, LeastStale, FineMoEScore, Random, PerLayer, ExpectedUse, Belady}

layers = st.integers(0, N_LAYERS - 1)
ids = st.integers(0, N_LAYERS * N_EXPERTS - 1)
job = st.tuples(layers, st.dictionaries(st.integers(0, N_EXPERTS - 1), st.integers(1, 3), min_size=1, max_size=3))
scores = st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("job"), job),
        st.tuples(st.just("job"), job),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("prefetch"), ids),
        st.tuples(st.just("observe"), st.lists(st.tuples(ids, scores), max_size=5)),
        st.tuples(st.just("land"), st.none()),
        st.tuples(st.just("step"), st.none()),
    ),
    max_size=120,
)


def play(cache, steps):
    for number, (name, argument) in enumerate(steps):
        match name:
            case "job":
                layer, uses = argument
                cache.begin_job({layer * N_EXPERTS + index: count for index, count in uses.items()})
            case "end":
                cache.end_job(argument)
            case "prefetch":
                cache.prefetch(argument)
            case "observe":
                cache.observe(argument)
            case "land":
                cache.land()
            case "step":
                cache.begin_step(number)


def test_every_policy_is_in_the_contract_suite():
    assert {getattr(policies.eviction, name) for name in policies.eviction.__all__} == COVERED


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, deadline=None)
@given(steps=operations)
def test_victims_are_the_reference_s_and_never_pinned(name, steps):
    make, make_naive = POLICIES[name]
    play(SmallCache(make(), make_naive and make_naive()), steps)


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_run_stays_right_and_small(name, monkeypatch):
    """Thousands of calls: heaps are compacted, decayed counts are scaled down."""
    monkeypatch.setattr(lfu_module, "_RESCALE_AT", 2.0**20)
    import random

    rng = random.Random(7)
    make, make_naive = POLICIES[name]
    cache = SmallCache(make(), make_naive and make_naive())
    for step in range(150):
        cache.begin_step(step)
        for layer in range(N_LAYERS):
            for _ in range(2):
                chosen = rng.sample(range(N_EXPERTS), 2)
                cache.begin_job({layer * N_EXPERTS + e: rng.randint(1, 3) for e in chosen})
                cache.end_job(rng.randrange(3))
            cache.observe([(rng.randrange(N_LAYERS * N_EXPERTS), rng.random()) for _ in range(3)])
            cache.prefetch(rng.randrange(N_LAYERS * N_EXPERTS))
    assert len(cache.victims) > 200
    if isinstance(cache.policy, SmallestFirst):
        assert len(cache.policy._heap) <= 2 * CAPACITY + 1024


@pytest.mark.parametrize("name", POLICIES)
def test_an_evicted_expert_may_come_back(name):
    make, make_naive = POLICIES[name]
    cache = SmallCache(make(), make_naive and make_naive())
    for _ in range(3):
        for index in range(N_EXPERTS):
            for layer in range(N_LAYERS):
                cache.begin_job({layer * N_EXPERTS + index: 1})
                cache.end_job(0)
    assert {*cache.victims} == {*range(N_LAYERS * N_EXPERTS)}


@pytest.mark.parametrize("name", POLICIES)
def test_no_candidate_no_victim(name):
    policy = POLICIES[name][0]()
    assert policy.victim({}, 0) is None
    policy.touch(0, 1)
    assert policy.victim({}, 1) is None


def test_lfu_counts_token_uses_and_keeps_them_as_told():
    """Expert 1 has three uses before it is evicted: it outranks two later uses only where counts are kept."""
    victims = {}
    for count in ("keep", "in_cache"):
        policy = LFU(count)
        policy.touch(1, 3)
        policy.release(1)
        assert policy.victim({1}, 2) == 1
        policy.forget(1)
        policy.touch(2, 2)
        policy.touch(1, 1)
        for expert in (1, 2):
            policy.release(expert)
        victims[count] = policy.victim({1, 2}, 3)
    assert victims == {"keep": 2, "in_cache": 1}


def test_lfu_decay_lets_old_fame_fade():
    """Four uses are worth one after two half-lives, less than two fresh ones."""
    policy = LFU("decay", half_life_steps=1)
    policy.begin_step(0)
    policy.touch(1, 4)
    policy.release(1)
    for step in (1, 2):
        policy.begin_step(step)
    policy.touch(2, 2)
    policy.release(2)
    assert policy.victim({1, 2}, 3) == 1
    assert LFU("keep", None).victim({}, 0) is None


def test_finemoe_integer_loses_what_float_keeps():
    """Scores 0.9 and 0.4 are both cut to zero; then the older touch decides."""
    victims = {}
    for arithmetic in ("float", "integer"):
        policy = FineMoEScore(arithmetic)
        policy.observe(0, Gate((), ((1, 0.9), (2, 0.4))))
        for expert in (1, 2):
            policy.touch(expert, 1)
            policy.release(expert)
        victims[arithmetic] = policy.victim({1, 2}, 3)
    assert victims == {"float": 2, "integer": 1}


def test_per_layer_shares_add_up():
    policy = PerLayer(LRU, n_layers=3, n_experts=4, capacity=8)
    assert [policy.room(layer, 8) for layer in range(3)] == [3, 3, 2]
    for expert in (8, 9):
        assert not policy.full(expert)
        policy.touch(expert, 1)
    assert policy.full(10)
    assert not policy.full(0)
    policy.forget(8)
    assert not policy.full(10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LFU("kept"), "keep, in_cache, decay"),
        (lambda: LFU("decay"), "half_life_steps"),
        (lambda: LFU("keep", 4), "half_life_steps"),
        (lambda: LFU("decay", 0), "at least 1"),
        (lambda: LeastStale(4, "lifo"), "spatial, fifo"),
        (lambda: LeastStale(4, left_order="right"), "leftmost, just_passed"),
        (lambda: FineMoEScore("decimal"), "float, integer"),
    ],
)
def test_wrong_options_are_one_clear_line(make, says):
    with pytest.raises(UserError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_split_needs_a_slot_for_each_layer():
    with pytest.raises(CapacityError, match="at least 4"):
        PerLayer(LRU, n_layers=4, n_experts=4, capacity=3)


SCRIPT = """
import sys
sys.path.insert(0, "tests/policies")
import random
from eviction_world import *
from test_eviction_contract import POLICIES
for name, (make, _) in POLICIES.items():
    rng, cache = random.Random(1), SmallCache(make(), None)
    for step in range(20):
        cache.begin_step(step)
        for layer in range(N_LAYERS):
            cache.begin_job({layer * N_EXPERTS + e: 1 for e in rng.sample(range(N_EXPERTS), 2)})
            cache.end_job(0)
    print(name, cache.victims)
"""


def test_victims_do_not_depend_on_the_hash_seed():
    root = Path(__file__).resolve().parents[2]
    printed = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True, check=True
        )
        printed.add(run.stdout)
    assert len(printed) == 1
    assert "random" in printed.pop()

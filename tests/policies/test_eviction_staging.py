"""Staging slots: what is prefetched replaces nothing until it is used."""

from functools import partial

import pytest
from worlds import AnyOrder, Routes, Steps, make_core

from policies.core.driver import drive
from policies.core.messages import Gate
from policies.core.types import CapacityError, ModelSpec
from policies.eviction import LRU, PerLayer
from policies.eviction.staging import Staging
from policies.prefetch import Ranked


class OneLayer(LRU):
    """LRU that knows its share, as ``PerLayer`` does."""

    def __init__(self, capacity):
        super().__init__()
        self.capacity = capacity

    def full(self, incoming):
        return len(self._order) >= self.capacity


def demand(policy, *experts):
    """The calls of the cache for a job that needs residents only or finds a free slot, up to the end of its use."""
    policy.observe(0, Gate(experts))
    for expert in experts:
        policy.touch(expert, 1)
    for expert in experts:
        policy.release(expert)


def prefetch(policy, expert):
    """A prefetch that lands in a free slot."""
    policy.admit(expert)
    policy.release(expert)


@pytest.fixture
def policy():
    """Two slots and one for staging, full with the experts 1 and 2."""
    policy = Staging(OneLayer, staging=1, capacity=3)
    demand(policy, 1)
    demand(policy, 2)
    return policy


def test_a_prefetch_finds_its_slot_and_a_demand_does_not_take_it(policy):
    assert not policy.full(7)
    policy.observe(0, Gate((3,)))
    assert policy.full(3)
    assert policy.victim({1, 2}, 3) == 1


def test_an_unused_prefetch_makes_room_for_the_next(policy):
    prefetch(policy, 7)
    assert policy.full(8)
    assert policy.victim({1, 2, 7}, 8) == 7
    assert policy.victim({1, 2}, 8) is None, "it replaces nothing else"


def test_a_used_prefetch_changes_places_with_the_oldest(policy):
    prefetch(policy, 7)
    demand(policy, 7)
    assert policy.victim({1, 2, 7}, 8) == 1
    policy.forget(1)
    policy.observe(0, Gate((3,)))
    assert policy.victim({2, 7}, 3) == 2


def test_a_staged_victim_that_is_used_comes_back(policy):
    prefetch(policy, 7)
    demand(policy, 7)  # 1 is staged now
    demand(policy, 1)  # and 2 in its place
    assert policy.victim({1, 2, 7}, 8) == 2


def test_without_a_candidate_it_stays_staged(policy):
    prefetch(policy, 7)
    policy.observe(0, Gate((1, 2, 7)))
    for expert in (1, 2, 7):
        policy.touch(expert, 1)
    policy.release(7)
    assert policy.victim({7}, 8) == 7
    policy.release(1)
    policy.release(2)
    policy.observe(0, Gate((3,)))
    assert policy.victim({1, 2, 7}, 3) == 1


@pytest.mark.parametrize("staging", [0, 3])
def test_impossible_sizes_are_refused(staging):
    with pytest.raises(CapacityError, match="of 3 cache slots are set aside"):
        Staging(OneLayer, staging=staging, capacity=3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [30, 44])
def test_the_core_keeps_its_invariants(seed, capacity):
    model = ModelSpec("small", n_layers=4, n_experts=12, top_k=2)
    layers = partial(PerLayer, LRU, n_layers=4, n_experts=12)
    core = make_core(
        "llama_cpp",
        model,
        capacity,
        Staging(layers, staging=4, capacity=capacity),
        prefetch=Ranked(),
        fetch_slots=4,
    )
    drive(core, Steps(30, range(3)), AnyOrder(Routes(model, seed, predict=True), seed), check=True)

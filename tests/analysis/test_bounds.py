"""The optimum by counts against the walk of a Belady cache, which knows which expert lies in it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from analysis.bounds import lookup_misses
from policies.eviction import Belady
from policies.walk import walk

LOOKUPS = st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True), min_size=1, max_size=60)


@given(LOOKUPS, st.integers(6, 18), st.integers(0, 10))
def test_counts_miss_what_the_walk_misses(lookups, capacity, warmup):
    experts, lengths = np.concatenate(lookups), np.array(list(map(len, lookups)))
    misses = lookup_misses(experts, lengths, capacity)
    assert sum(misses[warmup:]) == walk(lookups, capacity, Belady(lookups), warmup=warmup).misses


def test_two_slots_for_three_experts_in_turn():
    # The farthest of three in turn leaves: after the first two misses every second lookup hits.
    lookups = [0, 1, 2] * 4
    assert lookup_misses(np.array(lookups), np.ones(12, dtype=int), 2) == [1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]

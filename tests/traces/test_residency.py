"""The recorded cache of a real engine, reproduced lookup by lookup."""

from collections import OrderedDict

import numpy as np
import pytest

from policies.eviction import LRU
from traces.format import TraceError
from traces.readers.bigmoe import Residency, recorded_residency
from traces.residency import MIB, lru_budget_bytes, replay


@pytest.mark.parametrize(
    ("name", "budget_mib", "published"), [("gemma", 4000, 0.768), ("qwen", 4000, 0.749), ("gptoss", 3000, 0.324)]
)
def test_our_lru_hits_where_the_engine_hit(shared_data, name, budget_mib, published):
    recorded = recorded_residency(shared_data / "bigmoe_routes" / f"{name}.route.csv")
    assert recorded.hit.mean() == pytest.approx(published, abs=0.001)
    assert lru_budget_bytes(recorded) == budget_mib * MIB
    hit = replay(recorded, budget_mib * MIB, LRU())
    assert np.array_equal(hit, recorded.hit)  # every single lookup, and so the rates of prefill and decode too


def lookups(rng, sizes, batches, largest):
    keys, batch = [], []
    for number in range(batches):
        chosen = rng.choice(len(sizes), rng.integers(1, largest + 1), replace=False)
        keys += chosen.tolist()
        batch += [number] * len(chosen)
    nothing = np.zeros(len(keys), bool)
    return Residency(np.array(keys), np.array(batch), nothing, nothing, sizes)


def test_replay_of_single_lookups_is_plain_lru():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 20)
    recorded = lookups(rng, sizes, 500, 1)
    hit = replay(recorded, 40, LRU())
    cache: OrderedDict[int, None] = OrderedDict()
    for key, got in zip(recorded.keys.tolist(), hit.tolist(), strict=True):
        assert got == (key in cache)
        cache[key] = None
        cache.move_to_end(key)
        while sum(sizes[k] for k in cache) > 40:
            cache.popitem(last=False)


def test_the_budget_is_found_again():
    rng = np.random.default_rng(1)
    sizes = rng.integers(MIB // 8, MIB // 2, 200)
    recorded = lookups(rng, sizes, 3000, 1)
    hit = replay(recorded, 20 * MIB, LRU())
    found = Residency(recorded.keys, recorded.batch, hit, recorded.decode, sizes)
    assert lru_budget_bytes(found) == 20 * MIB


def test_budgets_that_cannot_be(shared_data):
    recorded = recorded_residency(shared_data / "bigmoe_routes" / "gemma.route.csv")
    with pytest.raises(TraceError, match="does not fit"):
        replay(recorded, 10 * MIB, LRU())
    everything = Residency(np.array([0]), np.array([0]), np.array([False]), np.array([True]), np.array([5]))
    with pytest.raises(TraceError, match="never evicted"):
        lru_budget_bytes(everything)


def test_a_recording_without_residency(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text(
        "# route_trace v1\n# model=m arch=a n_layer=1 n_expert=4 n_expert_used=1\n# layer=0 expert_bytes=5\n"
        "phase,step,layer,slot,expert\n1,0,0,0,2\n"
    )
    with pytest.raises(TraceError, match="no column residency"):
        recorded_residency(path)

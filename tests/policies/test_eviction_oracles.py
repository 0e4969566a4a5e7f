"""Hit counts against libCacheSim, against exhaustive search, and against themselves in earlier versions."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.messages import Gate
from policies.core.types import CapacityError, UserError
from policies.eviction import LFU, LRU, Belady, FineMoEScore, LeastStale, PerLayer, Random
from policies.walk import WalkResult, _lockstep, lockstep_batches, walk

NEVER = (1 << 63) - 1  # libCacheSim's mark for "not used again"
FRACTIONS = (0.1, 0.3, 0.5, 0.7)


# ------------------------------------------------------------------ libCacheSim


def zipf_routes():
    """[requests, steps, layers, k]: experts by a Zipf law that each layer permutes."""
    rng = np.random.default_rng(0)
    noise = rng.gumbel(size=(8, 24, 12, 64)) - 0.8 * np.log(np.arange(1, 65))
    names = np.stack([rng.permutation(64) for _ in range(12)])
    return names[np.arange(12)[:, None], np.argsort(-noise, axis=-1)[..., :4]], 64


def gpt_oss_routes(shared_data):
    return np.load(shared_data / "gptoss20b_routes" / "routes_512.npz")["ids"][:8, :16], 32


def deepseek_routes(shared_data):
    file = np.load(shared_data / "deepseekv2lite_routes" / "routes_small.npz")
    length = int(file["lens"].min())
    starts = np.cumsum(file["lens"]) - file["lens"]
    return np.stack([file["ids"][start : start + length] for start in starts[:8]])[:, :16], 64


@pytest.fixture(params=["zipf", "gpt-oss-20b", "DeepSeek-V2-Lite"])
def routes(request):
    """Real or generated routes [requests, steps, layers, k] and the experts a layer."""
    if request.param == "zipf":
        return zipf_routes()
    data = request.getfixturevalue("shared_data")
    return gpt_oss_routes(data) if request.param == "gpt-oss-20b" else deepseek_routes(data)


def lib_hits(name, sequence, capacity):
    lcs = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    position, following = {}, [NEVER] * len(sequence)
    for i in range(len(sequence) - 1, -1, -1):
        following[i] = position.get(sequence[i], NEVER)
        position[sequence[i]] = i
    cache = getattr(lcs, name)(cache_size=capacity, hashpower=13)
    requests = [
        lcs.Request(obj_id=expert, obj_size=1, clock_time=i, next_access_vtime=following[i])
        for i, expert in enumerate(sequence)
    ]
    return sum(map(cache.get, requests))


def make(name, batches):
    return {"LRU": LRU, "LFU": lambda: LFU("in_cache"), "Belady": lambda: Belady(batches)}[name]()


def hits_first(batches, capacity, policy):
    """Each batch's hits, then its misses, for the contents that ``policy`` leads to."""
    sequence, touch = [], policy.touch
    policy.touch = lambda expert, uses: (sequence.append(expert), touch(expert, uses))
    lookup = _lockstep(policy, capacity)
    hits = sum(map(lookup, batches))
    return sequence, hits


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("name", ["LRU", "LFU", "Belady"])
def test_hits_equal_libcachesim_s(routes, name, fraction):
    """One request at a time, in hits-first order: every hit, for every policy and size."""
    ids, n_experts = routes
    batches = lockstep_batches(ids[:4].swapaxes(0, 1), n_experts)
    capacity = max(int(fraction * ids.shape[2] * n_experts), *map(len, batches))
    sequence, _ = hits_first(batches, capacity, make(name, batches))
    singles = [[expert] for expert in sequence]
    assert walk(singles, capacity, make(name, singles)).hits == lib_hits(name, sequence, capacity)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("n_requests", [1, 4, 8])
def test_pinned_batches_lru_equals_libcachesim_s(routes, n_requests, fraction):
    """Hits first, LRU never evicts a member of the batch, so pins change nothing."""
    ids, n_experts = routes
    batches = lockstep_batches(ids[:n_requests].swapaxes(0, 1), n_experts)
    capacity = max(int(fraction * ids.shape[2] * n_experts), *map(len, batches))
    sequence, hits = hits_first(batches, capacity, LRU())
    assert walk(batches, capacity, LRU()).hits == hits == lib_hits("LRU", sequence, capacity)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("n_requests", [1, 4])
def test_pinned_batches_lfu_and_belady_against_libcachesim(routes, n_requests, fraction):
    """Pins bind only where a batch's own newcomer would be the victim.

    LFU then loses or gains a few hits; the optimum without pins is an upper bound of that with pins.
    """
    ids, n_experts = routes
    batches = lockstep_batches(ids[:n_requests].swapaxes(0, 1), n_experts)
    capacity = max(int(fraction * ids.shape[2] * n_experts), *map(len, batches))
    sequence, hits = hits_first(batches, capacity, LFU("in_cache"))
    assert hits == pytest.approx(lib_hits("LFU", sequence, capacity), abs=0.001 * len(sequence))
    sequence, hits = hits_first(batches, capacity, Belady(batches))
    assert hits <= lib_hits("Belady", sequence, capacity)


# ------------------------------------------------------------------ exhaustive search

small_batches = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=2).map(sorted), min_size=1, max_size=9)


def fewest_misses(batches, capacity):
    """Over all choices of victims: contents of the cache -> misses so far."""
    states = {frozenset(): 0}
    for batch in batches:
        following = {}
        for held, misses in states.items():
            missing = len({*batch} - held)
            others = sorted(held - {*batch})
            n_leaving = max(0, len(held) + missing - capacity)
            for leaving in itertools.combinations(others, n_leaving):
                new = (held - {*leaving}) | {*batch}
                following[new] = min(following.get(new, len(batches) * 2), misses + missing)
        states = following
    return min(states.values())


@settings(max_examples=80, deadline=None)
@given(batches=small_batches, capacity=st.integers(2, 4))
def test_belady_is_the_optimum_of_pinned_batches(batches, capacity):
    assert walk(batches, capacity, Belady(batches)).misses == fewest_misses(batches, capacity)


@settings(max_examples=40, deadline=None)
@given(batches=small_batches, capacity=st.integers(2, 4))
def test_no_policy_misses_less_than_belady(batches, capacity):
    bound = walk(batches, capacity, Belady(batches)).misses
    for policy in (LRU(), LFU(), LFU("in_cache"), LeastStale(3), FineMoEScore(), Random(0)):
        assert walk(batches, capacity, policy, batches_per_step=2).misses >= bound


def lfu_keep_misses(batches, capacity):
    """By scanning the cache at every miss."""
    counts, last, held, misses = {}, {}, set(), 0
    time = itertools.count()
    for batch in batches:
        absent = [expert for expert in batch if expert not in held]
        for expert in [expert for expert in batch if expert in held] + absent:
            if expert in absent:
                misses += 1
                if len(held) == capacity:
                    held.remove(min(held - {*batch}, key=lambda e: (counts[e], last[e])))
                held.add(expert)
            counts[expert] = counts.get(expert, 0) + 1
            last[expert] = next(time)
    return misses


@settings(max_examples=80, deadline=None)
@given(batches=small_batches, capacity=st.integers(2, 4))
def test_lfu_keep_equals_a_scan(batches, capacity):
    assert walk(batches, capacity, LFU("keep")).misses == lfu_keep_misses(batches, capacity)


def test_belady_counts_one_use_a_step_and_refuses_a_future_that_is_not_its_own():
    policy = Belady([[0], [1], [0], [1]])
    policy.begin_step(0)
    policy.touch(0, 1)
    policy.touch(0, 1)  # another job of the same step
    policy.begin_step(1)
    policy.touch(0, 1)
    policy.begin_step(2)
    with pytest.raises(UserError, match="more often than its batches say"):
        policy.touch(0, 1)
    with pytest.raises(UserError, match="more often than its batches say"):
        policy.touch(5, 1)


# ------------------------------------------------------------------ identities and golden counts


def generated(n_steps=60, n_layers=6, n_experts=16, n_requests=3, top_k=2):
    """A small skewed sequence that also sticks to the last step's choice."""
    rng = np.random.default_rng(2024)
    popularity = rng.gumbel(size=(n_layers, n_experts))
    score = popularity + rng.normal(size=(n_requests, n_layers, n_experts))
    steps = []
    for _ in range(n_steps):
        score = popularity + 0.8 * (score - popularity) + 0.6 * rng.normal(size=score.shape)
        steps.append(np.argsort(-score, axis=-1)[..., :top_k])
    return lockstep_batches(np.stack(steps), n_experts)


@pytest.mark.parametrize("capacity", [4, 10, 24, 60])
def test_least_stale_fifo_is_lru_for_one_request_in_lockstep(capacity):
    """The stale queue is sorted by pass and then by order in the pass, which is the order of last use."""
    batches = generated(n_requests=1)
    fifo = walk(batches, capacity, LeastStale(16, "fifo"), batches_per_step=6)
    assert fifo == walk(batches, capacity, LRU(), batches_per_step=6)


@pytest.mark.parametrize("left_order", ["leftmost", "just_passed"])
def test_a_prefetch_does_not_push_out_what_its_layer_may_ask_for_next(left_order):
    """The gate of layer 0 has chosen; a prefetch for layer 1 takes the place of a passed layer's expert."""
    policy = LeastStale(4, left_order=left_order)
    policy.begin_step(0)
    for expert in (0, 4):  # of layers 0 and 1
        policy.touch(expert, 1)
    policy.begin_step(1)
    policy.observe(0, Gate((1,)))
    assert policy.victim({0: None, 4: None}, 5) == 0
    policy.observe(0, Gate((6,)))  # layer 1: both are passed
    assert policy.victim({0: None, 4: None}, 5) == (0 if left_order == "leftmost" else 4)


@settings(max_examples=100, deadline=None)
@given(batches=small_batches, capacity=st.integers(2, 5))
def test_lru_s_own_lookup_equals_the_contract_s_calls(batches, capacity):
    fast, slow = LRU(), LRU()
    assert list(map(fast.lockstep(capacity), batches)) == list(map(_lockstep(slow, capacity), batches))
    assert list(fast._order) == list(slow._order)


GOLDEN = {
    "lru": (LRU, 99),
    "lfu keep": (LFU, 131),
    "lfu in_cache": (lambda: LFU("in_cache"), 192),
    "lfu decay": (lambda: LFU("decay", half_life_steps=8), 105),
    "least-stale leftmost": (lambda: LeastStale(16), 131),
    "least-stale just passed": (lambda: LeastStale(16, left_order="just_passed"), 107),
    "random": (lambda: Random(5), 214),
    "per-layer lru": (lambda: PerLayer(LRU, 6, 16, 38), 101),
    "belady": (lambda: Belady(generated()), 51),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_misses(name):
    """A cache of 40% after 20 steps of warm-up; a change of a policy's decisions shows here."""
    make_policy, misses = GOLDEN[name]
    result = walk(generated(), 38, make_policy(), warmup=20 * 6, batches_per_step=6)
    assert (result.lookups, result.misses) == (947, misses)


def test_a_walk_counts_after_its_warm_up():
    batches = [[0, 1], [0, 2], [0, 1]]
    assert walk(batches, 2, LRU()) == WalkResult(lookups=6, hits=2)
    assert walk(batches, 2, LRU(), warmup=1) == WalkResult(lookups=4, hits=2)
    assert walk(batches, 2, LFU(), warmup=9).hit_rate == 0.0
    assert walk([], 2, LFU()).misses == 0


def test_a_batch_that_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="use at least 3"):
        walk([[0, 1, 2]], 2, LRU())
    with pytest.raises(CapacityError, match="beside the 3 of its batch"):
        walk([[0, 1, 2]], 4, PerLayer(LRU, 2, 4, 4))


def test_batches_list_each_expert_once_in_order_of_request_and_rank():
    routes = np.array([[[[3, 1], [0, 2]], [[1, 2], [2, 3]]]])  # one step, two requests, two layers, k = 2
    assert lockstep_batches(routes, 4) == [[3, 1, 2], [4, 6, 7]]

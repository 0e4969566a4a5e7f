"""Lookups per second of the untimed cache walk and of libCacheSim's Python binding, fed the same requests.

Usage: python benchmarks/cache_walk.py [routes=FILE.npz] [rounds=7] [steps=400]

``routes``: an npz whose ``ids`` are layer-local experts [requests, steps, layers, k]; without it a seeded
Zipf sequence.  The three ways run in turn, round after round, in one process: our walk; libCacheSim
with prebuilt Request objects; libCacheSim with one Request that is reused.  A ratio above 1 means that
the walk is faster; the table shows the median of the rounds and their spread.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import libcachesim as lcs
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from policies.core.types import ExpertId
from policies.eviction import LRU
from policies.walk import lockstep_batches, walk

N_REQUESTS, N_STEPS, N_LAYERS, N_EXPERTS, TOP_K = 8, 400, 24, 32, 4


def zipf_routes(n_steps: int, seed: int = 0) -> np.ndarray:
    """Routes [requests, steps, layers, k] whose experts follow a Zipf law, permuted for each layer."""
    rng = np.random.default_rng(seed)
    popularity = np.arange(1, N_EXPERTS + 1) ** -0.8
    ranks = np.log(popularity) + rng.gumbel(size=(N_REQUESTS, n_steps, N_LAYERS, N_EXPERTS))
    chosen = np.argsort(-ranks, axis=-1)[..., :TOP_K]
    names = np.stack([rng.permutation(N_EXPERTS) for _ in range(N_LAYERS)])
    return names[np.arange(N_LAYERS)[:, None], chosen]


def hits_first(batches: Sequence[Sequence[ExpertId]], capacity: int) -> list[ExpertId]:
    """The order in which a cache without pins must see the requests: each batch's hits, then its misses."""
    order: OrderedDict[ExpertId, None] = OrderedDict()
    out: list[ExpertId] = []
    for batch in batches:
        sequence = [e for e in batch if e in order] + [e for e in batch if e not in order]
        for expert in sequence:
            order[expert] = None
            order.move_to_end(expert)
        while len(order) > capacity:
            order.popitem(last=False)
        out += sequence
    return out


def timed(run: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def compare(batches: Sequence[Sequence[ExpertId]], capacity: int, rounds: int) -> None:
    sequence = hits_first(batches, capacity)
    requests = [lcs.Request(obj_id=expert, obj_size=1, clock_time=i) for i, expert in enumerate(sequence)]
    reused = lcs.Request(obj_id=0, obj_size=1)

    def run_walk() -> int:
        return walk(batches, capacity, LRU()).hits

    def run_prebuilt() -> int:
        return sum(map(lcs.LRU(cache_size=capacity, hashpower=14).get, requests))

    def run_reused() -> int:
        get, hits = lcs.LRU(cache_size=capacity, hashpower=14).get, 0
        for expert in sequence:
            reused.obj_id = expert
            hits += get(reused)
        return hits

    ways = (run_walk, run_prebuilt, run_reused)
    seconds = []
    for _ in range(rounds):
        hits, taken = zip(*(timed(way) for way in ways), strict=True)
        assert len({*hits}) == 1, f"hit counts differ: {hits}"
        seconds.append(taken)
    times = np.array(seconds)
    speed = len(sequence) / np.median(times, axis=0) / 1e6
    ratios = times[:, 1:] / times[:, :1]
    shown = [f"{np.median(r):.2f} ({r.min():.2f}-{r.max():.2f})" for r in ratios.T]
    union = len(sequence) / len(batches)
    print(
        f"{union:5.1f}  {capacity:5d}  {hits[0] / len(sequence):.3f}  "
        f"{speed[0]:6.2f} {speed[1]:9.2f} {speed[2]:7.2f}  {shown[0]:>19}  {shown[1]:>19}"
    )


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    rounds, steps = int(given.get("rounds", 7)), int(given.get("steps", N_STEPS))
    routes = np.load(given["routes"])["ids"][:, :steps] if "routes" in given else zipf_routes(steps)
    n_layers, n_experts = routes.shape[2], int(routes.max()) + 1
    print(" mean                Mlookups/s                walk faster than libCacheSim by")
    print("batch  slots    hit    walk  prebuilt  reused             prebuilt               reused")
    for n_requests in (1, 8):
        batches = lockstep_batches(routes[:n_requests].swapaxes(0, 1), n_experts)
        for fraction in (0.3, 0.7):
            capacity = int(fraction * n_layers * n_experts)
            compare(batches, capacity, rounds)


if __name__ == "__main__":
    main()

"""The offline optimum of a run's own demand: the fetches of a cache that knew the future.

Owns the translation of finished steps to the lookups of an untimed cache walk.  Knows nothing of time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from analysis.account import Step
from policies.core.types import ModelSpec
from policies.eviction import Belady
from policies.walk import walk


def optimal_fetches(steps: Sequence[Step], model: ModelSpec, capacity: int, warmup: int) -> dict[str, Any]:
    """``belady_fetches_per_step`` over the steps after the first ``warmup``, and ``belady_order``.

    The lookups are the union of all requests' experts, layer by layer, as conventional batching makes them.
    ``belady_order`` is ``lockstep`` if the run made them in that order: then no run of this demand that fetches only
    on demand fetches less in all (warm-up included; the number is the optimum's share after it).  It is
    ``serial_order`` if requests ran ahead of each other: then the number is the optimum of the serial order, which
    a run need not respect.  The number is None if a layer's union exceeds the cache, because one lookup could not
    hold it.
    """
    order = "lockstep" if all(step.lockstep for step in steps) else "serial_order"
    lookups = [[*step.demands(model.n_experts)] for step in steps]
    batches = [batch for step in lookups for batch in step]
    if max(map(len, batches), default=0) > capacity:
        return {"belady_fetches_per_step": None, "belady_order": order}
    demand = [array("i", numbers).tobytes() for numbers in (map(len, batches), chain.from_iterable(batches))]
    misses = _optimum(*demand, capacity, sum(map(len, lookups[:warmup])))
    return {"belady_fetches_per_step": misses / (len(steps) - warmup), "belady_order": order}


@lru_cache(maxsize=8)
def _optimum(lengths: bytes, experts: bytes, capacity: int, warmup: int) -> int:
    """Misses after ``warmup`` lookups; kept, because the systems of a sweep are compared on the same demand."""
    numbers = iter(array("i", experts))
    batches = [[next(numbers) for _ in range(length)] for length in array("i", lengths)]
    return walk(batches, capacity, Belady(batches), warmup=warmup).misses

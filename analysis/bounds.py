"""The offline optimum of a run's own demand: the fetches of a cache that knew the future.

Owns the translation of finished steps to the lookups of an untimed cache, and the count of its misses.  Knows nothing
of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.account import Step
from policies.core.types import ModelSpec


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
    experts = np.concatenate([np.array(step.needed, dtype=np.int64) for step in steps])
    of_step = np.repeat(np.arange(len(steps)), [len(step.needed) for step in steps])
    lookups, lengths = np.unique(of_step * model.n_layers + experts // model.n_experts, return_counts=True)
    if lengths.max(initial=0) > capacity:
        return {"belady_fetches_per_step": None, "belady_order": order}
    misses = lookup_misses(experts, lengths, capacity)
    measured = sum(misses[np.searchsorted(lookups, warmup * model.n_layers) :])
    return {"belady_fetches_per_step": measured / (len(steps) - warmup), "belady_order": order}


def lookup_misses(experts: npt.NDArray[Any], lengths: npt.NDArray[Any], capacity: int) -> list[int]:
    """The misses of each lookup, if what is needed again last leaves first (``policies.eviction.Belady``).

    ``experts``: those of all lookups in their order, distinct within a lookup; ``lengths``: how many each lookup has,
    none above ``capacity``.  All of a lookup are pinned until its end.

    Which expert lies in the cache does not matter here, only when it is needed next: experts that are needed next by
    the same lookup are equals.  So a count of the cached experts for each coming lookup is the whole state.
    """
    never = len(lengths)  # as if all were needed once more, after the end
    of_lookup = np.repeat(np.arange(never), lengths)
    by_expert = np.argsort(experts, kind="stable")
    again = experts[by_expert[:-1]] == experts[by_expert[1:]]
    following = np.full(len(experts), never)
    following[by_expert[:-1][again]] = of_lookup[by_expert[1:][again]]
    cached = [0] * (never + 1)
    farthest: list[int] = []  # the lookups that experts are cached for, negative
    free = capacity
    misses = []
    for now, needed_next in enumerate(np.split(following, np.cumsum(lengths)[:-1])):
        hits, cached[now] = cached[now], 0
        misses.append(len(needed_next) - hits)
        free -= misses[-1]
        while free < 0:
            leave = min(cached[-farthest[0]], -free)
            cached[-farthest[0]] -= leave
            free += leave
            if not cached[-farthest[0]]:
                heappop(farthest)
        for lookup in needed_next.tolist():
            if not cached[lookup]:
                heappush(farthest, -lookup)
            cached[lookup] += 1
    return misses

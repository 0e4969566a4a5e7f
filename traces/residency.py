"""The cache behind a recorded residency: which byte budget it had, and what a policy of ours would have kept.

Evidence that our eviction policies behave as a real engine's do.  Knows the policy only through its socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from policies.core.protocols import EvictionPolicy
from traces.format import Array, TraceError
from traces.readers.bigmoe import Residency

MIB = 1 << 20


def lru_budget_bytes(recorded: Residency) -> int:
    """Budget of the LRU cache that produced a recording: whole MiB, as engines take it.

    Under LRU an expert is resident exactly if the distinct experts used since, itself included, fit the budget; so
    the nearest re-reference that missed bounds the budget from above.
    """
    last_use = np.full(len(recorded.sizes_bytes), -1, np.int64)
    nearest = None
    for begin, end in _batches(recorded):
        keys = recorded.keys[begin:end]
        for key in keys[~recorded.hit[begin:end] & (last_use[keys] >= 0)]:
            distance = int(recorded.sizes_bytes[last_use >= last_use[key]].sum())
            nearest = distance if nearest is None else min(nearest, distance)
        last_use[keys] = np.arange(begin, end)
    if nearest is None:
        raise TraceError("the recorded cache never evicted what was used again: its budget cannot be told")
    return nearest // MIB * MIB


def replay(recorded: Residency, budget_bytes: int, policy: EvictionPolicy) -> Array:
    """Which lookups hit in a cache of ``budget_bytes`` under ``policy``: bool [lookups].

    The absent experts of a batch evict what the batch does not need until they fit; then all of the batch count as
    used, in the recorded order.
    """
    sizes = recorded.sizes_bytes.tolist()
    hit = np.zeros(len(recorded.keys), bool)
    resident: set[int] = set()
    free = budget_bytes
    for begin, end in _batches(recorded):
        needed = recorded.keys[begin:end].tolist()
        hit[begin:end] = [key in resident for key in needed]
        evictable = resident.difference(needed)
        for key in needed:
            if key in resident:
                continue
            while free < sizes[key]:
                victim = policy.victim(evictable, key)
                if victim is None:
                    raise TraceError(f"a batch of {len(needed)} experts does not fit {budget_bytes} bytes")
                policy.forget(victim)
                evictable.remove(victim)
                resident.remove(victim)
                free += sizes[victim]
            free -= sizes[key]
        for key in needed:
            policy.touch(key, 1)
            policy.release(key)
        resident.update(needed)
    return hit


def _batches(recorded: Residency) -> Iterator[tuple[int, int]]:
    bounds = np.flatnonzero(np.diff(recorded.batch, prepend=-1, append=-1))
    return pairwise(bounds.tolist())

"""Stragglers: what each of several requests misses in the cache that they share, and how that hangs together.

Owns the walk that looks over a policy's shoulder.  Is handed the policy; knows no time.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, ExpertId
from policies.walk import walk
from traces import statistics
from traces.format import Array, Trace

REQUESTS, FRACTION, GROUPS = 4, 0.3, 4
"""Requests together, cache as a share of all experts, draws of requests."""


def straggling(
    trace: Trace, steps: int, seed: int, policy: Callable[[], EvictionPolicy]
) -> dict[str, Array | float] | None:
    """``statistics.straggling`` of the second half of ``steps`` lockstep steps; None if the union does not fit."""
    groups = []
    for group in range(GROUPS):
        ids = statistics.lockstep(trace, REQUESTS, steps, seed + group)
        watched = _Watched(policy(), ids, trace.model.n_total)
        try:
            walk(statistics.batches(ids), int(FRACTION * trace.model.n_total), watched, batches_per_step=1)
        except CapacityError:
            return None
        groups.append(watched.misses[len(ids) // 2 :])
    return statistics.straggling(groups)


class _Watched(EvictionPolicy):
    """A policy that notes what each request misses, on a walk with one (step, layer) batch a "step".

    ``ids``: [steps, requests, layers, k], what the walk looks up; ``misses``: int64 [steps, requests, layers].
    """

    def __init__(self, policy: EvictionPolicy, ids: Array, n_total: int) -> None:
        self._policy, self._ids = policy, ids
        self._resident = np.zeros(n_total, bool)
        self.misses = np.zeros(ids.shape[:3], np.int64)

    def begin_step(self, step: int) -> None:
        """A batch is about to be looked up."""
        at, layer = divmod(step, self._ids.shape[2])
        self.misses[at, :, layer] = (~self._resident[self._ids[at, :, layer]]).sum(-1)

    def touch(self, expert: ExpertId, uses: int) -> None:
        """Every needed expert is touched, and so is in the cache."""
        self._resident[expert] = True
        self._policy.touch(expert, uses)

    def release(self, expert: ExpertId) -> None:
        """Pass on."""
        self._policy.release(expert)

    def victim(self, evictable: Container[ExpertId], incoming: ExpertId) -> ExpertId | None:
        """Pass on."""
        return self._policy.victim(evictable, incoming)

    def forget(self, expert: ExpertId) -> None:
        """It has left the cache."""
        self._resident[expert] = False
        self._policy.forget(expert)

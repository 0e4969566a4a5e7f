"""Untimed cache walk: what a cache of some size and policy would hold, without jobs, link or clock.

Owns the contents of the cache during the walk.  Knows nothing of requests: a batch is the distinct
experts of one (step, layer) lookup over all requests that move together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, ExpertId

Lookup = Callable[[Sequence[ExpertId]], int]
"""Looks up one batch and returns its hits."""


@runtime_checkable
class Lockstep(Protocol):
    """A policy that can serve whole batches faster than by one call a touch; the decisions are the same."""

    def lockstep(self, capacity: int) -> Lookup:
        """The lookup of a cache of ``capacity`` slots, over the policy's own state."""
        ...


@dataclass(frozen=True, slots=True)
class WalkResult:
    """Counts after the warm-up.  ``lookups``: experts asked for, each once a batch."""

    lookups: int
    hits: int

    @property
    def misses(self) -> int:
        """Experts that had to be fetched."""
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """Resident of needed; zero without any lookup."""
        return self.hits / self.lookups if self.lookups else 0.0


def walk(
    batches: Sequence[Sequence[ExpertId]],
    capacity: int,
    policy: EvictionPolicy,
    *,
    warmup: int = 0,
    batches_per_step: int | None = None,
) -> WalkResult:
    """Look up ``batches`` in lockstep order: in each the hits, then the misses, all pinned until its end.

    ``batches``: distinct experts, each of which counts as one use.  ``policy``: a fresh one.  ``warmup``:
    batches that are not counted.  ``batches_per_step``: layers of the model, for policies that must know
    when a step begins.  Raises CapacityError if a batch does not fit.
    """
    largest = max(map(len, batches), default=0)
    if largest > capacity:
        raise CapacityError(
            f"a batch needs {largest} experts at one time and the cache has {capacity} slots; use at least {largest}"
        )
    lookup = policy.lockstep(capacity) if isinstance(policy, Lockstep) else _lockstep(policy, capacity)
    hits: list[int] = []
    if batches_per_step is None:
        hits += map(lookup, batches)
    else:
        for first in range(0, len(batches), batches_per_step):
            policy.begin_step(first // batches_per_step)
            hits += map(lookup, batches[first : first + batches_per_step])
    return WalkResult(sum(map(len, batches[warmup:])), sum(hits[warmup:]))


def lockstep_batches(routes: npt.NDArray[Any], n_experts: int) -> list[list[ExpertId]]:
    """The batches of requests that move together, step by step and layer by layer.

    ``routes``: chosen experts [steps, requests, layers, k], layer-local.  A batch lists each expert once,
    in the order of the requests and of their router ranks, as the core would.
    """
    steps, _, layers, _ = routes.shape
    ids = routes.astype(np.int64) + np.arange(layers)[:, None] * n_experts
    rows = ids.swapaxes(1, 2).reshape(steps * layers, -1).tolist()
    shared = list(range(layers * n_experts))  # one integer object an expert: half the memory, faster lookups
    return [[shared[expert] for expert in dict.fromkeys(row)] for row in rows]


def _lockstep(policy: EvictionPolicy, capacity: int) -> Lookup:
    """The calls that the expert cache of the core would make, one batch at a time."""
    touch, victim, forget, release, full = policy.touch, policy.victim, policy.forget, policy.release, policy.full
    unpinned: set[ExpertId] = set()  # between two batches: all that is resident

    def lookup(batch: Sequence[ExpertId]) -> int:
        absent = [expert for expert in batch if expert not in unpinned]
        present = [expert for expert in batch if expert in unpinned]
        free = capacity - len(unpinned)
        unpinned.difference_update(present)
        for expert in present:
            touch(expert, 1)
        for expert in absent:
            if free and not full(expert):
                free -= 1
            else:
                leaving = victim(unpinned, expert)
                if leaving is None:
                    raise CapacityError(
                        f"the policy finds no room for expert {expert} beside the {len(batch)} of its batch; "
                        f"use more than {capacity} slots"
                    )
                unpinned.remove(leaving)
                forget(leaving)
            touch(expert, 1)
        unpinned.update(batch)
        for expert in batch:
            release(expert)
        return len(present)

    return lookup

"""Prefetch precision at fixed coverage (paper §2.4, Figure 2), on arrays.

Owns the definition of precision, the residents of a cache at prediction time and the randomised cache.  Knows neither
predictors nor files.

Axes: [steps, layers, experts]; a row of experts belongs to the target layer of one prediction for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core.protocols import EvictionPolicy
from policies.core.types import CapacityError, ExpertId

Flags = npt.NDArray[np.bool_]
Order = npt.NDArray[np.int16]

CHUNK_STEPS = 16  # rows at a time that stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over predictions.

    ``demanded``: experts that the target needs and the cache lacks; ``selected``: what had to be prefetched to cover
    the asked share of them; ``covered``: the demanded ones among these.
    """

    selected: int = 0
    covered: int = 0
    demanded: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.selected + other.selected, self.covered + other.covered, self.demanded + other.demanded)

    @property
    def precision(self) -> float:
        """Needed of selected; NaN if nothing was demanded."""
        return self.covered / self.selected if self.selected else float("nan")

    @property
    def coverage(self) -> float:
        """Share of the demand that was covered: at least what was asked for, since experts are whole."""
        return self.covered / self.demanded if self.demanded else float("nan")


def uses_of(experts: npt.NDArray[Any], n_experts: int) -> npt.NDArray[np.uint16]:
    """How many requests of a step need each expert [steps, layers, E], from [steps, requests, layers, k]."""
    steps, _, layers, _ = experts.shape
    rows = np.arange(steps * layers).reshape(steps, 1, layers, 1) * n_experts
    counts = np.bincount((experts + rows).ravel(), minlength=steps * layers * n_experts)
    return counts.reshape(steps, layers, n_experts).astype(np.uint16)


def residents(
    policy: EvictionPolicy, capacity: int, uses: npt.NDArray[np.uint16], distances: Sequence[int]
) -> dict[int, Flags]:
    """What the cache holds of layer l + distance when the gates of layer l have chosen, before anything is fetched.

    Returns for each distance [steps, layers - distance, E], by source layer.  The requests move in lockstep; each
    (step, layer) first touches the residents that it needs, then inserts the others in the place of victims, as the
    expert cache does.  Nothing is prefetched: what the cache holds does not depend on the predictor.

    Raises CapacityError if the experts of one (step, layer) do not fit.
    """
    steps, layers, experts = uses.shape
    largest = int((uses > 0).sum(axis=-1).max())
    if largest > capacity:
        raise CapacityError(
            f"one layer needs {largest} experts at one time and the cache has {capacity} slots; use larger sizes"
        )
    held = np.zeros((layers, experts), bool)
    flat = held.reshape(-1)
    out = {d: np.zeros((steps, max(0, layers - d), experts), bool) for d in distances}
    evictable: dict[ExpertId, None] = {}
    free = capacity
    for step in range(steps):
        policy.begin_step(step)
        for layer in range(layers):
            for distance, shown in out.items():
                if layer + distance < layers:
                    shown[step, layer] = held[layer + distance]
            needed = np.flatnonzero(uses[step, layer])
            ids, counts = (needed + layer * experts).tolist(), uses[step, layer][needed].tolist()
            there = flat[layer * experts + needed].tolist()
            for expert, count, present in zip(ids, counts, there, strict=True):
                if present:
                    policy.touch(expert, count)
                    del evictable[expert]
            for expert, count, present in zip(ids, counts, there, strict=True):
                if present:
                    continue
                if free and not policy.full(expert):
                    free -= 1
                else:
                    flat[_evict(policy, evictable, expert)] = False
                policy.touch(expert, count)
                flat[expert] = True
            for expert in ids:
                evictable[expert] = None
                policy.release(expert)
    return out


def _evict(policy: EvictionPolicy, evictable: dict[ExpertId, None], incoming: ExpertId) -> ExpertId:
    victim = policy.victim(evictable, incoming)
    if victim is None:
        raise CapacityError(f"the eviction policy finds no room for expert {incoming}; use larger sizes")
    del evictable[victim]
    policy.forget(victim)
    return victim


def ranking(scores: npt.NDArray[np.float32]) -> Order:
    """Experts by descending score, equal ones by index."""
    return np.argsort(-scores, axis=-1, kind="stable").astype(np.int16)


def count(order: Order, needed: Flags, resident: Flags, coverage: float) -> Counts:
    """Walk each row's ranking past the residents until ``coverage`` of the nonresident demand is met.

    Rows without such demand do not count.
    """
    total = Counts()
    for first in range(0, len(order), CHUNK_STEPS):
        part = slice(first, first + CHUNK_STEPS)
        index = order[part].astype(np.intp)
        candidate = ~np.take_along_axis(resident[part], index, axis=-1)
        wanted = np.take_along_axis(needed[part], index, axis=-1) & candidate
        demanded = wanted.sum(axis=-1)
        goal = np.ceil(coverage * demanded - 1e-9).astype(np.int64)  # 0.8 of 5 is 4, not 5
        covered = wanted.cumsum(axis=-1, dtype=np.int16)
        before = covered - wanted < goal[..., None]  # up to and with the expert that meets the goal
        total += Counts(int((candidate & before).sum()), int(goal.sum()), int(demanded.sum()))
    return total


def lots(needed: Flags, rng: np.random.Generator) -> Order:
    """A random order of each row's experts, the unneeded before the needed."""
    draws = rng.random(needed.shape, dtype=np.float32)
    draws += needed
    return np.argsort(draws, axis=-1).astype(np.int16)


def randomised(order: Order, needed: Flags, resident: Flags) -> Flags:
    """A cache that holds as many needed and as many unneeded experts in each row, but others, by ``lots``."""
    right = (needed & resident).sum(axis=-1)[..., None]
    wrong = (~needed & resident).sum(axis=-1)[..., None]
    unneeded = (~needed).sum(axis=-1)[..., None]
    place = np.arange(needed.shape[-1])
    drawn = (place < wrong) | ((place >= unneeded) & (place < unneeded + right))
    out = np.zeros_like(resident)
    np.put_along_axis(out, order.astype(np.intp), drawn, axis=-1)
    return out

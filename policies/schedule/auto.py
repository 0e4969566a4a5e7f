"""Auto: batching, static groups or Bevy, whichever the steps themselves have shown to be the shortest here.

Owns the trials and the choice.  Knows what past steps took, and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from policies.core.progress import Job
from policies.core.types import RequestId, UserError
from policies.schedule.batching import Alone, SameLayer
from policies.schedule.partition import PerRequest, Sizes
from policies.schedule.step_times import Estimate, StepTimes


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to run a step."""

    sizes: tuple[int, ...]
    batching: Alone | SameLayer


class Auto:
    """Switches between steps; the partition and the batching of a run in one.

    A contextual bandit with optimism [Li et al., WWW 2010: LinUCB], whose context is the number of fetches and of
    experts in late steps.  Each way is tried ``trials`` times, unless computing alone rules it out: static groups that
    compute for longer than the best way takes in all are left alone, and smaller ones with them; it is tried
    again when the number of fetches has moved far from those of all its steps.  From then on a step
    runs in the way whose time, less ``boldness`` deviations of its estimate, is the shortest: the best so far, or one
    that may well be better.  What was learnt is kept for each number of requests.  A step without a duration (a cache
    that is being filled) teaches nothing.
    """

    def __init__(self, trials: int = 2, boldness: float = 1.0) -> None:
        if trials < 1 or boldness < 0:
            raise UserError(f"Auto: trials {trials}, boldness {boldness}; expected at least 1 trial, a number from 0")
        self._trials, self._boldness = trials, boldness
        self._known: dict[int, tuple[list[_Way], StepTimes]] = {}  # by the number of requests
        self._ways, self._times = self._of(1)
        self._now = 0

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """The units of this step."""
        self._ways, self._times = self._of(len(requests))
        self._now = self._choose()
        way = self._ways[self._now]
        if len(way.sizes) == len(requests):
            return PerRequest().units(requests)
        return Sizes(way.sizes).units(requests)

    def group(self, lead: Job, ready: Sequence[Job]) -> Sequence[Job]:
        """As the way of this step batches."""
        return self._ways[self._now].batching.group(lead, ready)

    def learn(self, seconds: float, busy_s: float, fetches: int, experts: int) -> None:
        """The step took ``seconds``."""
        if seconds > 0:
            self._times.add(self._now, seconds, busy_s, fetches, experts)

    def _of(self, requests: int) -> tuple[list[_Way], StepTimes]:
        if requests not in self._known:
            ways = _ways(requests)
            alone = [len(way.sizes) == 1 for way in ways]
            merges = [isinstance(way.batching, SameLayer) for way in ways]
            self._known[requests] = ways, StepTimes(alone, merges)
        return self._known[requests]

    def _choose(self) -> int:
        counts, found = self._times.counts, self._times.estimates()
        tried = [way for way in found if way is not None]
        if not tried:
            return 0
        best = min(tried, key=lambda way: way.seconds)
        able, floor_s = [], 0.0
        for i, way in enumerate(found):
            if way is not best and isinstance(self._ways[i].batching, Alone):
                larger_s, own_s = floor_s, way.floor_s if way is not None else 0.0
                floor_s = max(larger_s, own_s)  # smaller groups never compute for less time
                if larger_s >= best.seconds or (way is not None and own_s * way.sure >= best.seconds):
                    continue
            able.append(i)
        unknown = [i for i in able if (way := found[i]) is None or counts[i] < self._trials or not way.near]
        if unknown:
            return min(unknown, key=lambda i: counts[i])
        return min(able, key=self._hoped_s(found).__getitem__)

    def _hoped_s(self, found: Sequence[Estimate | None]) -> list[float]:
        return [max(way.seconds - self._boldness * way.deviation, way.floor_s) if way else inf for way in found]


def _ways(requests: int) -> list[_Way]:
    """Batching, Bevy (of one request the same), then static groups, larger ones first."""
    halves = [size for size in ((requests + 1) // 2, requests // 2) if size]
    pairs = [2] * (requests // 2) + [1] * (requests % 2)
    sizes = dict.fromkeys([(requests,), tuple(halves), tuple(pairs)])
    batching, *groups = (_Way(parts, Alone()) for parts in sizes)
    bevy = [_Way((1,) * requests, SameLayer())] if requests > 1 else []
    return [batching, *bevy, *groups]

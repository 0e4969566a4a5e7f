"""What steps took in each of several ways to run them, and what the next one would take.

Owns the record of past steps and the estimate.  Knows no clock and does not choose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log, sqrt

_MEMORY = 40
"""Steps of each way that count."""
_LATE = 6
"""Steps that say what the next one will be like."""
_KEEP = 0.97
"""What a step counts against the one after it."""
_FORGET = 0.998
"""What a bound that rests on one step counts a step later: nothing is ruled out for ever by one."""
_FEW = 4
"""So many fetches more or less are no difference."""
_PRIOR, _PRIOR_EXACT = 0.05, 0.01
"""The weight of the slopes that all ways have in common, in the slopes of one."""
_HELD_UP = 0.3
"""A step that takes by so much of a step's time longer than the shortest tells nothing of its way."""
_LEAST, _MOST = 0.003, 0.05
"""Bounds of the deviation of one step, as shares of its time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of a step: the expected ones, their deviation, and what computing alone takes (0: not known).

    ``sure``: the share of ``floor_s`` that still counts; something may have held up the only step that it rests on.
    ``near``: some step of the way had about as many fetches as late ones.
    """

    seconds: float
    deviation: float
    floor_s: float
    sure: float
    near: bool


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    seconds: float
    busy_s: float
    fetches: int
    experts: int


Slopes = tuple[float, float]
"""Seconds over fetches and over experts, both as shares of the level."""


class _Moments:
    """A way's steps around their weighted means; ``products``: (ff, fe, ee, fs, es), of fetches, experts, seconds."""

    def __init__(self, points: Sequence[tuple[float, float, float, float]]) -> None:
        self._points = points  # weight, fetches and experts beyond the level, seconds
        self.weight = sum(w for w, _, _, _ in points)
        self.f, self.e, self.s = [sum(point[0] * point[i] for point in points) / self.weight for i in (1, 2, 3)]
        about = [(w, f - self.f, e - self.e, s - self.s) for w, f, e, s in points]
        products = [(w * f * f, w * f * e, w * e * e, w * f * s, w * e * s) for w, f, e, s in about]
        self.products: list[float] = [sum(column) for column in zip(*products, strict=True)]

    def spread(self, prior: float) -> float:
        """Variance of the plane at the level, in that of one step."""
        ff, fe, ee = self.products[0] + prior, self.products[1], self.products[2] + prior
        leverage = self.f * self.f * ee - 2 * self.f * self.e * fe + self.e * self.e * ff
        return 1 / self.weight + leverage / (ff * ee - fe * fe)

    def calm(self, slopes: Slopes) -> _Moments:
        """Without the steps that something else has held up: those far above the shortest, all brought to the level."""
        by_f, by_e = slopes
        brought = [s - by_f * f - by_e * e for _, f, e, s in self._points]
        limit = min(brought) + _HELD_UP * max(0.0, self.s - by_f * self.f - by_e * self.e)
        if max(brought) <= limit:
            return self
        calm = [1.0 if s <= limit else 0.01 for s in brought]
        return _Moments([(c * w, f, e, s) for c, (w, f, e, s) in zip(calm, self._points, strict=True)])

    def misfit(self, slopes: Slopes) -> float:
        """Weighted sum of the squared distances from the plane."""
        by_f, by_e = slopes
        off = [(w, s - self.s - by_f * (f - self.f) - by_e * (e - self.e)) for w, f, e, s in self._points]
        return sum(w * s * s for w, s in off)


def _slopes(products: Sequence[float], weight: float, drawn_to: Slopes = (0.0, 0.0)) -> Slopes:
    """By least squares, with ``drawn_to`` weighing ``weight``; more fetches never take less time."""
    ff, fe, ee, fs, es = products
    ff, ee, fs, es = ff + weight, ee + weight, fs + weight * drawn_to[0], es + weight * drawn_to[1]
    det = ff * ee - fe * fe
    return max(0.0, (ee * fs - fe * es) / det), (ff * es - fe * fs) / det


def _far(fetches: float, level: float) -> float:
    return abs(log((fetches + _FEW) / (level + _FEW)))


class StepTimes:
    """A plane for each way: seconds over the step's fetches and the experts that its requests choose.

    Both vary more between steps than between ways, so ways are compared where the late steps are.  Without overlap the
    plane is nearly exact, and steps that are old or far off count almost as much (``exact``).  With overlap the seconds
    are convex in the fetches: a plane through steps with other numbers of fetches runs too low there, so that a way
    looks better than it is until it is tried, and steps count the less the farther off and the older they are.
    ``merges``: the way's batches grow as less is missing, so that what it computed in other steps bounds nothing.
    """

    def __init__(self, exact: Sequence[bool], merges: Sequence[bool]) -> None:
        self._exact, self._merges = exact, merges
        self._seen: list[deque[_Step]] = [deque(maxlen=_MEMORY) for _ in exact]
        self._late: deque[_Step] = deque(maxlen=_LATE)
        self._steps = 0

    @property
    def counts(self) -> list[int]:
        """Steps that count, of each way."""
        return [len(steps) for steps in self._seen]

    def add(self, way: int, seconds: float, busy_s: float, fetches: int, experts: int) -> None:
        """A step has been run in ``way``."""
        step = _Step(self._steps, seconds, busy_s, fetches, experts)
        self._steps += 1
        self._seen[way].append(step)
        self._late.append(step)

    def estimates(self) -> list[Estimate | None]:
        """A step like the late ones, in each way; None: not tried."""
        tried = [way for way, steps in enumerate(self._seen) if steps]
        return [*map(dict(zip(tried, self._estimates(tried), strict=True)).get, range(len(self._seen)))]

    def _estimates(self, tried: Sequence[int]) -> list[Estimate]:
        if not tried:
            return []
        fetches = sum(step.fetches for step in self._late) / len(self._late)
        experts = sum(step.experts for step in self._late) / len(self._late)
        ways = [self._moments(way, fetches, experts) for way in tried]
        by_f, by_e = _slopes([sum(column) for column in zip(*[way.products for way in ways], strict=True)], 1e-4)
        common = by_f, max(0.0, by_e)
        weights = [_PRIOR_EXACT if self._exact[way] else _PRIOR for way in tried]
        slopes = [_slopes(way.products, weight, common) for way, weight in zip(ways, weights, strict=True)]
        ways = [way.calm(slope) for way, slope in zip(ways, slopes, strict=True)]
        slopes = [_slopes(way.products, weight, common) for way, weight in zip(ways, weights, strict=True)]
        misfits = [way.misfit(slope) for way, slope in zip(ways, slopes, strict=True)]
        total = sum(way.weight for way in ways)
        variance = sum(misfits) / max(total - len(ways), 1.0)  # of a step of any way
        expected = [  # a plane drawn far may end below zero
            max(0.1 * way.s, way.s - by_f * way.f - by_e * way.e)
            for way, (by_f, by_e) in zip(ways, slopes, strict=True)
        ]
        least, most = _LEAST * min(expected), _MOST * min(expected)
        near = [
            self._exact[way] or any(_far(step.fetches, fetches) <= 1.0 for step in self._seen[way]) for way in tried
        ]
        out = []
        for i, way in enumerate(ways):
            own = sqrt((misfits[i] + variance) / (way.weight + 1.0))
            deviation = min(max(own, least), most) * sqrt(way.spread(weights[i]))
            seen = self._seen[tried[i]]
            sure = _FORGET ** (self._steps - seen[-1].number) if len(seen) == 1 else 1.0
            floor_s = self._floor_s(tried[i], experts)
            seconds = max(expected[i], sure * floor_s)  # a plane drawn far may end below what computing takes
            out.append(Estimate(seconds, deviation, floor_s, sure, near[i]))
        return out

    def _moments(self, way: int, fetches: float, experts: float) -> _Moments:
        keep, reach = (0.99, 2.5) if self._exact[way] else (_KEEP, 1.5)
        points = []
        for step in self._seen[way]:
            weight = keep ** (self._steps - step.number) * exp(-_far(step.fetches, fetches) / reach)
            beyond = (step.fetches - fetches) / (fetches + _FEW), (step.experts - experts) / max(experts, 1.0)
            points.append((weight, *beyond, step.seconds))
        return _Moments(points)

    def _floor_s(self, way: int, experts: float) -> float:
        """The least of late; of batching, which is never far from the best, from two steps on."""
        seen = self._seen[way]
        if self._merges[way] or (self._exact[way] and len(seen) < 2):
            return 0.0
        late = islice(reversed(seen), 8)
        return min(step.busy_s * min(1.0, experts / max(step.experts, 1)) for step in late)

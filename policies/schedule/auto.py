"""Auto: batching, static groups or Bevy, whichever the steps themselves have shown to be the shortest here.

Owns the trials and the choice.  Knows durations and numbers of fetches of past steps, and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from policies.core.progress import Job
from policies.core.types import RequestId, UserError
from policies.schedule.batching import Alone, SameLayer
from policies.schedule.partition import PerRequest, Sizes


@dataclass(slots=True)
class _Arm:
    """One way to run a step, and what its last steps took: (fetches, seconds)."""

    sizes: tuple[int, ...]
    batching: Alone | SameLayer
    seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=16))


class Auto:
    """Switches between steps; the partition and the batching of a run in one.

    Ways are tried in rounds: each gets ``trials`` steps, in turns, and between the rounds a step runs in the way that
    would be shortest at the number of fetches that steps need now.  How many a step needs differs more between steps
    than between ways, so a way's time is read from a straight line of seconds over fetches through its own steps of
    this round.  Ways within ``tie`` of the shortest count as equal, and the fewest groups win: requests
    that stay together look for their experts in the cache at one time, and miss less.  A round takes in all ways at
    first, then those at most ``worse`` slower than the best; the first comes with the first step, the second after
    ``pause`` steps, when the cache is warm, and each later one after four times as many as the one before.  A step
    without a duration (a cache that is being filled) teaches nothing.
    """

    def __init__(self, trials: int = 3, tie: float = 0.01, pause: int = 12, worse: float = 0.1) -> None:
        if trials < 2 or pause < 1 or not 0 <= tie < 1 or not 0 <= worse < 1:
            raise UserError(
                f"Auto: trials {trials}, pause {pause}, tie {tie}, worse {worse}; expected at least 2 trials, at least "
                f"1 step, and shares from 0 to below 1"
            )
        self._trials, self._tie, self._pause, self._worse = trials, tie, pause, worse
        self._arms: list[_Arm] = []
        self._tried: list[_Arm] = []  # of this round
        self._requests = 0
        self._steps = self._next_round = 0
        self._fetches: deque[int] = deque(maxlen=2 * trials)
        self._now: _Arm | None = None

    def units(self, requests: tuple[RequestId, ...]) -> Sequence[tuple[RequestId, ...]]:
        """The units of this step."""
        if len(requests) != self._requests:  # another number of requests: what was learnt says little
            self._requests, self._arms = len(requests), _arms(len(requests))
            self._tried, self._next_round = self._arms, self._steps + self._pause
        elif self._steps >= self._next_round:
            self._begin_round()
        arm = self._now = self._choose()
        if len(arm.sizes) == len(requests):
            return PerRequest().units(requests)
        return Sizes(arm.sizes).units(requests)

    def group(self, lead: Job, ready: Sequence[Job]) -> Sequence[Job]:
        """As the way of this step batches."""
        assert self._now is not None
        return self._now.batching.group(lead, ready)

    def learn(self, seconds: float, fetches: int) -> None:
        """The step took ``seconds``."""
        assert self._now is not None
        if seconds > 0:
            self._steps += 1
            self._fetches.append(fetches)
            self._now.seen.append((fetches, seconds))

    def _begin_round(self) -> None:
        expected = self._expected_s()
        limit = min(expected) * (1 + self._worse)
        self._tried = [arm for arm, s in zip(self._arms, expected, strict=True) if s <= limit]
        for arm in self._tried:
            arm.seen.clear()
        self._next_round = 4 * self._next_round + self._pause

    def _choose(self) -> _Arm:
        fewest = min(self._tried, key=lambda arm: len(arm.seen))
        if len(fewest.seen) < self._trials:
            return fewest
        expected = self._expected_s()
        limit = min(expected) * (1 + self._tie)
        return next(arm for arm, s in zip(self._arms, expected, strict=True) if s <= limit)

    def _expected_s(self) -> list[float]:
        """Seconds of a step in each way at the fetches of late.

        The slope is the way's own, drawn towards the one of all ways where its fetches hardly vary.
        """
        level = _mean(self._fetches)
        samples = [list(arm.seen) for arm in self._arms]
        means = [(_mean([f for f, _ in arm]), _mean([s for _, s in arm])) for arm in samples]
        moments = []
        for arm, (f0, s0) in zip(samples, means, strict=True):
            moments.append((sum((f - f0) ** 2 for f, _ in arm), sum((f - f0) * (s - s0) for f, s in arm)))
        variance, covariance = (sum(part) / len(moments) for part in zip(*moments, strict=True))
        out = []
        for (xx, xy), (f0, s0) in zip(moments, means, strict=True):
            weight = xx + variance / 4
            slope = max(0.0, (xy + covariance / 4) / weight) if weight else 0.0
            out.append(max(0.0, s0 + slope * (level - f0)))
        return out


def _arms(requests: int) -> list[_Arm]:
    """Fewest units first: batching, halves, pairs, singles that never merge (of two requests only), Bevy."""
    halves = [size for size in ((requests + 1) // 2, requests // 2) if size]
    pairs = [2] * (requests // 2) + [1] * (requests % 2)
    sizes = dict.fromkeys([(requests,), tuple(halves), tuple(pairs)])
    singles = (1,) * requests
    return [*(_Arm(parts, Alone()) for parts in sizes), *([_Arm(singles, SameLayer())] if requests > 1 else [])]


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)

"""The paced link on a clock that only the test moves."""

from __future__ import annotations

import heapq

import pytest

from executor.pace import PacedLink
from policies.core.types import UserError


class Clock:
    """Time that passes in sleeps only, each of which overshoots."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.overshoot_s = overshoot_s

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds + self.overshoot_s


def test_transfers_queue_up() -> None:
    clock = Clock()
    link = PacedLink(1000.0, clock, clock.sleep)
    assert [link.reserve(500, 100.0) for _ in range(3)] == [100.5, 101.0, 101.5]
    assert link.reserve(500, 200.0) == 200.5  # an idle link does not save up


def test_a_transfer_is_held_until_it_is_due() -> None:
    clock = Clock()
    link = PacedLink(1000.0, clock, clock.sleep)
    link.hold(link.reserve(500, clock.now_s))
    assert clock.now_s == 100.5
    assert link.late == 0


def test_late_transfers_are_counted() -> None:
    clock = Clock()
    link = PacedLink(1000.0, clock, clock.sleep)
    due_s = link.reserve(500, clock.now_s)
    clock.now_s += 0.75
    link.hold(due_s)
    assert clock.now_s == 100.75
    assert (link.late, link.late_s) == (1, pytest.approx(0.25))


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("read_s", [0.0002, 0.0019])
def test_the_rate_is_kept_within_two_per_cent(depth: int, read_s: float) -> None:
    """Threads that wake 0.15 ms late at 2 ms a transfer: the delay shows once, it does not add up.

    ``depth`` transfers are outstanding; a completed one is replaced when its thread has woken.
    """
    rate, n_bytes, wake_s, n = 1e9, 2_000_000, 0.00015, 1000
    link = PacedLink(rate, lambda: 0.0)
    done: list[float] = []
    outstanding: list[float] = []
    for _ in range(depth):
        heapq.heappush(outstanding, max(link.reserve(n_bytes, 0.0), read_s) + wake_s)
    while len(done) < n:
        now_s = heapq.heappop(outstanding)
        done.append(now_s)
        heapq.heappush(outstanding, max(link.reserve(n_bytes, now_s), now_s + read_s) + wake_s)
    assert n * n_bytes / done[-1] == pytest.approx(rate, rel=0.02)


def test_sleeps_that_end_early_are_repeated() -> None:
    clock = Clock(overshoot_s=-0.1)
    link = PacedLink(1000.0, clock, lambda s: clock.sleep(s + 0.11 if s < 0.2 else s))
    link.hold(link.reserve(1000, clock.now_s))
    assert clock.now_s >= 101.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(UserError, match="paced link"):
        PacedLink(rate)

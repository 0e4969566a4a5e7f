"""The paced link on a clock that only the test moves."""

from __future__ import annotations

import queue
import random
from collections import deque
from math import inf
from threading import Event

import pytest
import simpy

from conf.sharing import FairShare, fixed_slots, one_at_a_time
from executor.pace import SLACK_S, Instant, PacedLink
from policies.core.messages import Fetch, FetchDone, FetchKind
from policies.core.types import UserError
from sim.link import Link


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


def paced(sharing: FairShare, clock: Clock) -> tuple[PacedLink, Instant]:
    moment = Instant(SLACK_S, clock)
    moment.saw(clock())
    return PacedLink(sharing, moment, clock, clock.sleep), moment


def test_transfers_queue_up_and_an_idle_link_does_not_save_up() -> None:
    clock = Clock()
    link, moment = paced(one_at_a_time(1000.0), clock)
    assert [due(clock()) for due in [link.begin(500) for _ in range(3)]] == [100.5, 101.0, 101.5]
    assert clock.now_s == 101.5
    clock.now_s = 200.0
    moment.saw(200.0)
    assert link.begin(500)(200.0) == 200.5
    assert link.late == 0


def test_what_comes_later_shares_the_link_and_moves_the_end() -> None:
    clock = Clock()
    link, moment = paced(FairShare(1000.0, readers=2), clock)
    first = link.begin(1000)
    clock.now_s = 100.5
    moment.saw(100.5)
    second, third = link.begin(1000), link.begin(250)
    assert first(100.6) == 101.5  # half alone, half shared
    assert third(100.6) == 102.0  # it waited for a reader, then shared with what is left of the second
    assert second(100.6) == 102.25
    assert link.late == 0


def test_late_transfers_are_counted() -> None:
    clock = Clock()
    link, _ = paced(one_at_a_time(1000.0), clock)
    due = link.begin(500)
    clock.now_s += 0.75
    assert due(clock()) == 100.75
    assert clock.now_s == 100.75
    assert (link.late, link.late_s) == (1, pytest.approx(0.25))


def test_transfers_that_end_together_are_not_late_because_one_thread_waits_for_all() -> None:
    """Their bytes were there early; that the thread wakes late from the first one's sleep is not the link's."""
    clock = Clock(overshoot_s=0.01)
    link, _ = paced(FairShare(1000.0, readers=4), clock)
    dues = [link.begin(250) for _ in range(4)]
    assert [due(100.1) for due in dues] == [101.0] * 4
    assert (link.late, link.late_s) == (0, 0.0)


def test_what_waits_until_it_is_due_does_not_block_who_brings_the_next() -> None:
    pytest.importorskip("torch")
    from executor.copier import Holder

    clock, released = Clock(), Event()
    done: queue.SimpleQueue = queue.SimpleQueue()
    link, _ = paced(one_at_a_time(1000.0), clock)
    holder, dues = Holder(done), [link.begin(500) for _ in range(3)]

    def first(there_s: float) -> float:
        assert released.wait(10)
        return dues[0](there_s)

    for number, due in enumerate([first, *dues[1:]]):
        holder.hold(Fetch(number, 0, 0, FetchKind.DEMAND), 100.0, due)
    assert done.empty()  # all three are handed over, the first is not due
    released.set()
    assert [done.get(timeout=10) for _ in range(3)] == [(FetchDone(i), 100.5 + 0.5 * i) for i in range(3)]
    holder.close()
    assert not holder.alive


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("sharing", [one_at_a_time(1e9), FairShare(1e9, 8), fixed_slots(1e9, 8)])
def test_the_rate_is_kept_although_threads_wake_late(depth: int, sharing: FairShare) -> None:
    """Reader and driver together take 0.3 ms after each end, at 2 ms a transfer: it must not add up."""
    n_bytes, n = 2_000_000, 1000
    clock = Clock(overshoot_s=0.00015)
    link, moment = paced(sharing, clock)
    flying = deque(link.begin(n_bytes) for _ in range(depth))
    end_s = 0.0
    for _ in range(n):
        end_s = flying.popleft()(clock())
        moment.saw(end_s)
        clock.now_s += 0.00015
        flying.append(link.begin(n_bytes))
    share = min(1.0, depth * sharing.rate(depth) / 1e9)  # fewer transfers than fixed slots cannot fill the link
    assert n * n_bytes / (end_s - 100.0) == pytest.approx(share * 1e9, rel=0.002)


@pytest.mark.parametrize(
    "sharing",
    [
        FairShare(1e6, 4),
        FairShare(1e6, 8, per_reader_bytes_per_s=2e5),
        FairShare(1e6, 4, latency_s=0.01, read_splits=2),
    ],
)
def test_ends_are_those_of_the_simulated_link(sharing: FairShare) -> None:
    rng = random.Random(1)
    asked, at_s = [], 0.0
    for _ in range(60):
        at_s += rng.choice([0.0, 0.01, 0.3])
        asked.append((at_s, float(rng.randrange(1, 50_000))))
    env, right = simpy.Environment(), {}
    simulated = Link(env, sharing, lambda read: right.__setitem__(read, env.now))
    for number, (begin_s, n_bytes) in enumerate([*asked, (inf, 0.0)]):
        simulated.arm()
        while env.peek() < begin_s:
            env.step()
            simulated.arm()
        if begin_s < inf:
            if begin_s > env.now:
                env.run(until=begin_s)
            simulated.start(number, n_bytes)

    clock = Clock()
    clock.now_s = 0.0
    link, moment = paced(sharing, clock)
    flying = []
    for begin_s, n_bytes in asked:
        moment.saw(begin_s)
        clock.now_s = begin_s
        flying.append(link.begin(n_bytes))
    ends = []
    for due in flying:
        clock.now_s = 0.0
        ends.append(due(0.0))
    assert ends == pytest.approx([right[number] for number in range(len(asked))], abs=1e-9)


def test_sleeps_that_end_early_are_repeated() -> None:
    clock = Clock(overshoot_s=-0.1)
    moment = Instant(SLACK_S, clock)
    moment.saw(100.0)
    link = PacedLink(one_at_a_time(1000.0), moment, clock, lambda s: clock.sleep(s + 0.11 if s < 0.2 else s))
    link.begin(1000)(clock())
    assert clock.now_s >= 101.0


def test_a_driver_that_stalls_does_not_get_its_time_back() -> None:
    clock = Clock()
    moment = Instant(SLACK_S, clock)
    moment.saw(99.9)
    assert moment.now() == pytest.approx(100.0 - SLACK_S)
    moment.saw(99.9995)
    assert moment.now() == 99.9995
    assert Instant(clock=clock).now() == 100.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(UserError, match="paced link"):
        PacedLink(one_at_a_time(rate))

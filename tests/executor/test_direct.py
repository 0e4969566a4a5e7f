"""Fetches that the driver follows itself."""

from __future__ import annotations

import queue
from typing import Any

import pytest

pytest.importorskip("torch")

from conf.sharing import FairShare
from executor.direct import DirectReader
from executor.host import HostTimes
from executor.inbox import Inbox
from executor.pace import Instant, PacedLink
from policies.core.messages import Event, Fetch, FetchDone
from policies.core.types import FetchKind


class FakeCopies:
    """Copies that end when they are told to."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.waiting = 0
        self.closed = False

    def start(self, piece: int, slot: int) -> None:
        self.started.append((piece, slot))

    def ended(self) -> int:
        count, self.waiting = self.waiting, 0
        return count

    def close(self) -> None:
        self.closed = True


def submitted(n: int, **options: Any) -> tuple[FakeCopies, DirectReader]:
    copies = FakeCopies()
    reader = DirectReader(copies, 500, **options)
    for number in range(1, n + 1):
        reader.submit(Fetch(number, 10 * number, number - 1, FetchKind.DEMAND))
    return copies, reader


def done(reader: DirectReader) -> list[Event]:
    return [posted[0] for posted in reader.poll() if not isinstance(posted, BaseException)]


def test_copies_are_started_at_once_and_told_in_order() -> None:
    copies, reader = submitted(3)
    assert copies.started == [(10, 0), (20, 1), (30, 2)]
    assert done(reader) == []
    copies.waiting = 2
    assert done(reader) == [FetchDone(1), FetchDone(2)]
    copies.waiting = 1
    assert done(reader) == [FetchDone(3)]
    assert (reader.counters.fetches, reader.counters.bytes_read) == (3, 1500)
    reader.close()
    assert copies.closed


def test_a_paced_copy_waits_until_it_is_due() -> None:
    """1000 bytes a second shared by two: 500 bytes each end together after one second; the third after half of one."""
    now_s = 100.0
    instant = Instant(clock=lambda: now_s)
    link = PacedLink(FairShare(1000.0, readers=2), instant, clock=lambda: now_s)
    copies, reader = submitted(3, begin=lambda: link.begin(500), clock=lambda: now_s)
    copies.waiting = 3
    assert reader.poll() == []
    now_s = 101.0
    assert reader.poll() == [(FetchDone(1), 101.0), (FetchDone(2), 101.0)]
    now_s = 101.4
    assert reader.poll() == []
    now_s = 101.7
    assert reader.poll() == [(FetchDone(3), 101.5)]
    assert link.late == 0


def test_a_copy_that_is_longer_than_the_link_allows_counts_when_it_has_ended() -> None:
    now_s = 100.0
    instant = Instant(clock=lambda: now_s)
    link = PacedLink(FairShare(1000.0, readers=1), instant, clock=lambda: now_s)
    copies, reader = submitted(1, begin=lambda: link.begin(500), clock=lambda: now_s)
    now_s = 100.75
    copies.waiting = 1
    assert reader.poll() == [(FetchDone(1), 100.75)]
    assert (link.late, link.late_s) == (1, pytest.approx(0.25))


def test_the_inbox_asks_until_something_has_ended() -> None:
    """It never blocks on its queue, and still hears what is posted there."""
    asked = 0

    def poll() -> list[tuple[Event, float]]:
        nonlocal asked
        asked += 1
        return [(FetchDone(7), 1.0)] if asked == 4 else []

    posts: queue.SimpleQueue[tuple[Event, float] | BaseException] = queue.SimpleQueue()
    inbox = Inbox(posts, HostTimes(), {}, Instant(), poll)
    inbox.receive(0.0)
    assert (asked, inbox.at_hand()) == (1, [])
    assert inbox.take() == [FetchDone(7)]
    posts.put(OSError("read failed"))
    with pytest.raises(OSError, match="read failed"):
        inbox.take()

"""The link: closed forms, and fair sharing against a fluid computation without virtual time."""

import random

import pytest
import simpy

from conf.sharing import FairShare, fixed_slots, one_at_a_time
from sim.link import Link


def run(sharing, reads):
    """Landing time of each read; ``reads`` are (start, size) in order of start."""
    env = simpy.Environment()
    landed, busy = {}, []
    link = Link(env, sharing, lambda read: landed.__setitem__(read, env.now), lambda on: busy.append((env.now, on)))

    todo = sorted(enumerate(reads), key=lambda item: item[1][0])
    while todo or len(landed) < len(reads):
        link.arm()
        if todo and todo[0][1][0] <= env.peek():
            start = todo[0][1][0]
            if start > env.now:
                env.run(until=start)
            while todo and todo[0][1][0] == start:
                read, (_, size) = todo.pop(0)
                link.start(read, size)
        else:
            env.step()
    return [landed[read] for read in range(len(reads))], link, busy


def test_one_read():
    assert run(FairShare(100.0, 8), [(0, 50)])[0] == [0.5]
    assert run(FairShare(100.0, 8, per_reader_bytes_per_s=20.0), [(0, 50)])[0] == [2.5]
    assert run(FairShare(100.0, 8, latency_s=0.25), [(0, 50)])[0] == [0.75]


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_reads_together_share_the_rate(n):
    assert run(FairShare(100.0, 8), [(0, 50)] * n)[0] == pytest.approx([n * 0.5] * n)


def test_a_late_read_takes_half_of_the_rate():
    # 100 bytes in 1 s alone, then 50 bytes/s each: the first ends 1 s later, when the second has 100 bytes left.
    assert run(FairShare(100.0, 8), [(0, 150), (1, 150)])[0] == pytest.approx([2.0, 3.0])


def test_the_cap_of_a_reader_leaves_rate_unused():
    # One reader gets 40, two get 40 each, three share 100.
    assert run(FairShare(100.0, 8, 40.0), [(0, 80)] * 2)[0] == pytest.approx([2.0, 2.0])
    assert run(FairShare(100.0, 8, 40.0), [(0, 100)] * 3)[0] == pytest.approx([3.0] * 3)


def test_a_striped_read_uses_several_readers():
    assert run(FairShare(100.0, 8, 20.0, read_splits=4), [(0, 80)])[0] == [1.0]
    assert run(FairShare(100.0, 8, 20.0, read_splits=4), [(0, 80)] * 2)[0] == pytest.approx([1.6, 1.6])
    assert FairShare(100.0, 8, read_splits=4).slots == 2


def test_reads_beyond_the_readers_wait_in_order():
    times, _, _ = run(FairShare(100.0, 2), [(0, 100)] * 5)
    assert times == pytest.approx([2.0, 2.0, 4.0, 4.0, 5.0])


def test_one_at_a_time_serves_in_order():
    assert run(one_at_a_time(100.0, latency_s=0.5), [(0, 50), (0, 100), (0.1, 50)])[0] == pytest.approx([1.0, 2.5, 3.5])


def test_fixed_slots_do_not_lend_their_rate():
    assert run(fixed_slots(80.0, 8), [(0, 20)])[0] == [2.0]
    assert run(fixed_slots(80.0, 8), [(0, 20)] * 8)[0] == pytest.approx([2.0] * 8)
    assert run(fixed_slots(80.0, 8), [(0, 20), (1, 20)])[0] == pytest.approx([2.0, 3.0])


def test_latency_holds_a_reader_but_no_rate():
    # The second read seeks until 1.5 s; the first has the whole rate until then and ends at 1.0 + 0.5.
    times, _, _ = run(FairShare(100.0, 8, latency_s=0.5), [(0, 100), (1, 100)])
    assert times == pytest.approx([1.5, 2.5])


def fluid(sharing, reads):
    """Landing times by stepping from one change to the next with remaining bytes: no virtual time, no heap."""
    waiting = sorted(range(len(reads)), key=lambda i: (reads[i][0], i))
    queue, seeking, left, landed = [], {}, {}, {}
    now = 0.0
    while len(landed) < len(reads):
        while waiting and reads[waiting[0]][0] <= now + 1e-12:
            queue.append(waiting.pop(0))
        while queue and len(seeking) + len(left) < sharing.readers // sharing.read_splits:
            seeking[queue.pop(0)] = now + sharing.latency_s
        for i in [i for i, until in seeking.items() if until <= now + 1e-12]:
            del seeking[i]
            left[i] = float(reads[i][1])
        share = 0.0
        if left:
            total = min(sharing.bytes_per_s, len(left) * sharing.read_splits * sharing.per_reader_bytes_per_s)
            share = total / len(left)
        changes = [reads[i][0] - now for i in waiting[:1]]
        changes += [until - now for until in seeking.values()]
        changes += [bytes_left / share for bytes_left in left.values()]
        step = min(changes)
        now += step
        left = {i: bytes_left - share * step for i, bytes_left in left.items()}
        for i in [i for i, bytes_left in left.items() if bytes_left <= 1e-9]:
            del left[i]
            landed[i] = now
    return [landed[i] for i in range(len(reads))]


@pytest.mark.parametrize("seed", range(40))
def test_fair_sharing_equals_the_fluid(seed):
    rng = random.Random(seed)
    readers = rng.choice([1, 2, 4, 8])
    sharing = FairShare(
        bytes_per_s=rng.uniform(5, 50),
        readers=readers,
        per_reader_bytes_per_s=rng.choice([float("inf"), rng.uniform(2, 20)]),
        latency_s=rng.choice([0.0, rng.uniform(0, 0.5)]),
        read_splits=rng.choice([s for s in (1, 2, 4) if s <= readers]),
    )
    now, reads = 0.0, []
    for _ in range(60):
        now += rng.choice([0.0, 0.0, rng.expovariate(1.0), rng.expovariate(0.05)])
        reads.append((now, rng.choice([10.0, 10.0, rng.uniform(1, 40)])))
    times, link, busy = run(sharing, reads)
    assert times == pytest.approx(fluid(sharing, reads), rel=1e-9, abs=1e-9)

    size = sum(size for _, size in reads)
    assert link.bytes_landed == pytest.approx(size, rel=1e-12)
    assert [on for _, on in busy] == [True, False] * (len(busy) // 2)
    busy_s = sum(end - begin for (begin, _), (end, _) in zip(busy[::2], busy[1::2], strict=True))
    assert busy_s * sharing.bytes_per_s >= size * (1 - 1e-9)


def test_an_uncapped_link_is_never_slower_than_its_rate():
    _, link, busy = run(FairShare(10.0, 4), [(0, 10.0)] * 9)
    assert busy == [(0, True), (pytest.approx(9.0), False)]
    assert link.bytes_landed == 90.0


def test_simultaneous_starts_cost_one_timer():
    env = simpy.Environment()
    link = Link(env, FairShare(10.0, 8), lambda read: None)
    for read in range(8):
        link.start(read, 10.0)
    link.arm()
    link.arm()
    env.step()
    with pytest.raises(simpy.core.EmptySchedule):
        env.step()

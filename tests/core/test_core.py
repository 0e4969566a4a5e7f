"""Tables of events and the exact commands that answer them, worked out by hand from the paper's rules."""

import pytest
from worlds import AnyOrder, Routes, Steps, make_core

from policies.core.driver import drive
from policies.core.fetch_queue import FetchQueue
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone, Gate, StepBegin, StepEnd
from policies.core.types import CapacityError, DeadlockError, FetchKind, ModelSpec, Phase, ProtocolError
from policies.eviction import LRU

D, P = FetchKind.DEMAND, FetchKind.PREFETCH
TWO = ModelSpec("two", n_layers=2, n_experts=4, top_k=1)
WIDE = ModelSpec("wide", n_layers=3, n_experts=8, top_k=2)


def gates(*chosen):
    return tuple(Gate(tuple(experts)) for experts in chosen)


def play(core, table):
    """Feed each row's events and compare the commands; the core's invariants hold after each."""
    for events, commands in table:
        assert core.handle(*events) == commands
        core.check()


def test_one_request_misses_then_hits():
    core = make_core("bevy", TWO, capacity=2)
    play(
        core,
        [
            ([StepBegin(0, (7,))], [Compute(1, Phase.ENTRY, -1, (7,))]),
            ([ComputeDone(1, gates([3]))], [Fetch(2, 3, 0, D)]),
            ([FetchDone(2)], [Compute(3, Phase.JOB, 0, (7,), (3,), (0,))]),
            ([ComputeDone(3, gates([4]))], [Fetch(4, 4, 1, D)]),
            ([FetchDone(4)], [Compute(5, Phase.JOB, 1, (7,), (4,), (1,))]),
            ([ComputeDone(5)], [Compute(6, Phase.HEAD, 2, (7,))]),
            ([ComputeDone(6)], [StepEnd(0)]),
            ([StepBegin(1, (7,))], [Compute(7, Phase.ENTRY, -1, (7,))]),
            ([ComputeDone(7, gates([3]))], [Compute(8, Phase.JOB, 0, (7,), (3,), (0,))]),
            # Layer 1 misses expert 5; expert 4 is the least used of the unpinned: its slot is taken.
            ([ComputeDone(8, gates([5]))], [Fetch(9, 5, 1, D)]),
        ],
    )


def test_two_requests_share_one_fetch_and_run_as_one_batch():
    core = make_core("bevy", TWO, capacity=2)
    play(
        core,
        [
            ([StepBegin(0, (0, 1))], [Compute(1, Phase.ENTRY, -1, (0, 1))]),
            ([ComputeDone(1, gates([2], [2]))], [Fetch(2, 2, 0, D)]),
            ([FetchDone(2)], [Compute(3, Phase.JOB, 0, (0, 1), (2,), (0,))]),
        ],
    )


def test_conventional_batching_waits_for_the_union():
    core = make_core("llama_cpp", TWO, capacity=4)
    play(
        core,
        [
            ([StepBegin(0, (0, 1))], [Compute(1, Phase.ENTRY, -1, (0, 1))]),
            ([ComputeDone(1, gates([2], [3]))], [Fetch(2, 2, 0, D), Fetch(3, 3, 1, D)]),
            ([FetchDone(3)], []),
            ([FetchDone(2)], [Compute(4, Phase.JOB, 0, (0, 1), (2, 3), (0, 1))]),
        ],
    )


def test_runahead_takes_the_ready_request_and_shows_its_next_misses():
    core = make_core("bevy", TWO, capacity=4, fetch_slots=1)
    play(
        core,
        [
            ([StepBegin(0, (0, 1))], [Compute(1, Phase.ENTRY, -1, (0, 1))]),
            ([ComputeDone(1, gates([2], [3]))], [Fetch(2, 2, 0, D)]),
            # Request 0 runs ahead to layer 1 while request 1's expert is read.
            ([FetchDone(2)], [Compute(3, Phase.JOB, 0, (0,), (2,), (0,)), Fetch(4, 3, 1, D)]),
            ([ComputeDone(3, gates([6]))], []),
            ([FetchDone(4)], [Compute(5, Phase.JOB, 0, (1,), (3,), (1,)), Fetch(6, 6, 2, D)]),
            # Both stand at layer 1; its expert lands together with the end of the batch: one group.
            ([ComputeDone(5, gates([6])), FetchDone(6)], [Compute(7, Phase.JOB, 1, (0, 1), (6,), (2,))]),
            ([ComputeDone(7)], [Compute(8, Phase.HEAD, 2, (0, 1))]),
            ([ComputeDone(8)], [StepEnd(0)]),
        ],
    )


def preload(core, experts):
    """Put experts into the cache, free of references."""
    for expert in experts:
        core.cache.reserve(expert, 1)
        core.cache.fill(expert)
        core.cache.unpin([expert])


@pytest.mark.parametrize(("name", "expert"), [("bevy", 4), ("bevy_srtf", 10)])
def test_the_lagging_request_is_served_first_unless_srtf_ignores_layers(name, expert):
    core = make_core(name, ModelSpec("m", 2, 8, 3), capacity=12, fetch_slots=1)
    preload(core, [0, 1, 2, 8, 9])
    core.handle(StepBegin(0, (0, 1)))
    job, fetch = core.handle(ComputeDone(1, gates([0, 1, 2], [3, 4, 5])))
    assert (job.requests, fetch.expert) == ((0,), 3)
    assert core.handle(ComputeDone(job.batch, gates([8, 9, 10]))) == [], "one reader, and it is busy"
    # Request 1 stands at layer 0 and misses two; request 0 stands at layer 1 and misses one.
    (started,) = core.handle(FetchDone(fetch.fetch))
    assert started.expert == expert


@pytest.mark.parametrize(("name", "requests"), [("bevy", (1,)), ("bevy_fifo", (2,))])
def test_fifo_computes_the_oldest_ready_job_whatever_its_layer(name, requests):
    core = make_core(name, ModelSpec("m", 3, 8, 1), capacity=12, fetch_slots=2)
    preload(core, [0, 1, 8])
    core.handle(StepBegin(0, (0, 1, 2)))
    group, lagging = core.handle(ComputeDone(1, gates([0], [3], [1])))
    assert group.requests == (0, 2), "both are ready at layer 0"
    leader, ahead = core.handle(ComputeDone(group.batch, gates([8], [10])))
    assert leader.requests == (0,), "request 2 misses expert 10"
    # While it runs, request 2 becomes ready at layer 1, and then request 1 at layer 0.
    assert core.handle(FetchDone(ahead.fetch)) == []
    assert core.handle(FetchDone(lagging.fetch)) == []
    chosen, _ = core.handle(ComputeDone(leader.batch, gates([16])))
    assert chosen.requests == requests


def test_a_shared_expert_is_fetched_for_its_most_urgent_job():
    """Rule 5 of baselines: an expert wanted by several jobs takes the smallest count among them."""
    core = make_core("bevy", ModelSpec("m", 1, 8, 2), capacity=8, fetch_slots=1)
    core.handle(StepBegin(0, (0, 1, 2)))
    # Request 0 misses 0 and 1, request 1 misses 1 and 2, request 2 misses 1 only after 5 is resident.
    preload(core, [5])
    (first,) = core.handle(ComputeDone(1, gates([0, 1], [1, 2], [5, 1])))
    assert first.expert == 1, "request 2 has one missing expert, so that is read first, though request 0 queued it"
    commands = core.handle(FetchDone(first.fetch))
    assert [type(c) for c in commands] == [Compute, Fetch]
    assert commands[0].requests == (2,)


def test_two_batches_in_flight():
    core = make_core("singles", TWO, capacity=4, compute_slots=2)
    core.handle(StepBegin(0, (0, 1, 2)))
    commands = core.handle(ComputeDone(1, gates([1], [1], [1])))
    assert commands == [Fetch(2, 1, 0, D)]
    commands = core.handle(FetchDone(2))
    assert [c.requests for c in commands] == [(0,), (1,)]
    third, fetch = core.handle(ComputeDone(commands[0].batch, gates([5])))
    assert (third.requests, fetch.expert) == ((2,), 5)


def test_pinned_experts_are_never_victims():
    core = make_core("bevy", TWO, capacity=2, eviction=LRU())
    core.handle(StepBegin(0, (0, 1)))
    first, second = core.handle(ComputeDone(1, gates([0], [1])))
    assert (first.slot, second.slot) == (0, 1)
    core.handle(FetchDone(first.fetch))  # request 0 computes with expert 0
    # Both slots are pinned: by the running job and by the pending fetch.
    assert not core.cache.evictable
    core.check()


# ---------------------------------------------------------------------------------------- capacity


def test_a_cache_below_top_k_is_refused():
    with pytest.raises(CapacityError, match=r"raise cache\.slots"):
        make_core("bevy", WIDE, capacity=1)


def test_a_cache_too_small_for_runahead_runs_one_unit_and_says_so():
    core = make_core("bevy", WIDE, capacity=5)
    core.handle(StepBegin(0, (0, 1, 2)))
    core.handle(ComputeDone(1, gates([0, 1], [0, 1], [0, 2])))
    assert core.runahead.startswith("off: 3 requests x top-2 need 6 cache slots and 5 can be had")
    assert [job.requests for job in core.jobs] == [(0, 1, 2)]
    with pytest.raises(CapacityError, match="runahead is impossible"):
        make_core("bevy", WIDE, capacity=5, strict=True).handle(StepBegin(0, (0, 1, 2)))
    exact = make_core("bevy", WIDE, capacity=6, strict=True)
    exact.handle(StepBegin(0, (0, 1, 2)))
    assert exact.runahead == "on"


def test_a_union_above_the_cache_passes_the_layer_in_waves():
    core = make_core("llama_cpp", ModelSpec("m", 2, 8, 2), capacity=4)
    play(
        core,
        [
            ([StepBegin(0, (0, 1, 2))], [Compute(1, Phase.ENTRY, -1, (0, 1, 2))]),
            # The union of three requests is five experts: 0 and 1 together, then 2.
            (
                [ComputeDone(1, gates([0, 1], [1, 2], [3, 4]))],
                [Fetch(2, 0, 0, D), Fetch(3, 1, 1, D), Fetch(4, 2, 2, D)],
            ),
            (
                [FetchDone(2), FetchDone(3), FetchDone(4)],
                [Compute(5, Phase.JOB, 0, (0, 1), (0, 1, 2), (0, 1, 2))],
            ),
            ([ComputeDone(5, gates([8, 9], [8, 9]))], [Fetch(6, 3, 3, D), Fetch(7, 4, 0, D)]),
            ([FetchDone(6), FetchDone(7)], [Compute(8, Phase.JOB, 0, (2,), (3, 4), (3, 0))]),
            # All three are through: they enter layer 1 as one unit again.
            ([ComputeDone(8, gates([8, 10]))], [Fetch(9, 8, 1, D), Fetch(10, 9, 2, D), Fetch(11, 10, 3, D)]),
            (
                [FetchDone(9), FetchDone(10), FetchDone(11)],
                [Compute(12, Phase.JOB, 1, (0, 1, 2), (8, 9, 10), (1, 2, 3))],
            ),
            ([ComputeDone(12)], [Compute(13, Phase.HEAD, 2, (0, 1, 2))]),
            ([ComputeDone(13)], [StepEnd(0)]),
        ],
    )
    assert core.layers_in_waves == 1


# ---------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (FetchDone(99), "no such fetch is in flight"),
        (ComputeDone(99), "no such batch runs"),
        (StepBegin(1, (0,)), "step 0 has not ended"),
        (ComputeDone(1, gates([0])), "1 gates; expected 2"),
        (ComputeDone(1, gates([0], [4])), "distinct experts of layer 0, ids 0 to 3"),
        (ComputeDone(1, gates([0], [0, 1])), "expected 1 distinct experts"),
        ("hello", "no event of the core"),
    ],
)
def test_an_answer_to_no_question_is_refused(event, message):
    core = make_core("bevy", TWO, capacity=4)
    core.handle(StepBegin(0, (0, 1)))
    with pytest.raises(ProtocolError, match=message):
        core.handle(event)


def test_a_repeated_completion_is_refused():
    core = make_core("bevy", TWO, capacity=4)
    core.handle(StepBegin(0, (0,)))
    (fetch,) = core.handle(ComputeDone(1, gates([0])))
    core.handle(FetchDone(fetch.fetch))
    with pytest.raises(ProtocolError, match="came twice"):
        core.handle(FetchDone(fetch.fetch))


@pytest.mark.parametrize("requests", [(), (1, 1)])
def test_a_step_of_no_or_repeated_requests_is_refused(requests):
    with pytest.raises(ProtocolError, match="empty or repeat"):
        make_core("bevy", TWO, capacity=4).handle(StepBegin(0, requests))


def test_a_partition_that_loses_a_request_is_refused():
    core = make_core("bevy", TWO, capacity=4)
    core._partition = type("Loses", (), {"units": staticmethod(lambda requests: [requests[:1]])})()
    with pytest.raises(ProtocolError, match="every request in one unit"):
        core.handle(StepBegin(0, (0, 1)))


def test_nothing_running_and_something_unfinished_is_a_deadlock(monkeypatch):
    core = make_core("bevy", TWO, capacity=4)
    core.handle(StepBegin(0, (0,)))
    monkeypatch.setattr(FetchQueue, "choose", lambda self: None)
    with pytest.raises(DeadlockError, match=r"(?s)step 0 is unfinished.*job 1: layer 0.*1 missing"):
        core.handle(ComputeDone(1, gates([0])))


def test_all_references_are_zero_at_the_end():
    core = make_core("bevy", WIDE, capacity=7)
    drive(core, Steps(4, range(3)), AnyOrder(Routes(WIDE, 1), 5), check=True)
    assert all(entry.refs == 0 for entry in core.cache.entries.values())
    assert not core.jobs

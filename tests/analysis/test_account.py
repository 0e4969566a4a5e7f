"""Journals written by hand; every expected number is worked out in the comment beside it."""

from collections import Counter

import pytest

from analysis.account import Step, account
from policies.core.journal import Record
from policies.core.messages import Command, Compute, ComputeDone, Event, Fetch, FetchDone, Gate, StepBegin, StepEnd
from policies.core.types import FetchKind, Phase, UserError

D, P = FetchKind.DEMAND, FetchKind.PREFETCH


def rec(t_s: float, events: list[Event], commands: list[Command]) -> Record:
    return Record(t_s, tuple(events), tuple(commands))


def entry(batch: int, *requests: int) -> Compute:
    return Compute(batch, Phase.ENTRY, -1, requests)


def job(batch: int, layer: int, requests: tuple[int, ...], **slot_of: int) -> Compute:
    """``e5=2``: expert 5 lies in slot 2."""
    return Compute(batch, Phase.JOB, layer, requests, tuple(int(name[1:]) for name in slot_of), tuple(slot_of.values()))


def head(batch: int, *requests: int) -> Compute:
    return Compute(batch, Phase.HEAD, 2, requests)


def asks(batch: int, *gates: tuple[int, ...]) -> ComputeDone:
    return ComputeDone(batch, tuple(Gate(experts) for experts in gates))


# Two layers of four experts (ids 0 to 3 and 4 to 7), top-1, two requests that run ahead of each other.
RUNAHEAD = [
    # step 0 from 1.0 s: entry until 2.0
    rec(1.0, [StepBegin(0, (10, 11))], [entry(1, 10, 11)]),
    # request 10 wants expert 0, request 11 expert 1: both absent; the link alone until 3.0
    rec(2.0, [asks(1, (0,), (1,))], [Fetch(2, 0, 0, D), Fetch(3, 1, 1, D)]),
    # expert 0 is there: its job runs beside the fetch of expert 1; both busy until 3.5
    rec(3.0, [FetchDone(2)], [job(4, 0, (10,), e0=0)]),
    # request 10 goes on to expert 4; expert 1 and 4 are in flight: link alone until 4.0
    rec(3.5, [asks(4, (4,))], [Fetch(5, 4, 2, D)]),
    # expert 1 is there; both busy until 4.25
    rec(4.0, [FetchDone(3)], [job(6, 0, (11,), e1=1)]),
    # request 11 wants expert 4 too and shares its fetch; link alone until 5.0
    rec(4.25, [asks(6, (4,))], []),
    # both run as one group of two until 5.75: GPU alone
    rec(5.0, [FetchDone(5)], [job(7, 1, (10, 11), e4=2)]),
    rec(5.75, [ComputeDone(7)], [head(8, 10, 11)]),
    rec(6.0, [ComputeDone(8)], [StepEnd(0)]),
]


def test_states_counts_and_groups_of_a_runahead_step() -> None:
    (step,) = account(RUNAHEAD)
    assert (step.step, step.requests, step.begin_s, step.end_s, step.step_s) == (0, (10, 11), 1.0, 6.0, 5.0)
    assert step.gpu_only_s == 1.0 + 0.75 + 0.25
    assert step.link_only_s == 1.0 + 0.5 + 0.75
    assert step.busy_both_s == 0.5 + 0.25
    assert step.neither_s == 0.0
    assert (step.demand_fetches, step.prefetches, step.repeated_fetches) == (3, 0, 0)
    assert step.needed == (0, 1, 4)
    assert step.jobs == 4
    assert step.group_sizes == Counter({1: 2, 2: 1})
    assert not step.lockstep
    assert step.token_gaps_s == []


def test_time_with_nothing_in_flight_is_neither_and_time_between_steps_is_no_steps() -> None:
    steps = account(
        [
            rec(0.0, [StepBegin(0, (1,))], [entry(1, 1)]),
            rec(1.0, [asks(1, (0,))], []),  # host time: the command comes a record later
            rec(1.5, [], [Fetch(2, 0, 0, D)]),
            rec(2.0, [FetchDone(2)], [job(3, 0, (1,), e0=0)]),
            rec(3.0, [ComputeDone(3)], [head(4, 1)]),
            rec(4.0, [ComputeDone(4)], [StepEnd(0)]),
            rec(9.0, [StepBegin(1, (1, 2))], [entry(5, 1, 2)]),
            rec(10.0, [asks(5, (0,), (0,))], [job(6, 0, (1, 2), e0=0)]),
            rec(11.0, [ComputeDone(6)], [head(7, 1, 2)]),
            rec(12.0, [ComputeDone(7)], [StepEnd(1)]),
        ]
    )
    first, second = steps
    assert (first.neither_s, first.link_only_s, first.gpu_only_s, first.busy_both_s) == (0.5, 0.5, 3.0, 0.0)
    assert (second.begin_s, second.step_s, second.gpu_only_s, second.neither_s) == (9.0, 3.0, 3.0, 0.0)
    assert first.lockstep
    assert second.lockstep
    # Request 1 had its token at 4.0 and the next at 12.0; request 2 has no token before.
    assert second.token_gaps_s == [(1, 8.0)]


def prefetching(*, used: bool) -> list[Step]:
    """Step 0 prefetches expert 4 into slot 1; it lands before layer 1 is reached."""
    wanted, slot = (4, 1) if used else (5, 2)
    fetch: list[Command] = [] if used else [Fetch(6, 5, 2, D)]
    landed: list[Event] = [] if used else [FetchDone(6)]
    name = f"e{wanted}"
    return account(
        [
            rec(0.0, [StepBegin(0, (1,))], [entry(1, 1)]),
            rec(1.0, [asks(1, (0,))], [Fetch(2, 0, 0, D), Fetch(3, 4, 1, P)]),
            rec(2.0, [FetchDone(2), FetchDone(3)], [job(4, 0, (1,), e0=0)]),
            rec(3.0, [asks(4, (wanted,))], fetch),
            rec(4.0, landed, [job(7, 1, (1,), **{name: slot})]),
            rec(5.0, [ComputeDone(7)], [head(8, 1)]),
            rec(6.0, [ComputeDone(8)], [StepEnd(0)]),
            rec(6.0, [StepBegin(1, (1,))], [entry(9, 1)]),
            rec(7.0, [asks(9, (0,))], [job(10, 0, (1,), e0=0)]),
            rec(8.0, [asks(10, (4,))], [job(11, 1, (1,), e4=1)]),
            rec(9.0, [ComputeDone(11)], [head(12, 1)]),
            rec(10.0, [ComputeDone(12)], [StepEnd(1)]),
        ]
    )


def test_a_prefetch_that_its_step_uses_is_needed_and_on_time() -> None:
    first, second = prefetching(used=True)
    assert (first.prefetches, first.prefetches_needed, first.prefetches_late) == (1, 1, 0)
    assert (first.prefetches_wasted, first.prefetches_later_hit) == (0, 0)
    assert (first.demand_fetches, second.demand_fetches, second.prefetches) == (1, 0, 0)


def test_a_prefetch_that_only_a_later_step_uses_is_wasted_with_a_later_hit() -> None:
    first, second = prefetching(used=False)
    assert (first.prefetches, first.prefetches_needed, first.prefetches_late) == (1, 0, 0)
    assert (first.prefetches_wasted, first.prefetches_later_hit) == (1, 1)
    assert (second.prefetches_wasted, second.prefetches_later_hit) == (0, 0)


def test_a_prefetch_in_flight_when_the_gate_asks_is_late_and_needed() -> None:
    (step,) = account(
        [
            rec(0.0, [StepBegin(0, (1,))], [entry(1, 1)]),
            rec(1.0, [asks(1, (0,))], [Fetch(2, 0, 0, D)]),
            rec(2.0, [FetchDone(2)], [job(3, 0, (1,), e0=0), Fetch(4, 4, 1, P), Fetch(5, 5, 2, P)]),
            rec(3.0, [asks(3, (4,))], []),
            rec(4.0, [FetchDone(4)], [job(6, 1, (1,), e4=1)]),
            rec(5.0, [ComputeDone(6)], [head(7, 1)]),
            rec(6.0, [ComputeDone(7)], [StepEnd(0)]),
        ]
    )
    assert (step.prefetches, step.prefetches_needed, step.prefetches_late, step.prefetches_wasted) == (2, 1, 1, 1)
    # The wasted one is in flight to the end: the link is busy from 1.0 on.
    assert (step.gpu_only_s, step.link_only_s, step.busy_both_s) == (1.0, 2.0, 3.0)


def test_a_prefetch_that_lands_at_the_instant_of_the_gate_is_on_time() -> None:
    (step,) = account(
        [
            rec(0.0, [StepBegin(0, (1,))], [entry(1, 1)]),
            rec(1.0, [asks(1, (0,))], [Fetch(2, 0, 0, D)]),
            rec(2.0, [FetchDone(2)], [job(3, 0, (1,), e0=0), Fetch(4, 4, 1, P)]),
            rec(3.0, [asks(3, (4,)), FetchDone(4)], [job(6, 1, (1,), e4=1)]),
            rec(5.0, [ComputeDone(6)], [head(7, 1)]),
            rec(6.0, [ComputeDone(7)], [StepEnd(0)]),
        ]
    )
    assert (step.prefetches_needed, step.prefetches_late) == (1, 0)


def test_a_prefetch_evicted_before_its_use_is_wasted_and_the_second_fetch_repeats() -> None:
    (step,) = account(
        [
            rec(0.0, [StepBegin(0, (1,))], [entry(1, 1)]),
            rec(1.0, [asks(1, (0,))], [Fetch(2, 4, 0, P)]),
            rec(2.0, [FetchDone(2)], [Fetch(3, 0, 0, D)]),  # into the same slot
            rec(3.0, [FetchDone(3)], [job(4, 0, (1,), e0=0)]),
            rec(4.0, [asks(4, (4,))], [Fetch(5, 4, 1, D)]),
            rec(5.0, [FetchDone(5)], [job(6, 1, (1,), e4=1)]),
            rec(6.0, [ComputeDone(6)], [head(7, 1)]),
            rec(7.0, [ComputeDone(7)], [StepEnd(0)]),
        ]
    )
    assert (step.prefetches_needed, step.prefetches_wasted, step.demand_fetches) == (0, 1, 2)
    assert step.repeated_fetches == 1


def test_an_unfinished_step_is_left_out() -> None:
    assert [step.step for step in account([*RUNAHEAD, rec(7.0, [StepBegin(1, (10,))], [entry(9, 10)])])] == [0]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([RUNAHEAD[0], rec(0.5, [asks(1, (0,), (1,))], [])], "runs backwards"),
        ([RUNAHEAD[0], rec(2.0, [FetchDone(77)], [])], "record 1 .* completes 77"),
        ([rec(0.0, [], [entry(1, 1)])], "outside any step"),
    ],
)
def test_a_journal_that_contradicts_itself_is_refused(records: list[Record], message: str) -> None:
    with pytest.raises(UserError, match=message):
        account(records)

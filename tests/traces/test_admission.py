"""Affinity: who joins, against likeness reckoned by hand and by another way; the cap on being passed over."""

import numpy as np
import pytest

from policies.core.types import ModelSpec, UserError
from traces.admission import Affinity
from traces.format import RequestTrace, Trace
from traces.workload import TraceWorkload

MODEL = ModelSpec("toy", n_layers=2, n_experts=8, top_k=2)


def of_kind(low, tokens=6):
    """A request that uses experts ``low`` and ``low + 1`` only."""
    return np.tile(np.array([low, low + 1], dtype=np.uint16), (tokens, 2, 1))


def kinds(*lows, lengths=None):
    lengths = lengths or [6] * len(lows)
    requests = [RequestTrace(r, of_kind(low, n)) for r, (low, n) in enumerate(zip(lows, lengths, strict=True))]
    return Trace(MODEL, tuple(requests), source="made by a test")


def test_the_one_that_shares_experts_joins():
    """Two kinds, in turns; two decode together."""
    trace = kinds(0, 4, 0, 4)
    plain, alike = (TraceWorkload(trace, 2, 4, start=2, affinity=cap) for cap in (None, 9))
    assert plain.begin(0.0).requests == (0, 1)
    assert alike.begin(0.0).requests == (0, 2)


def test_nobody_is_passed_over_more_often_than_the_cap():
    """Request 1 is unlike all others, which come and go one by one beside request 0."""
    trace = kinds(0, 4, *[0] * 8, lengths=[40, 3, *[3] * 8])
    for cap in (1, 3, 6):
        workload = TraceWorkload(trace, 2, 9, start=2, affinity=cap)
        joined = [workload.begin(0.0).requests[1] for _ in range(9)]
        assert joined.index(1) == cap
        assert sorted(joined) == list(range(1, 10))


def test_equals_join_in_their_order_and_only_who_has_arrived():
    trace = kinds(0, 4, 0, 0, lengths=[9, 9, 9, 9])
    first = TraceWorkload(trace, 2, 5, start=2, affinity=9)
    assert first.begin(0.0).requests == (0, 2)
    late = TraceWorkload(trace, 2, 5, start=2, affinity=9, arrivals_s=[0.0, 0.0, 5.0, 5.0])
    assert late.begin(0.0).requests == (0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_likeness_is_the_cosine_of_recent_counts(make_trace, seed):
    """Against plain loops over tokens, for requests of random routing and positions."""
    trace = make_trace((40, 40, 40, 40, 40), seed=seed)
    first = {r: 5 + 4 * r for r in range(5)}
    positions = {0: 12, 3: 30}

    def counts(request, row):
        found = np.zeros((3, 8))
        for token in trace.requests[request].experts[max(0, row - 16) : row]:
            for layer, chosen in enumerate(token.tolist()):
                for expert in chosen:
                    found[layer, expert] += 1
        return found

    def likeness(request):
        mine, total = counts(request, first[request]), 0.0
        for other, row in positions.items():
            theirs = counts(other, row)
            for a, b in zip(mine, theirs, strict=True):
                total += float(a @ b) / float(np.linalg.norm(a) * np.linalg.norm(b))
        return total

    waiting = [1, 2, 4]
    best = max(range(3), key=lambda place: likeness(waiting[place]))
    assert Affinity(trace, first, 9).choose(waiting, positions) == best
    assert Affinity(trace, first, 9).choose(waiting, {}) == 0
    assert Affinity(trace, first | {waiting[best]: 0}, 9).choose(waiting, positions) != best


def test_what_is_not_recorded_does_not_count(rich_trace):
    """Prompt tokens of these requests lack a layer; the ids there are no experts."""
    first = {request.request: 2 for request in rich_trace.requests}
    assert Affinity(rich_trace, first, 1).choose([10, 20], {0: 3}) in (0, 1)


def test_refusals(make_trace):
    with pytest.raises(UserError, match="no prompts are recorded"):
        TraceWorkload(make_trace(), 2, 3, affinity=4)
    with pytest.raises(UserError, match=r"workload\.affinity is 0"):
        TraceWorkload(make_trace(), 2, 2, start=1, affinity=0)

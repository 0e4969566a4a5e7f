import math

import numpy as np
import pytest

from policies.core.messages import Gate, StepBegin
from policies.core.types import UserError
from traces.format import RequestTrace, Trace, TraceError
from traces.routing import TraceRouting
from traces.workload import TraceWorkload


def run(workload, now_s=0.0, step_s=1.0):
    """All steps with the positions of their requests, and the idle times asked for."""
    steps, waits = [], []
    while (begin := workload.begin(now_s)) is not None:
        if isinstance(begin, float):
            waits.append(begin)
            assert begin > now_s
            now_s = begin
            continue
        assert begin.step == len(steps)
        assert begin.requests == tuple(workload.positions)
        steps.append(dict(workload.positions))
        now_s += step_s
    return steps, waits


def test_requests_leave_and_others_join(make_trace):
    trace = make_trace((3, 1, 2, 2, 9))
    steps, _ = run(TraceWorkload(trace, 2, 6))
    assert steps == [{0: 0, 1: 0}, {0: 1, 2: 0}, {0: 2, 2: 1}, {3: 0, 4: 0}, {3: 1, 4: 1}, {4: 2}]
    assert TraceWorkload(trace, 2, 6).full_steps == 5
    steps, _ = run(TraceWorkload(trace, 2, 3, refill=False))
    assert steps == [{0: 0, 1: 0}, {0: 1}, {0: 2}]


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("concurrency", [1, 2, 3, 5])
def test_promised_steps_are_the_steps_it_feeds(make_trace, concurrency, refill):
    for seed in range(10):
        lengths = tuple(np.random.default_rng(seed).integers(1, 9, 5).tolist())
        trace = make_trace(lengths)
        with pytest.raises(UserError, match="feed only") as error:
            TraceWorkload(trace, concurrency, 10_000, refill=refill)
        feeds = int(str(error.value).split("feed only ")[1].split()[0])
        workload = TraceWorkload(trace, concurrency, feeds, refill=refill)
        steps, _ = run(workload)
        assert len(steps) == feeds
        assert all(len(step) == concurrency for step in steps[: workload.full_steps])
        assert len(steps) == workload.full_steps or len(steps[workload.full_steps]) < concurrency
        served = [(r, at) for step in steps for r, at in step.items()]
        assert len(set(served)) == len(served)
        if refill:
            assert len(served) == sum(lengths)
        assert run(TraceWorkload(trace, concurrency, feeds - 1, refill=refill))[0] == steps[:-1] if feeds > 1 else True


def test_arrivals(make_trace):
    trace = make_trace((2, 2, 2, 2))
    workload = TraceWorkload(trace, 2, 99, arrivals_s=[5.0, 0.0, 0.5, 20.0])
    steps, waits = run(workload)
    # 1 at once; 2 at 1 s; both gone by 3 s; 0 at 5 s; idle from 7 s to 20 s
    assert steps == [{1: 0}, {1: 1, 2: 0}, {2: 1}, {0: 0}, {0: 1}, {3: 0}, {3: 1}]
    assert waits == [5.0, 20.0]
    assert TraceWorkload(trace, 1, 99, arrivals_s=[7.0] * 4).begin(0.0) == 7.0


def test_selection(make_trace):
    trace = make_trace((4,) * 6)
    first = TraceWorkload(trace, 3, 4, requests=3).begin(0.0)
    assert first == StepBegin(0, (0, 1, 2))
    drawn = {TraceWorkload(trace, 3, 4, seed=s, selection="random").begin(0.0).requests for s in range(20)}
    assert len(drawn) > 10
    again = TraceWorkload(trace, 3, 4, seed=3, selection="random").begin(0.0)
    assert again == TraceWorkload(trace, 3, 4, seed=3, selection="random").begin(0.0)


def test_starts(make_trace, rich_trace):
    trace = make_trace((6, 9))
    assert run(TraceWorkload(trace, 2, 2, start=4))[0] == [{0: 4, 1: 4}, {0: 5, 1: 5}]
    workload = TraceWorkload(trace, 2, 3, start="random", seed=1)
    workload.begin(0.0)
    assert all(0 <= at <= trace.requests[r].n_tokens // 2 for r, at in workload.positions.items())
    workload = TraceWorkload(rich_trace, 3, 2)
    workload.begin(0.0)
    assert workload.positions == {0: 3, 10: 0, 20: 2}  # decoding begins after the recorded prompt


def test_context(rich_trace, make_trace):
    workload = TraceWorkload(rich_trace, 3, 2)
    workload.begin(0.0)
    assert [workload.context_tokens(r) for r in (0, 10, 20)] == [3, 0, 2]
    workload.begin(0.0)
    assert [workload.context_tokens(r) for r in (0, 10, 20)] == [4, 1, 3]

    workload = TraceWorkload(rich_trace, 3, 2, context_tokens=100)
    workload.begin(0.0)
    assert [workload.context_tokens(r) for r in (0, 10, 20)] == [100] * 3

    trace = make_trace((5,) * 200)
    workload = TraceWorkload(trace, 200, 2, context_tokens=(10, 12), seed=4)
    workload.begin(0.0)
    contexts = [workload.context_tokens(r) for r in range(200)]
    assert set(contexts) == {10, 11, 12}
    fewer = TraceWorkload(trace, 5, 2, context_tokens=(10, 12), seed=4)
    fewer.begin(0.0)
    assert [fewer.context_tokens(r) for r in range(5)] == contexts[:5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"concurrency": 4}, "concurrency is 4 but the workload has only 3 requests"),
        ({"concurrency": 3, "requests": 2}, "concurrency is 3 but the workload has only 2 requests"),
        ({"requests": 4}, "workload.requests is 4 but the trace has only 3 requests"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"steps": 13}, "steps is 13 but 1 at once of 3 requests .* feed only 12 steps"),
        ({"steps": 6, "refill": False}, "feed only 5 steps"),
        ({"selection": "best"}, "workload.selection is best, expected order or random"),
        ({"start": 3}, "workload.start is 3, expected random or a decode token from 0 to 2"),
        ({"start": "late"}, "workload.start is late"),
        ({"arrivals_s": [1.0]}, "workload.arrivals has 1 times for 3 requests"),
        ({"arrivals_s": [1.0, math.nan, 2.0]}, "workload.arrivals has the time nan"),
        ({"arrivals_s": [1.0, -1.0, 2.0]}, "workload.arrivals has the time -1.0"),
        ({"context_tokens": -1}, "workload.context_tokens is -1"),
        ({"context_tokens": (5, 4)}, r"workload.context_tokens is \(5, 4\)"),
    ],
)
def test_bad_workloads(make_trace, arguments, message):
    with pytest.raises(UserError, match=message) as error:
        TraceWorkload(make_trace((5, 3, 4)), **{"concurrency": 1, "steps": 1, **arguments})
    assert "\n" not in str(error.value)


def test_a_trace_of_prompts_only(make_trace):
    request = make_trace((4,)).requests[0]
    prompt = RequestTrace(0, request.experts, {"phase": np.zeros(4, np.uint8)})
    with pytest.raises(UserError, match="no decode tokens"):
        TraceWorkload(Trace(make_trace().model, (prompt,)), 1, 1)


# ---------------------------------------------------------------------------- routing


def test_gates(make_trace):
    trace = make_trace((5, 3, 4))
    workload = TraceWorkload(trace, 2, 7)
    routing = TraceRouting(trace, workload)
    while (begin := workload.begin(0.0)) is not None:
        for layer in (2, 0, 1, 0):
            for requests in (begin.requests, begin.requests[::-1], begin.requests[:1]):
                gates = routing.gates(begin.step, requests, layer)
                for request, gate in zip(requests, gates, strict=True):
                    chosen = trace.requests[request].experts[workload.positions[request], layer]
                    assert gate == Gate(tuple(int(e) + 8 * layer for e in chosen))
                    assert all(type(e) is int for e in gate.experts)


class NextScores:
    columns = ("next_scores_1", "weights")

    def __init__(self):
        self.seen = []

    def predict(self, observation):
        self.seen.append(observation)
        best = int(observation.column("next_scores_1")[observation.layer].argmax())
        return ((best, float(observation.column("weights")[observation.layer, 0])),)


def test_predictions_see_their_token(rich_trace):
    workload = TraceWorkload(rich_trace, 2, 2)
    predictor = NextScores()
    routing = TraceRouting(rich_trace, workload, predictor)
    workload.begin(0.0)
    workload.begin(0.0)
    gates = routing.gates(1, (10, 0), 1)
    for request, position, gate, seen in zip(rich_trace.requests[1::-1], (1, 4), gates, predictor.seen, strict=True):
        assert (seen.request, seen.position, seen.layer) == (request.request, position, 1)
        assert np.array_equal(seen.experts, request.experts[position])
        best = int(request.columns["next_scores_1"][position, 1].argmax())
        assert gate.predicted == ((best, float(request.columns["weights"][position, 1, 0])),)


def test_a_missing_column_is_an_error_at_the_start(make_trace):
    trace = make_trace()
    with pytest.raises(
        TraceError, match="NextScores needs the trace column next_scores_1; made by a test has expert ids"
    ):
        TraceRouting(trace, TraceWorkload(trace, 1, 1), NextScores())

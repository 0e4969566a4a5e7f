"""What predictors learn from: other requests than those tested, or one clear line."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import MODEL, random_experts

from policies.core.types import UserError
from policies.prefetch.learning import windows
from traces.calibration import require_columns
from traces.format import RequestTrace, Trace
from traces.load import load_workload
from traces.storage import write_trace


class Pupil:
    """Keeps what it is shown."""

    columns = ()

    def learn(self, examples):
        self.lessons = list(examples)

    def predict(self, observation):
        return ()


class Scholar:
    """Was trained before."""

    columns = ()

    def __init__(self, *requests):
        self.learnt = np.concatenate([windows(request.decode) for request in requests])

    def predict(self, observation):
        return ()


@pytest.fixture
def trace(tmp_path):
    """Six requests of 20 tokens, in a file."""
    rng = np.random.default_rng(0)
    requests = tuple(RequestTrace(r, random_experts(rng, 20)) for r in range(6))
    write_trace(tmp_path / "trace", Trace(MODEL, requests, source="six"))
    return requests


def config(trace, **learn):
    workload = {"kind": "trace", "path": str(trace), "requests": 2, "refill": True}
    return {"workload": workload, "concurrency": 2, "steps": 10, "seed": 0, "prefetch": {"learn": learn}}


def ids(pupil):
    return [lesson.request.request for lesson in pupil.lessons]


def test_the_requests_that_are_not_tested(trace, tmp_path):
    pupil = Pupil()
    loaded = load_workload(config(tmp_path / "trace"), MODEL, pupil)
    assert loaded.workload.requests == (0, 1)
    assert ids(pupil) == [2, 3, 4, 5]
    assert loaded.describe["learnt_from"] == {"requests": 4, "tokens": 80}
    load_workload(config(tmp_path / "trace", requests=3, steps=7), MODEL, pupil)
    assert ids(pupil) == [2, 3, 4]
    assert all(np.array_equal(x.experts, trace[x.request.request].experts[:7]) for x in pupil.lessons)


def test_random_selection_leaves_the_others(trace, tmp_path):
    pupil = Pupil()
    settings = config(tmp_path / "trace")
    settings["workload"]["selection"] = "random"
    tested = load_workload(settings, MODEL, pupil).workload.requests
    assert sorted([*tested, *ids(pupil)]) == list(range(6))


def test_a_trace_of_its_own(trace, tmp_path):
    pupil = Pupil()
    rng = np.random.default_rng(1)
    others = tuple(RequestTrace(r, random_experts(rng, 12)) for r in range(2))
    write_trace(tmp_path / "others", Trace(MODEL, others))
    load_workload(config(tmp_path / "trace", path=str(tmp_path / "others")), MODEL, pupil)
    assert [lesson.experts.tolist() for lesson in pupil.lessons] == [r.experts.tolist() for r in others]


def test_the_tested_requests_are_refused(trace, tmp_path):
    with pytest.raises(UserError, match="Pupil has learnt from request 0, which is tested here; give prefetch"):
        load_workload(config(tmp_path / "trace", path=str(tmp_path / "trace")), MODEL, Pupil())
    cut = replace(trace[1], request=9, experts=trace[1].experts[3:18])
    write_trace(tmp_path / "cut", Trace(MODEL, (cut,)))
    with pytest.raises(UserError, match="from request 1, which is tested"):
        load_workload(config(tmp_path / "trace", path=str(tmp_path / "cut")), MODEL, Pupil())


def test_training_on_the_tested_requests_is_refused(trace, tmp_path):
    load_workload(config(tmp_path / "trace"), MODEL, Scholar(trace[4]))
    with pytest.raises(UserError, match="Scholar has learnt from request 1, which is tested here; train it on other"):
        load_workload(config(tmp_path / "trace"), MODEL, Scholar(trace[4], trace[1]))


def test_nothing_left_to_learn_from_is_refused(trace, tmp_path):
    settings = config(tmp_path / "trace")
    settings["workload"]["requests"] = None
    with pytest.raises(UserError, match=r"all 6 of .* are tested; set workload.requests below 6"):
        load_workload(settings, MODEL, Pupil())


@pytest.mark.parametrize(("learn", "says"), [({"requests": 0}, "requests is 0"), ({"steps": "x"}, "steps is x")])
def test_wrong_counts_are_refused(trace, tmp_path, learn, says):
    with pytest.raises(UserError, match=says):
        load_workload(config(tmp_path / "trace", **learn), MODEL, Pupil())


def test_a_trace_of_another_shape_is_refused(trace, tmp_path):
    other = replace(MODEL, n_layers=2)
    write_trace(tmp_path / "other", Trace(other, (RequestTrace(0, trace[0].experts[:, :2]),)))
    with pytest.raises(UserError, match=r"\(2, 8, 2\), the run has \(3, 8, 2\)"):
        load_workload(config(tmp_path / "trace", path=str(tmp_path / "other")), MODEL, Pupil())


def generated(**learn):
    workload = {"preset": "chat", "requests": None}
    return {"workload": workload, "concurrency": 2, "steps": 10, "seed": 3, "prefetch": {"learn": learn}}


def test_generated_requests_come_from_the_same_router():
    pupil = Pupil()
    pupil.columns = ("scores",)
    few = load_workload(generated(requests=2, steps=10), MODEL, pupil)
    lessons = pupil.lessons
    settings = generated(requests=2, steps=10)
    settings["concurrency"] = 4
    many = load_workload(settings, MODEL, pupil).trace
    assert len(few.trace.requests) == 2
    for lesson, request in zip(lessons, many.requests[2:], strict=True):
        assert np.array_equal(lesson.experts, request.experts)
        assert np.array_equal(lesson.column("scores"), request.columns["scores"])
    with pytest.raises(UserError, match="need values where requests are generated"):
        load_workload(generated(), MODEL, Pupil())


def test_predictions_can_be_made_worse():
    quality = []
    for value in (None, 0.5):
        pupil = Pupil()
        pupil.columns = ("next_scores_1", "scores")
        settings = generated(requests=1, steps=1)
        settings["workload"]["prediction_quality"] = value
        columns = load_workload(settings, MODEL, pupil).trace.requests[0].columns
        told, true = (columns[name].astype(float) for name in ("next_scores_1", "scores"))
        pairs = zip(told[:, :-1].reshape(-1, 8), true[:, 1:].reshape(-1, 8), strict=True)
        quality.append(np.mean([np.corrcoef(a, b)[0, 1] for a, b in pairs]))
    assert quality[0] > 0.85
    assert quality[1] < 0.65


def test_a_missing_column_is_refused_with_the_command_that_records_it(trace, tmp_path):
    pupil = Pupil()
    pupil.columns = ("hidden",)
    command = "python -m traces.capture .*columns=hidden"
    with pytest.raises(UserError, match=f"trace has no column hidden, which Pupil needs .*{command}"):
        require_columns(config(tmp_path / "trace"), pupil)
    with pytest.raises(UserError, match=f"Pupil needs the trace column hidden, which generated .*{command}"):
        require_columns(generated(), pupil)
    require_columns(generated(), None)

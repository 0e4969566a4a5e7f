from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from policies.core.types import ModelSpec, UserError
from traces.format import RequestTrace, Trace
from traces.load import MODEL_OF_SHAPE, load_workload
from traces.storage import write_trace

CONF = Path(__file__).resolve().parents[2] / "conf"
TOY = ModelSpec("toy", 3, 8, 2)


def config(workload, concurrency=2, steps=3, seed=0, **changes):
    if isinstance(workload, str):
        workload = OmegaConf.to_container(OmegaConf.load(CONF / "workload" / f"{workload}.yaml"))
    return {"workload": {**workload, **changes}, "concurrency": concurrency, "steps": steps, "seed": seed}


@pytest.fixture
def stored(tmp_path, make_trace):
    write_trace(tmp_path / "t.parquet", make_trace((5, 3, 4)))
    return str(tmp_path / "t.parquet")


def test_a_stored_trace(stored, make_trace):
    loaded = load_workload(config("trace", path=stored), TOY)
    assert loaded.digest == make_trace((5, 3, 4)).digest
    assert loaded.model == TOY
    begin = loaded.workload.begin(0.0)
    experts = [gate.experts for gate in loaded.routing.gates(0, begin.requests, 0)]
    assert experts == [tuple(make_trace((5, 3, 4)).requests[r].experts[0, 0].tolist()) for r in (0, 1)]
    assert loaded.describe["kind"] == "trace"
    assert loaded.describe["requests"] == 3
    assert loaded.warnings == (
        "context lengths unknown: each request's context begins empty; set workload.context_tokens",
    )

    struct = OmegaConf.create(config("trace", path=stored, context_tokens=[5, 6], requests=2))
    OmegaConf.set_struct(struct, True)
    loaded = load_workload(struct, TOY)
    assert loaded.describe["context_tokens"] == [5, 6]
    assert not loaded.warnings
    loaded.workload.begin(0.0)
    assert loaded.workload.context_tokens(0) in (5, 6)

    short = load_workload(config("trace", steps=6, path=stored, context_tokens=1), TOY)
    assert short.warnings == ("from step 5 on fewer than 2 requests decode: the trace has no more",)


def test_a_trace_with_a_smaller_top_k_runs_with_its_own(stored):
    loaded = load_workload(config("trace", path=stored, context_tokens=1), replace(TOY, top_k=4))
    assert loaded.model.top_k == 2
    assert loaded.describe["top_k"] == 2
    assert "recorded with top-2, toy has top-4" in loaded.warnings[0]


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"path": None}, TOY, "workload.path is not set; give workload.path=FILE"),
        ({"path": "none.parquet"}, TOY, "no such file: none.parquet"),
        ({}, replace(TOY, n_layers=4), "3 MoE layers x 8 experts, but model toy has 4 x 8; use a model of the trace's"),
        ({}, replace(TOY, top_k=1), "top-2 gates but model toy has top-1; convert the source again with top_k=1"),
        ({"requests": 5}, TOY, "workload.requests is 5 but the trace has only 3"),
        ({"context_tokens": "long"}, TOY, "workload.context_tokens is long"),
        ({"context_tokens": [1, 2, 3]}, TOY, r"workload.context_tokens is \[1, 2, 3\]"),
        ({"arrivals": "trace"}, TOY, "records no arrival times"),
        ({"arrivals": 3}, TOY, "workload.arrivals is 3"),
        ({"kind": "dream"}, TOY, "workload.kind is dream, expected generated or trace"),
    ],
)
def test_what_does_not_fit(stored, changes, model, message):
    with pytest.raises(UserError, match=message) as error:
        load_workload(config("trace", **{"path": stored, **changes}), model)
    assert "\n" not in str(error.value)


def test_the_advice_names_the_model_that_fits(tmp_path):
    ids = np.zeros((1, 24, 1), np.uint16)
    write_trace(tmp_path / "t", Trace(ModelSpec("gpt-oss", 24, 32, 1), (RequestTrace(0, ids),)))
    with pytest.raises(
        UserError, match=r"gpt-oss with 24 MoE layers x 32 experts, but model toy .* use model=gpt_oss_20b"
    ):
        load_workload(config("trace", path=str(tmp_path / "t")), TOY)
    for (layers, experts), name in MODEL_OF_SHAPE.items():
        model = OmegaConf.load(CONF / "model" / f"{name}.yaml")
        assert (model.n_layers, model.n_experts) == (layers, experts)


def test_recorded_arrivals(tmp_path, rich_trace):
    write_trace(tmp_path / "t", rich_trace)
    loaded = load_workload(config("trace", path=str(tmp_path / "t"), arrivals="trace", steps=9), TOY)
    assert loaded.workload.begin(0.0).requests == (0,)
    assert loaded.workload.begin(0.6).requests == (0, 10)
    assert not loaded.warnings


class Wants:
    def __init__(self, *columns):
        self.columns = columns

    def predict(self, observation):
        return ((int(observation.column(self.columns[0])[observation.layer].argmax()), 1.0),)


def test_a_predictor_gets_its_columns(stored, tmp_path, rich_trace):
    with pytest.raises(UserError, match="has no column scores"):
        load_workload(config("trace", path=stored), TOY, Wants("scores"))
    write_trace(tmp_path / "rich", rich_trace)
    loaded = load_workload(config("trace", path=str(tmp_path / "rich")), TOY, Wants("scores"))
    loaded.workload.begin(0.0)
    (gate,) = loaded.routing.gates(0, (0,), 2)
    assert gate.predicted == ((int(rich_trace.requests[0].columns["scores"][3, 2].argmax()), 1.0),)


@pytest.mark.parametrize("workload", ["agentic", "chat"])
def test_generated(workload):
    model = ModelSpec("gemma4_26b_a4b", 30, 128, 8)
    loaded = load_workload(config(workload, steps=4), model, Wants("next_scores_1", "weights"))
    again = load_workload(config(workload, steps=4), model, Wants("next_scores_1", "weights"))
    other = load_workload(config(workload, steps=4, seed=1), model)
    assert loaded.digest == again.digest != other.digest
    steps = 0
    while (begin := loaded.workload.begin(0.0)) is not None:
        assert len(begin.requests) == 2
        assert loaded.workload.context_tokens(0) >= steps
        assert len(loaded.routing.gates(steps, begin.requests, 29)[1].experts) == 8
        steps += 1
    assert steps == 4


def test_generated_requests_of_different_lengths_fill_all_steps():
    model = ModelSpec("gemma4_26b_a4b", 30, 128, 8)
    loaded = load_workload(config("agentic", concurrency=3, steps=10, length_spread=0.6), model)
    assert loaded.workload.full_steps >= 10
    assert not loaded.warnings

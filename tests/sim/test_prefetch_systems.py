"""The prefetching systems in the simulator: they run, they prefetch, they pay, and they keep to the gates."""

import json
from pathlib import Path

import numpy as np
import pytest

from analysis.metrics import Metrics
from conf.cells import resolved
from conf.compose import composing, expand
from policies.core.journal import read_journal
from policies.core.messages import Compute, Fetch, StepBegin
from policies.core.types import FetchKind, ModelSpec, Phase, UserError
from sim.run import simulate, validate
from traces import train_promoe
from traces.format import RequestTrace, Trace
from traces.storage import write_trace

TINY = (
    "model=olmoe_1b_7b",
    "model.n_layers=6",
    "model.n_experts=16",
    "model.top_k=2",
    "model.attention=[{kind:full,layers:6,heads:16,kv_heads:16,head_dim:128}]",
    "concurrency=3",
    "cache.fraction=0.5",
    "steps=10",
    "warmup=2",
    "check=true",
)
LEARN = ("prefetch.learn.requests=3", "prefetch.learn.steps=16")
BASELINES = ("mixtral_offloading", "specmd", "finemoe", "finemoe_asis", "moe_infinity")
SYSTEMS = [name + suffix for name in BASELINES for suffix in ("", "_lfu")] + ["bevy_prefetch"]


def settings(system, *more):
    learn = LEARN if system.startswith(("finemoe", "moe_infinity")) else ()
    with composing() as first:
        (point,) = expand([*first, f"system={system}", *TINY, *learn, *more])
    return resolved(point.config)


def simulated(folder: Path, system, *more):
    folder.mkdir()
    simulate(settings(system, *more), folder, progress=False, measure=Metrics)
    _, records = read_journal(folder / "journal.jsonl.gz")
    return json.loads((folder / "summary.json").read_text()), list(records)


def needs(records):
    """What each step computes with, by layer: the model's result."""
    step, out = -1, {}
    for record in records:
        for event in record.events:
            if isinstance(event, StepBegin):
                step = event.step
        for command in record.commands:
            if isinstance(command, Compute) and command.phase is Phase.JOB:
                out.setdefault((step, command.layer), set()).update(command.experts)
    return out


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The same requests without a prefetch."""
    return needs(simulated(tmp_path_factory.mktemp("none") / "run", "llama_cpp_lfu")[1])


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_prefetches_and_computes_the_same(system, tmp_path, without):
    summary, records = simulated(tmp_path / "run", system)
    commands = [command for record in records for command in record.commands]
    assert any(isinstance(c, Fetch) and c.kind is FetchKind.PREFETCH for c in commands)
    assert needs(records) == without
    assert summary["predictor"]["charge"] == "compute"
    assert ("learnt_from" in summary["routing"]) == system.startswith(("finemoe", "moe_infinity"))


@pytest.mark.parametrize("system", ["specmd", "finemoe_asis_lfu"])
def test_prefetches_occupy_two_readers_at_most(system, tmp_path):
    _, records = simulated(tmp_path / "run", system)
    flying, most = {}, 0
    for record in records:
        for event in record.events:
            flying.pop(getattr(event, "fetch", None), None)
            chosen = {expert for gate in getattr(event, "gates", ()) for expert in gate.experts}
            flying = {fetch: expert for fetch, expert in flying.items() if expert not in chosen}  # demands from now on
        for command in record.commands:
            if isinstance(command, Fetch) and command.kind is FetchKind.PREFETCH:
                flying[command.fetch] = command.expert
        most = max(most, len(flying))
    assert most == 2


def test_the_same_run_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        simulated(tmp_path / name, "finemoe_lfu")
    one, two = ((tmp_path / name / "journal.jsonl.gz").read_bytes() for name in ("a", "b"))
    assert one == two


def test_a_store_costs_cache_slots(tmp_path):
    paid = simulated(tmp_path / "paid", "finemoe_lfu", "prefetch.learn.steps=128", "prefetch.learn.requests=40")[0]
    free = simulated(tmp_path / "free", "finemoe_lfu", "prefetch.charge=none")[0]
    assert paid["cache_slots"] == free["cache_slots"] - 1
    assert paid["predictor"]["memory_bytes"] == 4096 * 6 * 16 * 4


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A trace with hidden states, and networks trained on all but its first three requests."""
    folder = tmp_path_factory.mktemp("captured")
    model, rng = ModelSpec("tiny", 6, 16, 2), np.random.default_rng(0)
    maps, requests = rng.standard_normal((6, 8, 16)), []
    for number in range(9):
        hidden = rng.standard_normal((24, 1, 8)) + 0.1 * rng.standard_normal((24, 7, 8))
        scores = np.einsum("tlh,lhe->tle", hidden[:, :-1], maps)
        experts = np.argsort(-scores, axis=-1)[..., :2].astype(np.uint16)
        requests.append(RequestTrace(number, experts, {"hidden": hidden.astype(np.float16)}, prompt_tokens=5))
    write_trace(folder / "trace", Trace(model, tuple(requests), source="made by a test"))
    arguments = [f"trace={folder / 'trace'}", "requests=6", "width=16", "epochs=30", f"out={folder / 'networks'}"]
    assert train_promoe.main(arguments) == 0
    return folder


@pytest.mark.parametrize("system", ["promoe", "promoe_lfu"])
def test_promoe_runs_on_a_captured_trace(system, tmp_path, captured):
    trace = ("workload=trace", f"workload.path={captured / 'trace'}", "workload.requests=3")
    summary, records = simulated(tmp_path / "run", system, *trace, f"prefetch.predictor.path={captured / 'networks'}")
    commands = [command for record in records for command in record.commands]
    assert any(isinstance(c, Fetch) and c.kind is FetchKind.PREFETCH for c in commands)
    assert needs(records) == needs(simulated(tmp_path / "plain", "llama_cpp_lfu", *trace)[1])
    assert summary["predictor"]["bytes_per_batch"] == 4 * (8 * 16 + 16 * 16 + 16 * 16)
    every = (
        "workload=trace",
        f"workload.path={captured / 'trace'}",
        "workload.selection=random",
        "workload.requests=9",
    )
    with pytest.raises(UserError, match=r"ProMoE has learnt from request \d, which is tested here; train it on other"):
        simulated(tmp_path / "again", system, *every, f"prefetch.predictor.path={captured / 'networks'}")


def test_promoe_says_what_it_lacks():
    with pytest.raises(UserError, match=r"python -m traces\.train_promoe"):
        validate(settings("promoe"))

"""The demo from end to end, on a model of kilobytes."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from packs import random_store

from analysis.runs import find_runs
from executor import calibrate, demo
from executor.__main__ import main
from policies.core.types import UserError


@pytest.mark.slow
def test_every_group_is_measured_and_predicted(tmp_path, monkeypatch, capsys):
    whole = calibrate.measure_curve
    monkeypatch.setattr(calibrate, "measure_curve", lambda *a, **k: whole(*a, **{**k, "seconds": 0.01}))
    monkeypatch.setattr(
        calibrate, "memory_bytes_per_s", lambda device="cpu": 1e12
    )  # a tiny file is read from a cache, if anywhere
    monkeypatch.setattr(demo, "FRACTIONS", (0.5, 0.8))
    random_store(tmp_path / "pack", layers=4)
    assert main(["demo", f"pack={tmp_path / 'pack'}", f"runs={tmp_path}", "steps=4", "allow_buffered=true"]) == 0
    captured = capsys.readouterr()
    assert "sentinel" in captured.err
    for part in ("llama.cpp + LFU", "static 4:4", "Bevy", "raw link", "paced", "prediction: mean error"):
        assert part in captured.out
    runs, predicted = find_runs([tmp_path / "demo"]), find_runs([tmp_path / "demo_predicted"])
    assert len(runs) == len(predicted) == 2 * 2 * 3
    assert {run.summary["backend"] for run in runs} == {"executor"}
    assert {run.summary["steps"] for run in runs} == {demo.WARMUP + 4}
    assert {run.summary["link"].split()[0] for run in runs} == {"raw", "paced"}
    assert {run.summary["steps"] for run in predicted} == {demo.WARMUP + 4}
    batching = [run.summary for run in runs if run.summary["system"] == "llama_cpp_lfu"]
    raw = {run["cache_fraction"]: run for run in batching if run["link"] == "raw"}
    rate = raw[min(raw)]["bytes_per_step"] / (1.2 * raw[max(raw)]["gpu_busy_s_per_step"])
    for run in batching:
        assert run["link"] == "raw" or float(run["link"].split()[1]) == pytest.approx(rate / 1e9, rel=0.01, abs=0.005)


def test_options(tmp_path):
    options = demo.Options.parse([f"runs={tmp_path}", "seconds=60"])
    assert options.pack == tmp_path / "packs" / "demo"
    assert (options.seconds, options.steps) == (60, None)
    with pytest.raises(UserError, match="did you mean seconds"):
        demo.Options.parse(["second=3"])


def test_the_pack_and_its_routing_are_made_once(tmp_path):
    store = random_store(tmp_path / "pack")
    assert demo.make_pack(tmp_path / "pack").spec == store.spec
    path = demo.make_routing(tmp_path / "routing.parquet", store.spec)
    before = path.stat().st_mtime_ns
    assert demo.make_routing(path, store.spec).stat().st_mtime_ns == before
    from traces.trace_file import TraceFile

    trace = TraceFile(path).read()
    assert len(trace.requests) == demo.REQUESTS
    assert json.dumps(trace.model.n_experts) == str(store.spec.n_experts)

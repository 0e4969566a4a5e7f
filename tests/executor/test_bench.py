"""The benchmark command: groups in turns, a device that is stood in for, and what it refuses to call valid."""

import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pandas as pd
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from packs import random_store  # noqa: E402
from runs_world import quick, tiny_pack  # noqa: E402

from analysis.runs import find_runs  # noqa: E402
from conf.devices import DeviceConfig  # noqa: E402
from executor import comparison, host  # noqa: E402
from executor.bench import main  # noqa: E402
from executor.compose import settings_of  # noqa: E402
from executor.fast.ops import reference_ops  # noqa: E402
from executor.settings import MachineSettings  # noqa: E402
from executor.stand_in import batch_seconds, describe, in_flight, stand_in  # noqa: E402
from policies.core.messages import Compute  # noqa: E402
from policies.core.types import Phase, UserError  # noqa: E402

M6 = ("device=m6", "device.link.bytes_per_s.value=4e6", "device.gpu.roofline.launch_s.value=2e-3")
"""A device of a few milliseconds a job, which any machine can stand in for."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def bench(pack, runs, *more):
    words = [word for word in quick(pack, runs, "store=ram", *more) if not word.startswith("steps=")]
    return main([*words, "turns=2"])


def test_groups_of_systems_leave_run_directories_and_one_table(tiny, tmp_path, capsys):
    assert bench(tiny, tmp_path, "system=llama_cpp_lfu,bevy", "cache.fraction=0.5,0.8") == 0
    out = capsys.readouterr().out
    for part in ("50% cache, 4 requests", "80% cache, 4 requests", "llama.cpp + LFU", "Bevy", "sentinel: "):
        assert part in out
    runs = find_runs([tmp_path / "t"])
    assert len(runs) == 4
    for run in runs:
        assert run.summary["steps"] == run.summary["warmup"] + 4
        assert run.summary["valid"]
        assert run.summary["interleaved"]["systems"] == ["llama_cpp_lfu", "bevy"]
        assert (run.summary["link"], run.summary["batches"]) == ("raw", "raw")
    record = json.loads((tmp_path / "t" / "bench.json").read_text())
    assert len(record["sentinel_step_s"]) == 2
    assert [len(group["runs"]) for group in record["groups"]] == [2, 2]


def test_a_device_that_is_stood_in_for_is_predicted_and_decides_alike(tiny, tmp_path, capsys):
    assert bench(tiny, tmp_path, "system=llama_cpp_lfu", *M6) == 0
    assert "paced to m6" in capsys.readouterr().out
    (run,), (sim,) = find_runs([tmp_path / "t"]), find_runs([tmp_path / "t_predicted"])
    assert run.summary["device"] == sim.summary["device"] == "m6"
    assert run.summary["link"] == "paced 0.00 GB/s"
    assert run.summary["batches"].startswith("paced to m6 (roofline")
    assert sim.summary["backend"] == "sim"
    columns = [pd.read_parquet(each.path / "steps.parquet")["demand_fetches"].tolist() for each in (run, sim)]
    assert columns[0] == columns[1]


def test_a_batch_takes_what_the_profile_says(tiny, tmp_path):
    (settings,) = settings_of(quick(tiny, tmp_path, *M6, "device.gpu.host_s.value=0.25"))
    machine = MachineSettings.from_settings(settings)
    device = stand_in(settings, machine)
    assert isinstance(device, DeviceConfig)
    decoder = SimpleNamespace(requests={7: SimpleNamespace(position=100), 9: SimpleNamespace(position=300)})
    each = device.times.request_s
    found = batch_seconds(device, decoder)(Compute(1, Phase.JOB, 0, (7, 9), (3, 4, 5), (0, 1, 2)))
    assert found == pytest.approx(0.25 + device.times.seconds(Phase.JOB, 0, 2, 3, each(100) + each(300)))
    assert in_flight(machine, device) == 8
    assert in_flight(machine, None) == 2
    assert describe(machine, None) == {"link": "raw", "batches": "raw"}


def test_a_device_brings_its_own_link(tiny, tmp_path, capsys):
    assert bench(tiny, tmp_path, *M6, "link=paced", "bytes_per_s=1e6") == 2
    assert "device=m6 brings its own link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["steps=9"], "give turns="),
        (["turns=1"], "turns is 1, expected a whole number from 2"),
        (["torch_device=cpu", "runs=a,b"], "runs has several values"),
        (["mode=live", "workload=prompts", "record_trace=x.parquet"], "single runs"),
        (["kernel=x"], "no such setting"),
    ],
)
def test_bad_input(tiny, tmp_path, more, message, capsys):
    words = [word for word in quick(tiny, tmp_path, "store=ram") if word.split("=")[0] not in {"steps", "runs"}]
    assert main([*words, *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figure", "groups", "systems"), [("8", 5, 4), ("9", 7, 4), ("10", 1, 4), ("11", 1, 6), ("12", 1, 4)]
)
def test_the_figures_are_experiments(figure, groups, systems, tiny, monkeypatch, capsys):
    """``tiny`` has eight experts a layer, too few for 10%: the sizes are checked on the plan, not run."""
    monkeypatch.setattr(comparison, "validate", lambda settings: None)
    found = comparison.plan([f"experiment=exec_fig{figure}", f"pack={tiny}"], 2)
    assert [len(group.cells) for group in found] == [systems] * groups
    assert {folder.parent.name for group in found for folder in group.folders} == {f"exec_fig{figure}"}
    assert main([f"experiment=exec_fig{figure}", f"pack={tiny}", "device=nosuch"]) == 2
    assert "there is no such device" in capsys.readouterr().err


def test_a_group_that_breaks_is_named_and_the_others_go_on(tiny, tmp_path, monkeypatch, capsys):
    whole, calls = comparison.interleave, []

    def breaks_first(*arguments, **more):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no luck")
        return whole(*arguments, **more)

    monkeypatch.setattr(comparison, "interleave", breaks_first)
    assert bench(tiny, tmp_path, "system=bevy", "cache.fraction=0.5,0.75") == 1
    assert "50% cache" in (error := capsys.readouterr().err)
    assert "RuntimeError: no luck" in error
    (run,) = find_runs([tmp_path / "t"])
    assert run.summary["cache_fraction"] == 0.75


def test_each_group_is_shown_when_it_ends_and_predicted(tmp_path, monkeypatch, capsys):
    """Nothing paced, experts from host memory: the simulator's step of every cell, whatever comes afterwards."""
    pack = random_store(tmp_path / "pack", layers=6, experts=16).path
    measured, seen = [], []
    whole, ended = comparison.calibrate, comparison._say

    def counting(*arguments, **more):
        measured.append(1)
        return whole(*arguments, **more)

    monkeypatch.setattr(comparison, "calibrate", counting)
    monkeypatch.setattr(comparison, "_say", lambda line: (ended(line), seen.append((line, capsys.readouterr().out))))
    more = ("system=llama_cpp_lfu,bevy", "cache.fraction=0.5,0.75", "calibrate=true")
    assert bench(pack, tmp_path, *more) == 0
    assert measured == [1]  # both groups have four requests
    outs = [out for line, out in seen if " of 2 done" in line]
    for out, size in zip(outs, ("50%", "75%"), strict=True):
        assert f"{size} cache, 4 requests" in out
        assert len([line for line in out.splitlines() if line.startswith(("llama.cpp + LFU", "Bevy"))]) == 2
    assert "over 2 cells" in capsys.readouterr().out
    for run, sim in zip(find_runs([tmp_path / "t"]), find_runs([tmp_path / "t_predicted"]), strict=True):
        assert sim.summary["device"] == "here"
        assert sim.summary["steps"] == run.summary["steps"]
        assert (run.summary["link"], run.summary["batches"]) == ("raw", "raw")
        assert 0.2 < sim.summary["step_s_mean"] / run.summary["step_s_mean"] < 5  # it is the machine that was measured


def test_a_driver_that_launches_itself_is_a_resource_of_the_prediction(tmp_path, monkeypatch, capsys):
    """The fast path with torch in the place of kernels: reads on threads, batches launched by the driver."""
    monkeypatch.setattr("executor.fast.choice.triton_ops", reference_ops)
    monkeypatch.setattr("executor.settings._check_together", lambda values: None)  # on this machine's CPU all the same
    pack = random_store(tmp_path / "pack", layers=6, experts=16).path
    more = ("kernels=triton", "graphs=false", "system=llama_cpp_lfu,bevy", "cache.fraction=0.5", "calibrate=true")
    assert bench(pack, tmp_path, *more) == 0
    assert "us a batch + " in capsys.readouterr().err
    for run, sim in zip(find_runs([tmp_path / "t"]), find_runs([tmp_path / "t_predicted"]), strict=True):
        assert run.summary["kernels"]["name"] == "triton"
        driver = sim.summary["device_constants"]["driver"]
        assert driver["batch_s"] + driver["request_s"] > 0
        assert sim.summary["device_constants"]["contention"] >= 1.0
        assert 0.2 < sim.summary["step_s_mean"] / run.summary["step_s_mean"] < 5


def test_without_a_calibration_the_runs_are_still_shown(tiny, tmp_path, monkeypatch, capsys):
    def fails(*arguments, **more):
        raise UserError("only 3 jobs ran")

    monkeypatch.setattr(comparison, "calibrate", fails)
    assert bench(tiny, tmp_path, "system=bevy", "calibrate=true") == 1
    out, error = capsys.readouterr()
    assert "Bevy" in out
    assert "not calibrated: UserError: only 3 jobs ran" in error
    assert [run.summary["valid"] for run in find_runs([tmp_path / "t"])] == [True]


def test_without_a_prediction_the_runs_are_still_shown(tiny, tmp_path, monkeypatch, capsys):
    def fails(settings):
        raise ValueError("no such thing")

    monkeypatch.setattr("executor.bench.predict", fails)
    assert bench(tiny, tmp_path, "system=bevy", "device=cpu_disk") == 1
    out, error = capsys.readouterr()
    assert "Bevy" in out
    assert "not predicted: ValueError: no such thing" in error
    assert [run.summary["valid"] for run in find_runs([tmp_path / "t"])] == [True]


def test_a_group_for_which_no_time_is_left_is_left_out(tiny, tmp_path, monkeypatch, capsys):
    clock, now = comparison.time.perf_counter, [0.0]
    whole = comparison.interleave

    def slow(*arguments, **more):
        now[0] += 1000.0
        return whole(*arguments, **more)

    monkeypatch.setattr(comparison, "interleave", slow)
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: clock() + now[0])
    assert bench(tiny, tmp_path, "system=bevy", "cache.fraction=0.5,0.75", "seconds=1500") == 1
    assert "75% cache" in (error := capsys.readouterr().err)
    assert "s were left of seconds=1500" in error
    (run,) = find_runs([tmp_path / "t"])
    assert run.summary["cache_fraction"] == 0.5


def test_buffered_reads_and_kernels_compiled_in_between_make_a_run_invalid(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "why_invalid", lambda meter, direct: ["reads went through the page cache"])

    class Busy(host.Compiled):
        def __exit__(self, *error):
            self.count = 3

    monkeypatch.setattr("executor.interleave.Compiled", Busy)
    assert bench(tiny, tmp_path, "system=bevy", "store=disk") == 1
    error = capsys.readouterr().err
    assert "invalid: reads went through the page cache" in error
    assert "3 kernels were compiled while time was taken" in error
    (run,) = find_runs([tmp_path / "t"])
    assert not run.summary["valid"]


def test_compiled_kernels_are_counted(monkeypatch):
    runtime = SimpleNamespace(jit_post_compile_hook=None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    with host.Compiled() as compiled:
        runtime.jit_post_compile_hook(key="a", fn=None)
        runtime.jit_post_compile_hook(key="b", fn=None)
    assert compiled.count == 2
    assert runtime.jit_post_compile_hook is None


def test_no_step_is_no_measurement(tiny, tmp_path, monkeypatch):
    (settings,) = settings_of(quick(tiny, tmp_path, "store=ram"))
    monkeypatch.setattr(comparison.OpenRun, "decode", lambda run, steps: 0)
    with ExitStack() as stack, pytest.raises(UserError, match="the sentinel decoded no step"):
        comparison.sentinel_s(settings, *comparison.share([comparison.Turns((settings,))], stack))

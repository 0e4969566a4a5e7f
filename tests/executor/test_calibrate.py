"""From runs to a device profile, and the profile in the simulator."""

from dataclasses import asdict, astuple, replace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from runs_world import tiny_pack

from conf.sharing import DriverSharing
from executor import calibrate as command
from executor.driver_fit import DriverRun, driver_level, driver_run, fit_driver, fit_gpu, from_step, scaled
from executor.job_fit import JobSample, contention, fit_jobs, job_samples, level, table
from executor.store import ExpertStore
from policies.core.journal import Record
from policies.core.messages import Compute, ComputeDone, Fetch, FetchDone, Gate, StepBegin
from policies.core.types import FetchKind, Phase, UserError

LAYERS = 10


def jobs(a, b, c, *, more=1.0, noise=0.0):
    """Jobs of known constants; every second one ran beside a read for half of its own work."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(200):
        n = 1 + i % 8
        experts = int(rng.integers(4, 4 + 2 * n))
        alone = (a + b * experts + c * n) * (1 + noise * rng.standard_normal())
        overlap = 0.5 * (i % 2)
        found.append(JobSample(Phase.JOB, i % (LAYERS - 1), n, experts, alone * (1 + (more - 1) * overlap), overlap))
    return [*found, JobSample(Phase.HEAD, LAYERS, 8, 0, 0.004, 0.0), JobSample(Phase.JOB, LAYERS - 1, 8, 9, 9.0, 0.0)]


def test_constants_come_back():
    fit = fit_jobs(jobs(2e-3, 3e-4, 1e-4), LAYERS, 3e-4)
    assert (fit.layer_s, fit.expert_s, fit.request_s) == pytest.approx((2e-3, 3e-4, 1e-4), rel=1e-6)
    assert fit.head_s == pytest.approx(0.004)
    assert fit.samples == 100
    assert fit.spread == pytest.approx(0, abs=1e-6)
    assert fit.scaled(2).job_s(3, 5) == pytest.approx(2 * fit.job_s(3, 5))


def test_constants_are_plain_numbers_with_or_without_an_expert_measured_alone():
    """They go into a profile, where a number of numpy's is no value."""
    for alone in (3e-4, None):
        fit = fit_jobs(jobs(2e-3, 3e-4, 1e-4), LAYERS, alone)
        assert {type(value) for value in asdict(fit).values()} == {float, int}


def test_the_mean_is_kept_and_no_constant_is_negative():
    samples = jobs(0.0, 3e-4, 1e-3, noise=0.2)
    fit = fit_jobs(samples, LAYERS, 5e-4)  # measured alone an expert seemed dearer
    assert min(fit.layer_s, fit.expert_s, fit.request_s) >= 0
    quiet = [s for s in samples if s.overlap == 0 and s.phase is Phase.JOB and s.layer < LAYERS - 1]
    assert sum(fit.job_s(s.requests, s.experts) for s in quiet) == pytest.approx(sum(s.seconds for s in quiet))


def test_contention_and_level_are_told_apart():
    fit = fit_jobs(jobs(2e-3, 3e-4, 1e-4), LAYERS, 3e-4)
    slower = jobs(4e-3, 6e-4, 2e-4, more=1.3)
    assert contention(slower, fit, LAYERS) == pytest.approx(1.3)
    assert contention(jobs(2e-3, 3e-4, 1e-4, more=0.8), fit, LAYERS) == 1.0
    assert level(jobs(4e-3, 6e-4, 2e-4), fit, LAYERS) == pytest.approx(2.0)


def test_too_few_jobs_are_refused():
    with pytest.raises(UserError, match="calibrate with a larger cache"):
        fit_jobs(jobs(1, 1, 1)[:20], LAYERS, 1.0)


def test_samples_know_how_long_something_was_read_beside_them():
    records = [
        Record(0.0, (StepBegin(0, (1, 2)),), (Compute(1, Phase.ENTRY, -1, (1, 2)),)),
        Record(1.0, (ComputeDone(1),), (Compute(2, Phase.JOB, 0, (1, 2), (3, 4, 5), (0, 1, 2)),)),
        Record(2.0, (), (Fetch(1, 9, 3, FetchKind.DEMAND),)),
        Record(4.0, (FetchDone(1),), ()),
        Record(5.0, (ComputeDone(2),), ()),
    ]
    entry, job = job_samples(records)
    assert (entry.phase, entry.seconds, entry.overlap) == (Phase.ENTRY, 1.0, 0.0)
    assert (job.requests, job.experts, job.seconds, job.overlap) == (2, 3, 4.0, 0.5)
    assert table([entry, job], 5) == []
    rows = table([JobSample(Phase.JOB, 0, 2, 3, s, 0.0) for s in (1.0, 3.0)], 5)
    assert rows == [{"requests": 2, "experts": 3, "jobs": 2, "mean_s": 2.0, "std_s": 1.0}]


# ---------------------------------------------------------------- where the driver is the limit

DRIVER = DriverSharing(batch_s=30e-6, job_s=20e-6, request_s=60e-6, prediction_s=50e-6, fetch_s=10e-6)
GPU_A, GPU_C, HEAD = 70e-6, 5e-6, 200e-6


def of_driver(*counts, waited_s=0.0):
    """``counts``: batches, jobs, requests, predictions, reads."""
    return DriverRun(sum(n * s for n, s in zip(counts, astuple(DRIVER), strict=True)), waited_s, counts)


def resident(size, jobs=1, steps=3):
    """Batches of a run of 8 requests in groups of ``size`` and ``jobs``, one in flight, all experts at hand."""
    found = []
    for _ in range(steps):
        found.append(JobSample(Phase.ENTRY, -1, 8, 0, 1e-3, 0.0))
        for layer in range(LAYERS):
            found += [JobSample(Phase.JOB, layer, size, 8, 1e-3, 0.0)] * (8 // size)
        found.append(JobSample(Phase.HEAD, LAYERS, 8, 0, DRIVER.batch_s + 8 * DRIVER.request_s + HEAD, 0.0))
    batches = [s for s in found if s.phase is Phase.JOB]
    waited_s = sum(GPU_A + s.requests * GPU_C for s in batches) + steps * HEAD
    n_jobs = steps * 8 // size * jobs + jobs * len(batches)
    return found, of_driver(len(found), n_jobs, sum(s.requests for s in found), 0, 0, waited_s=waited_s)


def test_a_drivers_constants_come_back_and_the_gpus_beside_them():
    samples, runs = zip(*(resident(*kind) for kind in ((8,), (2,), (1,), (8, 8))), strict=True)
    missing = [of_driver(400, 400, 3000, 0, 5000), of_driver(400, 400, 3000, 2900, 7000)]
    driver = fit_driver([*runs, *missing])
    assert asdict(driver) == pytest.approx(asdict(DRIVER))
    fit = fit_gpu(samples, runs, driver)
    assert (fit.layer_s, fit.request_s, fit.head_s, fit.expert_s) == pytest.approx((GPU_A, GPU_C, HEAD, 0.0))
    assert fit.spread == pytest.approx(0, abs=1e-9)
    assert {type(value) for value in asdict(driver).values()} == {float}


def test_the_level_of_a_driver_is_its_own_time_over_the_expected():
    run = of_driver(42, 41, 336, 0, 600)
    assert driver_level(replace(run, busy_s=2 * run.busy_s), DRIVER) == pytest.approx(2.0)
    assert asdict(scaled(DRIVER, 2.0)) == pytest.approx({key: 2 * value for key, value in asdict(DRIVER).items()})


def test_records_from_a_step_on():
    begins = [Record(float(i), (StepBegin(i // 2, (1,)) if i % 2 == 0 else ComputeDone(i),), ()) for i in range(8)]
    assert from_step(begins, 2) == begins[4:]
    with pytest.raises(UserError, match="before step 4"):
        from_step(begins, 4)


@pytest.mark.parametrize(("units", "jobs"), [(1, 2), (2, 3), (None, 4)])
def test_what_a_driver_did_is_counted_from_the_journal(units, jobs):
    ahead = Gate((7, 8), ((9, 0.5),))
    records = [
        Record(1.0, (StepBegin(0, (1, 2)),), (Compute(1, Phase.ENTRY, -1, (1, 2)),)),
        Record(2.0, (ComputeDone(1, (ahead, Gate((7, 8)))),), (Fetch(1, 7, 0, FetchKind.DEMAND),)),
        Record(4.0, (FetchDone(1),), (Compute(2, Phase.JOB, 0, (1, 2), (7, 8), (0, 1)),)),
        Record(5.0, (ComputeDone(2),), ()),
    ]
    found = driver_run(records, job_samples(records), 1.5, units)
    assert found == DriverRun(busy_s=2.5, waited_s=1.5, counts=(2, jobs, 4, 1, 1))


# ---------------------------------------------------------------- the command


@pytest.fixture
def quick_curve(monkeypatch):
    """Short reads; and no limit from this machine's memory, which a tiny file in the page cache may exceed."""
    whole = command.measure_curve
    monkeypatch.setattr(command, "measure_curve", lambda *a, **k: whole(*a, **{**k, "seconds": 0.01}))
    monkeypatch.setattr(command, "memory_bytes_per_s", lambda device="cpu": 1e12)


def arguments(pack, out, *more):
    return [f"pack={pack}", f"out={out}", "concurrency=4", "steps=8", "context_tokens=4", "allow_buffered=true", *more]


@pytest.mark.parametrize("pace", [(), ("bytes_per_s=1e9",)])
def test_a_profile_is_written_and_the_simulator_runs_on_it(pace, tmp_path, quick_curve, capsys):
    from sim.__main__ import main as simulate

    pack = tiny_pack(tmp_path)
    assert command.main(arguments(pack, tmp_path / "conf", "name=mine", *pace)) == 0
    assert "python -m sim --config-dir" in capsys.readouterr().out
    device = OmegaConf.to_container(OmegaConf.load(tmp_path / "conf" / "device" / "mine.yaml"))
    assert device["link"]["sharing"] == ("one_at_a_time" if pace else "fair")
    seen = device["measured"]
    assert {row["requests"] for row in seen["jobs_by_requests_and_experts"]} == {1, 2, 4}
    assert {row["readers"] for row in seen["link_by_size_and_readers"]} == {1, 2, 4, 8}
    assert seen["machine"]["torch"]
    options = ["--config-dir", str(tmp_path / "conf"), "device=mine", "model=demo_pack", "system=bevy", "~experiment"]
    more = ["concurrency=4", "steps=6", "warmup=2", "cache.fraction=0.5", f"runs={tmp_path}", "study=s", "workers=1"]
    assert simulate([*options, *more]) == 0
    assert "Bevy" in capsys.readouterr().out


def test_a_figure_above_the_machines_memory_is_refused(tmp_path, quick_curve, monkeypatch, capsys):
    monkeypatch.setattr(command, "memory_bytes_per_s", lambda device="cpu": 1.0)
    assert command.main(arguments(tiny_pack(tmp_path), tmp_path / "conf")) == 2
    assert "above this machine's memory rate" in capsys.readouterr().err
    assert not (tmp_path / "conf").exists()


def test_usage_and_bad_arguments(capsys, tmp_path):
    assert command.main([]) == 2
    assert command.main(["--help"]) == 0
    assert "out/device/NAME.yaml" in capsys.readouterr().out
    assert command.main(["out=x"]) == 2
    assert "pack= is missing" in capsys.readouterr().err
    assert command.main([f"pack={tmp_path}", "out=x"]) == 2


def test_systems_of_a_calibration():
    assert command.systems(5) == ("llama_cpp_lfu", "static_2_2_1", "static_1_1_1_1_1")
    assert command.systems(1) == ("llama_cpp_lfu", "static_1")


def test_fewest_readers_that_fill_the_link(tmp_path):
    from types import SimpleNamespace

    from executor.link_curve import LinkPoint
    from executor.profile import fewest_readers

    rates = {1: 1.0, 2: 1.9, 4: 2.0, 8: 1.97}
    curve = [LinkPoint(100, readers, rate, 0, 0, 1) for readers, rate in rates.items()]
    assert fewest_readers(SimpleNamespace(curve=[*curve, LinkPoint(400, 1, 9.0, 0, 0, 1)]), 100) == 2
    assert ExpertStore.open(tiny_pack(tmp_path)).stride % 4096 == 0

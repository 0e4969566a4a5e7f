"""Ratios of neighbouring turns by hand, and the notes that a reader needs."""

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis.paired import Group, paired_ratios, rows, table, turns_s
from analysis.runs import find_runs
from conf.rundir import write_json
from policies.core.types import UserError


def run(folder, system, step_s, rate=1e9, chunk=2, **more):
    path = folder / system
    path.mkdir(parents=True)
    pd.DataFrame({"step_s": step_s}).to_parquet(path / "steps.parquet")
    OmegaConf.save(OmegaConf.create({"system": {"name": system, "label": system.upper()}}), path / "config.yaml")
    mean = float(np.mean(step_s[1:]))
    summary = {
        "system": system,
        "warmup": 1,
        "interleaved": {"chunk_steps": chunk},
        "step_s_mean": mean,
        "tokens_per_s": 8 / mean,
        **dict.fromkeys(("busy_both", "link_only", "gpu_only", "neither"), 0.25),
        "link_bytes_per_s": rate,
        "bytes_per_step": 3e8,
        "rho": 1.2,
        "warnings": ["random weights (x): for timing only", "slow"],
        **more,
    }
    write_json(path / "summary.json", summary)
    return path


def test_turns_are_sums_after_the_warm_up(tmp_path):
    (found,) = find_runs([run(tmp_path, "bevy", [9.0, 1.0, 2.0, 3.0, 4.0, 5.0])])
    assert turns_s(found).tolist() == [3.0, 7.0]  # the odd step at the end is no whole turn


def test_quantiles_of_ratios_of_neighbours():
    base, other = np.arange(1.0, 12.0), np.ones(11)
    assert paired_ratios(base, other) == pytest.approx((2.0, 6.0, 10.0))
    assert paired_ratios(np.array([3.0, 8.0]), np.array([1.0, 2.0, 99.0])) == pytest.approx((3.1, 3.5, 3.9))
    with pytest.raises(UserError, match="raise steps"):
        paired_ratios(np.array([]), other)


def test_rows_and_notes(tmp_path):
    base = run(tmp_path, "llama_cpp_lfu", [0.0, 3.0, 3.0, 6.0, 6.0])
    bevy = run(tmp_path, "bevy", [0.0, 2.0, 2.0, 3.0, 3.0], rate=1.2e9)
    sim = run(tmp_path / "sim", "bevy", [0.0, 2.0, 2.0, 2.0, 4.0, 99.0])  # of its steps only those measured count
    first, second = rows(Group("t", (base, bevy), {bevy: sim}))
    assert first.ratios is None
    assert first.error is None
    assert second.ratios == pytest.approx((1.55, 1.75, 1.95))
    assert second.predicted_s == 2.5
    assert second.error == pytest.approx(0.0)
    text = table([Group("30% cache", (base, bevy), {bevy: sim})])
    assert "saw different rates (GB/s: LLAMA_CPP_LFU 1.00, BEVY 1.20)" in text
    assert "note: BEVY: slow" in text
    assert "random weights" not in text
    assert "mean error 0.0% over 1 cells" in text


def test_systems_that_are_predicted_in_another_order_are_counted(tmp_path):
    base = run(tmp_path, "llama_cpp_lfu", [0.0, 4.0, 4.0])
    bevy = run(tmp_path, "bevy", [0.0, 2.0, 2.0])
    lfu = run(tmp_path, "specmd_lfu", [0.0, 3.0, 3.0])
    folders = {
        path: run(tmp_path / "sim", path.name, [0.0, s, s]) for path, s in ((base, 4.0), (bevy, 3.0), (lfu, 2.0))
    }
    text = table([Group("t", (base, bevy, lfu), folders)])
    assert "2 of 3 pairs of systems in the measured order, the others differ by up to 33.3%" in text
    assert "over 2 cells" in text


def test_without_a_baseline_there_are_no_ratios(tmp_path):
    (row,) = rows(Group("t", (run(tmp_path, "bevy", [0.0, 1.0, 1.0]),), {}))
    assert row.ratios is None
    assert "prediction" not in table([Group("t", (tmp_path / "bevy",), {})])

"""Cells as one table: averages over seeds, ratios by hand, gaps, and what a predictor's memory does not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.compare import compare
from analysis.runs import find_runs
from analysis.study import find_study, speedups
from policies.core.types import UserError
from tests.analysis.figure_world import Runs


def test_ratios_are_taken_within_a_seed_and_then_averaged(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for seed, (llama, finemoe, specmd, bevy) in enumerate([(10, 20, 16, 24), (10, 15, 20, 28)]):
        for system, value in zip(
            ("llama_cpp", "finemoe", "specmd", "bevy"), (llama, finemoe, specmd, bevy), strict=True
        ):
            runs.add(system, value, seed=seed)
    study = find_study([tmp_path])
    (row,) = speedups(study).to_dict("records")
    assert row["bevy_over_fastest"] == pytest.approx((24 / 20 + 28 / 20) / 2)
    assert row["bevy_over_llama_cpp"] == pytest.approx(2.6)
    assert row["prefetch_over_llama_cpp"] == pytest.approx(2.0)
    assert row["finemoe_over_llama_cpp"] == pytest.approx(1.75)
    assert study.means("tokens_per_s").set_index("system")["tokens_per_s"]["bevy"] == pytest.approx(26)


def test_a_failed_cell_is_a_row_without_numbers_and_has_no_ratio(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for system in ("llama_cpp", "specmd", "bevy"):
        for requests in (2, 4):
            runs.add(system, 10.0 * requests, concurrency=requests)
    runs.add("finemoe", 12.0, concurrency=2)
    runs.fail("finemoe", "no order today", concurrency=4)
    study = find_study([tmp_path])
    means = study.means("tokens_per_s").set_index(["system", "concurrency"])["tokens_per_s"]
    assert means.isna().to_dict()["finemoe", 4]
    assert means.isna().sum() == 1
    ratios = speedups(study).set_index("concurrency")["bevy_over_fastest"]
    assert ratios[2] == pytest.approx(1)
    assert 4 not in ratios.dropna(), "a missing baseline might have been the fastest"
    assert study.missing() == ("finemoe-gemma4_26b_a4b-m6-agentic-c4-0.3-s0: RuntimeError: no order today",)


def test_a_predictors_memory_makes_no_other_setting(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add("llama_cpp", 10.0)
    runs.add("finemoe", 12.0, predictor={"memory_bytes": 6e7}, cache_fraction=0.295, cache_slots=1133)
    (block,) = compare(find_runs([tmp_path]))
    assert "cache 30%" in block.title
    assert block.entries[1].means["speedup_over_llama_cpp"] == pytest.approx(1.2)
    assert find_study([tmp_path]).frame["cache"].unique().tolist() == [0.3]


def test_a_figure_of_one_setting_refuses_two(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.add("bevy", 10.0, concurrency=2)
    runs.add("bevy", 10.0, concurrency=4)
    study = find_study([tmp_path])
    with pytest.raises(UserError, match="Figure 10 compares runs of one concurrency, these have 2, 4"):
        study.one_setting("Figure 10")
    study.one_setting("Figure 13", vary=("concurrency",))

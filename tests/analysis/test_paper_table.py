"""The paper's numbers as data: all there, verdicts by hand, mismatches listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

from analysis import paper_table
from analysis.__main__ import main
from analysis.paper import paper_numbers
from analysis.paper_metrics import METRICS
from analysis.paper_table import Row, rows, text
from tests.analysis.figure_world import Runs

RANGES: Any = OmegaConf.to_container(OmegaConf.load(Path(paper_table.__file__).with_name("paper_ranges.yaml")))


def row(value: float, ours: tuple[float, ...], high: float | None = None, tolerance: float = 0.0) -> Row:
    return Row(
        "", "", "ratio_over", value, high or value, tolerance, False, "printed", "", "", ours,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (row(1.0, (1.04,), tolerance=0.05), "yes"),
        (row(1.0, (1.06,), tolerance=0.05), "NO"),
        (row(1.0, (1.2, 1.4), high=1.4), "yes"),
        (row(1.0, (1.2, 1.41), high=1.4), "NO"),
        (row(1.0, ()), "no run"),
    ],
)
def test_inside_is_all_of_ours_within_the_range_or_the_tolerance(number: Row, verdict: str) -> None:
    assert number.inside == verdict


def test_every_entry_is_usable_and_has_a_source() -> None:
    for entry in RANGES:
        assert entry["metric"] in METRICS or entry["metric"].startswith("config."), entry
        assert entry["source"]
        assert set(entry["setting"]) <= {"model", "device", "workload", "concurrency", "cache", "system"}


def test_numbers_that_must_be_there() -> None:
    printed = {(number.system, number.metric): number for number in paper_numbers()}
    assert printed["bevy", "busy_both"].low == 0.77
    assert printed["bevy", "fetches_per_step"].fitted, "the preset was fitted to 235"
    values = [(entry["where"], entry["value"]) for entry in RANGES]
    for expected in (
        ("Abstract", [1.26, 3.46]), ("Abstract", [1.01, 1.55]), ("Fig. 8", [1.15, 1.38]), ("Fig. 8", [1.13, 2.52]),
        ("Fig. 9", [1.07, 1.55]), ("Fig. 9", [1.43, 2.06]), ("Fig. 9", [1.08, 1.18]), ("Fig. 11", [0.0009, 0.0043]),
        ("Fig. 12a", 0.0192), ("Fig. 13", -0.042), ("4.4", 128),
    ):  # fmt: skip
        assert expected in values


def test_the_command_lists_mismatches_and_what_has_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(tmp_path / "fig8")
    for requests, bevy in ((2, 11.4), (4, 12.0)):
        for system, value in (("llama_cpp", 8.0), ("finemoe", 10.0), ("specmd", 9.0), ("bevy", bevy)):
            runs.add(system, value, concurrency=requests)
    found = {(r.where, r.setting, r.metric): r for r in rows([runs.folder])}
    assert found["Fig. 8", "cache 0.3", "bevy_over_fastest"].ours == pytest.approx((1.14, 1.2))
    assert found["Fig. 8", "cache 0.3", "bevy_over_fastest"].inside == "yes"
    assert found["Fig. 8", "cache 0.3", "bevy_over_fastest_mean"].inside == "NO"
    assert found["5.1", "all runs", "config.steps"].inside == "yes"
    assert found["4.4", "all runs", "deadlock_free_entries"].ours == (128.0,)
    assert found["4.4", "all runs", "deadlock_free_share"].inside == "yes"

    out = tmp_path / "table.csv"
    assert main(["paper", str(runs.folder), f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert f"of {len(found)}." in printed or f"of {len(rows([runs.folder]))}." in printed
    assert "outside: Fig. 8, cache 0.3, bevy_over_fastest_mean: paper 1.26 +- 0.05 *, ours 1.17" in printed
    assert "no run" in printed
    assert len(pd.read_csv(out)) == len(rows([runs.folder]))


def test_the_text_has_a_line_for_each_number(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "some")
    runs.add("bevy", 57.2)
    table = rows([runs.folder])
    assert len(table) == len(RANGES) + len(paper_numbers())
    lines = text(table).splitlines()
    assert sum(line.startswith(("Section", "Figure", "Fig.", "Abstract", "4.4", "5.1")) for line in lines) == len(table)

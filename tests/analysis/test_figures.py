"""Each figure from hand-made runs: its files, its caption by hand, its gaps; bad input is one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.drawing import GAP
from analysis.figures import figure_of, make, write
from analysis.request_misses import extra_by_rank, missing
from policies.core.journal import Record
from policies.core.messages import Compute, ComputeDone, Fetch, FetchKind, Gate, StepBegin, StepEnd
from policies.core.types import ModelSpec, Phase, UserError
from tests.analysis.figure_world import Runs

BASELINES = ("llama_cpp", "finemoe", "specmd")


def crosses(figure) -> int:
    """Gap marks that are drawn in the panels."""
    return sum(
        line.get_marker() == GAP["marker"] and len(line.get_xdata()) for axes in figure.axes for line in axes.lines
    )


def steps(folder: Path, link_busy_ms: Sequence[float], **columns: Sequence[float]) -> None:
    frame = pd.DataFrame({"step": range(256, 256 + len(link_busy_ms)), "link_busy_s": np.array(link_busy_ms) / 1e3})
    frame.assign(**columns).to_parquet(folder / "steps.parquet")


def throughput(tmp_path: Path, broken: bool) -> Path:
    runs = Runs(tmp_path / "fig")
    for requests in (2, 4):
        for k, system in enumerate((*BASELINES, "bevy")):
            if broken and (system, requests) == ("specmd", 4):
                runs.fail(system, "no order today", concurrency=4)
            else:
                runs.add(system, 10.0 * requests + k, concurrency=requests)
    return runs.folder


@pytest.mark.parametrize("broken", [False, True])
def test_figure_8_marks_what_is_missing(tmp_path: Path, broken: bool) -> None:
    drawing = make("fig8", [throughput(tmp_path, broken)])
    assert crosses(drawing.figure) == broken
    assert bool(drawing.missing) == broken
    assert "1.05" in drawing.caption, "23 / 22 with two requests"
    assert ("1.02" in drawing.caption) != broken, "43 / 42 with four"
    assert drawing.values["tokens_per_s"].isna().sum() == broken


def test_a_figure_is_a_picture_its_vector_and_its_values(tmp_path: Path) -> None:
    drawing = make("fig8", [throughput(tmp_path, broken=False)])
    files = write(drawing, "fig8", tmp_path / "out")
    assert [file.name for file in files] == ["fig8.png", "fig8.svg", "fig8.csv"]
    first = [file.read_bytes() for file in files]
    write(make("fig8", [tmp_path / "fig"]), "fig8", tmp_path / "out")
    assert [file.read_bytes() for file in files] == first, "same runs, same bytes"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["fig8.csv", "fig8.png", "fig8.svg"]


def test_figure_9_is_by_cache_size(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    for cache in (0.3, 0.7):
        for k, system in enumerate((*BASELINES, "bevy")):
            if (system, cache) != ("finemoe", 0.7):
                runs.add(system, 100 * cache + k, cache=cache, workload="chat")
    runs.fail("finemoe", "no order today", cache=0.7, workload="chat")
    drawing = make("fig9", [runs.folder])
    assert crosses(drawing.figure) == 1
    assert "FineMoE over llama.cpp 1.03 at 20 to 30%" in drawing.caption


def test_figure_10_shows_its_parts_and_the_papers_totals(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    runs.add("bevy", 50.0)
    runs.add("llama_cpp_lfu", 40.0, busy_both=0.0, link_only=0.61, gpu_only=0.39)
    runs.add("specmd_lfu", 42.0, prefetches_needed_per_step=60.0, prefetches_wasted_per_step=40.0)
    runs.fail("finemoe_lfu", "no order today")
    drawing = make("fig10", [runs.folder])
    assert crosses(drawing.figure) == 2
    assert "GPU waits 61% of the step (60%)" in drawing.caption
    assert "wasted 40% to 40%" in drawing.caption


def test_figure_12_is_the_change_against_bevy(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    for seed in (0, 1):
        runs.add("bevy", 8 / 0.100, seed=seed)
        runs.add("bevy_fifo", 8 / 0.110, seed=seed)
    runs.fail("bevy_both", "no order today")
    drawing = make("fig12", [runs.folder])
    assert "FIFO compute +10.0% (+12.3%)" in drawing.caption
    values = drawing.values.set_index("system")
    assert values.loc["bevy_fifo", "step_s_mean_change_ms"] == pytest.approx(10)
    assert values.loc["bevy_fifo", "share_of_5 and more"] == pytest.approx(0.2)
    assert crosses(drawing.figure) == 4


def test_figure_13_is_the_change_by_prefetching(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    for requests, change in ((2, 0.958), (4, 0.946)):
        runs.add("bevy", 10.0 * requests, concurrency=requests)
        runs.add(
            "bevy_prefetch", 10.0 * requests * change, concurrency=requests,
            prefetches_needed_per_step=54.0, prefetches_wasted_per_step=46.0,
        )  # fmt: skip
    drawing = make("fig13", [runs.folder])
    assert "-4.2% at 2, -5.4% at 4" in drawing.caption
    assert "46% at 2" in drawing.caption


def test_figure_4_reads_compute_and_fetch_times(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    steps(runs.add("llama_cpp_lfu", 40.0, concurrency=6, gpu_busy_s_per_step=0.0565), [80.0, 100.0, 120.0])
    runs.add("static_3_3", 40.0, concurrency=6, gpu_busy_s_per_step=0.0746)
    drawing = make("fig4", [runs.folder])
    assert "56.5, 74.6, -, - ms" in drawing.caption
    assert "Mean fetch time 100.0 ms" in drawing.caption
    assert "80.0 to 120.0 ms" in drawing.caption
    assert crosses(drawing.figure) == 2


def test_figure_11_widens_its_bins_until_one_is_full(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "fig")
    misses = np.repeat([100, 170], 10)
    for system, step_ms in (("static_3_3", 100.0), ("static_2_2_2", 98.0), ("bevy", 95.0)):
        folder = runs.add(system, 40.0, concurrency=6)
        steps(folder, [1.0] * 20, demand_fetches=misses, step_s=np.full(20, step_ms / 1e3))
    runs.fail("static_2_2_1_1", "no order today", concurrency=6)
    drawing = make("fig11", [runs.folder])
    assert "by 3.0 ms in bins of 20" in drawing.caption
    assert drawing.values["bevy_below_ms"].tolist() == pytest.approx([3.0, 3.0])
    assert "static_2_2_1_1: no result" in drawing.figure.axes[0].get_legend_handles_labels()[1]


def test_misses_of_a_request_are_what_the_step_had_to_fetch() -> None:
    model = ModelSpec("tiny", n_layers=2, n_experts=4, top_k=2)
    records = [
        Record(0.0, (StepBegin(0, (7, 8)),), (Compute(0, Phase.ENTRY, -1, (7, 8), (), ()),)),
        Record(1.0, (ComputeDone(0, (Gate((0, 1)), Gate((1, 2)))),), (Fetch(0, 1, 0, FetchKind.DEMAND),)),
        Record(2.0, (), (Compute(1, Phase.JOB, 0, (7, 8), (0, 1, 2), (0, 1, 2)),)),
        Record(3.0, (ComputeDone(1, (Gate((4, 5)), Gate((6, 7)))),), (Fetch(1, 7, 0, FetchKind.DEMAND),)),
        Record(4.0, (), (StepEnd(0),)),
    ]
    assert missing(records, model, warmup=0).tolist() == [[[1, 0], [1, 1]]]
    assert missing(records, model, warmup=1).size == 0


def test_extra_misses_follow_the_rank_of_each_step() -> None:
    counts = np.array(
        [
            [[5, 0, 3, 3], [1, 0, 1, 1]],  # request 0 misses more early, and later
            [[0, 1, 0, 2], [4, 4, 2, 2]],  # in this step request 1 does
        ]
    )
    extra = extra_by_rank(counts, first_layers=2)
    assert extra.tolist() == [[1.0, 1.5], [-1.0, -1.5]]


def test_figure_2_is_drawn_from_the_precision_table(tmp_path: Path) -> None:
    lines = ["predictor,cache_fraction,cache_kind,precision", "finemoe,0.0,none,0.6"]
    lines += [f"finemoe,{size},{kind},{p}" for size, a, r in ((0.1, 0.5, 0.55), (0.6, 0.2, 0.4)) for kind, p in
              (("actual", a), ("randomized", r))]  # fmt: skip
    (tmp_path / "precision.csv").write_text("\n".join(lines) + "\n")
    drawing = make("fig2", [tmp_path])
    assert "FineMoE 60% to 20%" in drawing.caption
    with pytest.raises(UserError, match="cannot be read"):
        make("fig2", [tmp_path / "nowhere"])


def test_the_name_of_a_study_tells_its_figure() -> None:
    names = ("runs/fig8", "runs/fig13_smoke", "runs/fig2", "runs/compare", "runs/fig8_mine")
    assert [figure_of(Path(name)) for name in names] == ["fig8", "fig13", None, None, None]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fig4", "needs runs of system=llama_cpp_lfu"),
        ("fig5", "ranks four requests"),
        ("fig8", "needs runs of some of llama_cpp"),
        ("fig11", "expected runs of system=bevy"),
        ("fig12", "no finished run of system=bevy"),
        ("fig13", "needs runs of system=bevy and system=bevy_prefetch"),
    ],
)
def test_runs_of_another_figure_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    runs = Runs(tmp_path / "fig")
    runs.add("static_4_4", 10.0)
    assert main([name, str(runs.folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(runs.folder.glob("*.png"))

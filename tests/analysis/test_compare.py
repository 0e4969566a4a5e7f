"""What stands in the table and in the picture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.bars import draw, save
from analysis.compare import COLUMNS, compare, plot, print_table, table
from analysis.metrics import STATES
from analysis.paper import paper_for, paper_numbers
from analysis.runs import Run, find_runs, run_frame
from policies.core.types import UserError

MakeRun = Callable[..., Path]


def run(system: str, step_s: float, seed: int = 0, **more: Any) -> Run:
    """A run of the paper's Figure 10 setting with a made-up step time."""
    config = more.pop("config", {})
    summary: dict[str, Any] = {
        "backend": "sim", "system": system, "model": "gemma4_26b_a4b", "device": "m6", "workload": "agentic",
        "concurrency": 8, "cache_fraction": 0.3, "cache_slots": 1152, "steps": 96, "warmup": 48, "seed": seed,
        "tokens_per_s": 8 / step_s, "step_s_mean": step_s, "step_s_p50": step_s, "step_s_p95": step_s,
        "demand_fetches_per_step": 230.0, "prefetches_needed_per_step": 0.0, "prefetches_wasted_per_step": 0.0,
        "hit_rate": 0.7, "busy_both": 0.75, "link_only": 0.125, "gpu_only": 0.0625, "neither": 0.0625,
        "gpu_busy_s_per_step": 0.1, "group_size_share": {"1": 0.5, "2": 0.25, "3": 0.125, "8": 0.125},
        "runahead": "not used", "bounds": {"step_over_bound": 1.1}, "warnings": [], **more,
    }  # fmt: skip
    labels = {"model": {"label": "Gemma4"}, "device": {"label": "M6"}, "workload": {"label": "Agentic"}}
    return Run(
        Path(f"{system}-{seed}"), summary, {"system": {"name": system, "label": system.title()}, **labels, **config}
    )


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line[len(start) :].split()


def test_values_ratios_and_the_papers_numbers_stand_under_their_heads() -> None:
    text = table(compare([run("llama_cpp", 0.28), run("llama_cpp_lfu", 0.2), run("bevy", 0.14)]))
    bevy = cells(text, "Bevy ")
    #       tok/s  step   P95    GPU    fetch hit   both link  GPU  neither 1    3+   x LRU  x LFU step/Bevy
    assert bevy == [
        "57.1", "140.0", "140.0", "100.0", "230", "70.0", "75", "12", "6.2", "6.2", "50", "25", "2.00", "1.43", "1.000"
    ]  # fmt: skip
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("Bevy "))
    ours, paper = lines[at], lines[at + 1]
    assert paper.startswith("  paper")
    assert paper.split()[1:] == ["57.2*", "139.8*", "125.2*", "235", "77", "10", "12.5*", "0.5*", "56", "23", "1.45*"]
    assert paper.index("139.8*") == ours.index("140.0")
    assert paper.index("235") == ours.index("230")
    assert paper.index("1.45*") == ours.index("1.43")
    assert "* follows from printed numbers" in text
    assert "Gemma4, Agentic, 8 requests, cache 30%, M6 (simulator, 96 steps, 48 of them warm-up)" in text


def test_seeds_are_averaged_and_their_spread_is_shown() -> None:
    runs = [run("llama_cpp_lfu", 0.20, 0), run("llama_cpp_lfu", 0.24, 1), run("bevy", 0.10, 0), run("bevy", 0.16, 1)]
    (block,) = compare(runs)
    bevy = block.entries[1]
    assert bevy.seeds == 2
    assert bevy.means["step_s_mean"] == pytest.approx(0.13)
    assert bevy.deviations["step_s_mean"] == pytest.approx(0.06 / 2**0.5)
    # Ratios within a seed: 2.0 and 1.5.
    assert bevy.means["speedup_over_llama_cpp_lfu"] == pytest.approx(1.75)
    assert "  +- over 2 seeds" in table([block])


def test_the_same_system_with_another_setting_of_its_own_is_another_row() -> None:
    runs = [
        run("bevy", 0.14, config={"cache": {"eviction": {"count": "keep"}}, "seed": 0}),
        run("bevy", 0.15, config={"cache": {"eviction": {"count": "decay"}}, "seed": 1}),
    ]
    (block,) = compare(runs)
    assert [entry.label for entry in block.entries] == ["Bevy (count=keep)", "Bevy (count=decay)"]


def test_other_settings_stand_in_a_block_of_their_own_without_ratios_across() -> None:
    blocks = compare([run("llama_cpp", 0.28), run("bevy", 0.14, concurrency=4)])
    assert [len(block.entries) for block in blocks] == [1, 1]
    assert "speedup_over_llama_cpp" not in blocks[1].entries[0].means
    assert "paper" not in cells(table(blocks[1:]), "Bevy ")


def test_two_traces_are_two_settings_although_both_are_called_the_same() -> None:
    runs = [
        run(system, step_s, config={"workload": {"label": "Trace", "path": path}})
        for path, step_s in (("a.parquet", 0.1), ("b.parquet", 0.2))
        for system in ("llama_cpp", "bevy")
    ]
    blocks = compare(runs)
    assert [block.title.rpartition(" (")[2] for block in blocks] == ["path=a.parquet)", "path=b.parquet)"]
    assert [block.entries[1].means["speedup_over_llama_cpp"] for block in blocks] == [1.0, 1.0]


def test_columns_without_numbers_are_left_out_and_notes_are_kept() -> None:
    off = "off: 8 requests x top-8 need 64 cache slots and 60 can be had"
    text = table(compare([run("bevy", 0.14, runahead=off, warnings=[f"runahead {off}", "slow"])]))
    assert "wasted" not in text
    assert text.count(off) == 1
    assert "all: slow" in text
    wasteful = run("bevy", 0.14, prefetches_needed_per_step=30.0, prefetches_wasted_per_step=10.0)
    assert "25" in cells(table(compare([wasteful])), "Bevy ")
    assert "wasted%" in table(compare([wasteful]))


def test_the_papers_numbers_are_consistent_data() -> None:
    metrics = {column.metric for column in COLUMNS}
    for number in paper_numbers():
        assert number.low <= number.high, number
        assert number.metric in metrics, number
        assert number.source.startswith(("Section", "Figure")), number
        assert number.note or not number.derived, number
    setting = {k: v for k, v in run("bevy", 1.0).summary.items() if k != "system"}
    bevy = paper_for({**setting, "system": "bevy"})
    assert bevy["fetches_per_step"].low == 235
    assert not bevy["fetches_per_step"].derived
    assert sum(bevy[state].low for state in STATES) == pytest.approx(1.0)
    assert paper_for({**setting, "system": "bevy", "concurrency": 7}) == {}


def test_runs_are_found_in_a_study_baselines_first(make_run: MakeRun) -> None:
    bevy = make_run("bevy", study="found")
    llama = make_run("llama_cpp", study="found")
    unfinished = bevy.parent / ".bevy-1.123"
    unfinished.mkdir(exist_ok=True)
    (unfinished / "summary.json").write_text("{}")
    (bevy.parent / "started").mkdir(exist_ok=True)
    assert [run.path for run in find_runs([bevy.parent])] == [llama, bevy]
    assert [run.path for run in find_runs([bevy, bevy.parent])] == [bevy, llama]
    frame = run_frame(find_runs([bevy.parent]))
    assert frame["system_label"].tolist() == ["llama_cpp", "Bevy"]
    assert frame["groups_of_3_up_share"].iloc[0] == 1.0
    assert (frame["step_over_bound"] >= 1).all()


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        find_runs([tmp_path])
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(UserError, match="no readable run folder"):
        find_runs([tmp_path])


def test_pictures_have_the_same_bytes_twice_and_leave_nothing_else(make_run: MakeRun, tmp_path: Path) -> None:
    study = [make_run("bevy", study="found"), make_run("llama_cpp", study="found")]
    pictures = []
    for name in ("a", "b"):
        for suffix in ("png", "svg"):
            plot(study, tmp_path / f"{name}.{suffix}")
        pictures.append([(tmp_path / f"{name}.{suffix}").read_bytes() for suffix in ("png", "svg")])
    assert pictures[0] == pictures[1]
    assert pictures[0][0].startswith(b"\x89PNG")
    assert b"Software" not in pictures[0][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg", "b.png", "b.svg"]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_nothing_in_a_picture_is_cut_or_overlaps(count: int) -> None:
    """Every text lies inside the figure, and the labels of the systems do not touch each other."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    names = ["llama_cpp", "llama_cpp_lfu", "bevy", "bevy_fifo", "bevy_both", "specmd_lfu", "a_rather_long_system_name"]
    systems = (names + [f"static_{i}_{i}_{i}" for i in range(5)])[-count:]
    runs = [
        run(s, 0.1 + 0.02 * i, prefetches_needed_per_step=40.0, prefetches_wasted_per_step=60.0)
        for i, s in enumerate(systems)
    ]
    figure = draw(compare(runs))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    time = figure.axes[0]
    labels = [label.get_window_extent(renderer) for label in time.get_yticklabels()]
    assert len(labels) == count
    assert all(not a.overlaps(b) for i, a in enumerate(labels) for b in labels[:i])
    for axes in figure.axes:
        for text in [*axes.texts, axes.xaxis.label, axes.title]:
            box = text.get_window_extent(renderer)
            assert box.x0 >= 0, text
            assert box.y0 >= 0, text
            assert box.x1 <= figure.bbox.x1, text
            assert box.y1 <= figure.bbox.y1, text
    assert all(label.x0 >= 0 for label in labels)


def test_several_settings_share_a_picture(tmp_path: Path) -> None:
    save(draw(compare([run("bevy", 0.14), run("bevy", 0.1, concurrency=4)])), tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 0


def test_print_table_reads_folders(make_run: MakeRun) -> None:
    folder = make_run("bevy", study="found")
    summary = json.loads((folder / "summary.json").read_text())
    assert f"{summary['tokens_per_s']:.1f}" in cells(print_table([folder]), "Bevy")

"""Tracks that Perfetto can draw, and that agree with the metrics."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.runs import open_journal
from analysis.timeline import Timeline, Track, build, events, write
from policies.core.types import UserError

MakeRun = Callable[..., Path]


def timeline(run: Path, first: int, stop: int, **more: int) -> Timeline:
    _, model, records = open_journal(run)
    return build(records, model, first, stop, **more)


def track(of: Timeline, name: str) -> Track:
    (found,) = [t for t in of.tracks if t.name == name]
    return found


def length_s(of: Track) -> float:
    return sum(s.end_ns - s.begin_ns for s in of.slices) / 1e9


@pytest.mark.parametrize(("system", "prefetch"), [("llama_cpp", False), ("bevy", False), ("bevy", True)])
@pytest.mark.parametrize(("first", "stop"), [(0, 8), (3, 5), (7, 99)])
def test_slices_of_a_track_never_partly_overlap_and_sum_to_the_metrics(
    make_run: MakeRun, system: str, prefetch: bool, first: int, stop: int
) -> None:
    run = make_run(system, prefetch=prefetch, study=f"conservation-{prefetch}")
    made = timeline(run, first, stop)
    for each in made.tracks:
        assert all(s.begin_ns < s.end_ns for s in each.slices)
        assert all(a.end_ns <= b.begin_ns for a, b in pairwise(each.slices)), each.name
    steps = pd.read_parquet(run / "steps.parquet").query(f"{first} <= step < {stop}")
    assert (made.first, made.last) == (steps["step"].iloc[0], steps["step"].iloc[-1])
    assert length_s(track(made, "steps")) == pytest.approx(steps["step_s"].sum())
    assert length_s(track(made, "link busy")) == pytest.approx(steps["link_busy_s"].sum(), abs=1e-6)
    assert length_s(track(made, "GPU busy")) == pytest.approx(steps["gpu_busy_s"].sum(), abs=1e-6)
    # One compute slot: its slices are the GPU's busy time.  Four readers and no more.
    assert length_s(track(made, "compute slot 0")) == pytest.approx(steps["gpu_busy_s"].sum(), abs=1e-6)
    assert sum(t.name.startswith("reader ") for t in made.tracks) <= 4
    # A request is always in one of its states.
    for request in range(4):
        assert length_s(track(made, f"request {request}")) == pytest.approx(steps["step_s"].sum(), abs=1e-5)


def test_fetches_on_the_readers_are_those_of_the_steps(make_run: MakeRun) -> None:
    run = make_run("bevy")
    readers = [t for t in timeline(run, 3, 5).tracks if t.name.startswith("reader ")]
    steps = pd.read_parquet(run / "steps.parquet").query("3 <= step < 5")
    shown = [s for t in readers for s in t.slices if s.details["step"] in (3, 4)]
    assert len(shown) == steps["demand_fetches"].sum()
    assert all(s.name == f"{s.details['layer']}:{s.details['expert']} demand" for s in shown)


def test_a_blocked_request_waits_for_the_link_only(make_run: MakeRun) -> None:
    """While a request is blocked at least one fetch is in flight: nothing else can block it."""
    made = timeline(make_run("bevy"), 2, 6)
    busy = track(made, "link busy").slices
    blocked = [s for t in made.tracks if t.name.startswith("request") for s in t.slices if s.category == "blocked"]
    assert blocked
    for s in blocked:
        assert any(b.begin_ns <= s.begin_ns and s.end_ns <= b.end_ns for b in busy)


def test_the_file_is_what_perfetto_reads(make_run: MakeRun, tmp_path: Path) -> None:
    made = timeline(make_run("bevy"), 3, 4)
    out = tmp_path / "timeline.json"
    assert write(made, out) == out.stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]
    found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    assert found == list(events(made))
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    slices = [e for e in found if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} <= named
    step = next(e for e in slices if e["cat"] == "step")
    steps = pd.read_parquet(make_run("bevy") / "steps.parquet")
    assert step["ts"] == pytest.approx(steps["begin_s"][3] * 1e6)
    assert step["dur"] == pytest.approx(steps["step_s"][3] * 1e6)
    write(made, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == out.read_bytes()


def test_the_size_cap_cuts_whole_steps_and_says_so(make_run: MakeRun) -> None:
    run = make_run("bevy")
    whole = timeline(run, 0, 8)
    assert whole.note is None
    cut = timeline(run, 0, 8, max_slices=1500)
    assert cut.first == 0
    assert 0 < cut.last < 7
    assert f"after step {cut.last}" in str(cut.note)
    assert timeline(run, 5, 8, max_slices=1).last == 5


def test_a_window_outside_the_run_is_refused(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"steps=100:104 is empty: the journal has steps 0 to 7"):
        timeline(make_run("bevy"), 100, 104)

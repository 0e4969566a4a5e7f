"""Systems that take turns in one process, and the table of their paired ratios."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from runs_world import failing_reads, quick, tiny_pack  # noqa: E402

from analysis.metrics import write_metrics  # noqa: E402
from analysis.paired import Group, rows, table, turns_s  # noqa: E402
from analysis.runs import find_runs, open_journal  # noqa: E402
from executor import interleave as interleave_module  # noqa: E402
from executor.compose import settings_of  # noqa: E402
from executor.errors import FetchError  # noqa: E402
from executor.interleave import interleave  # noqa: E402
from policies.core.messages import StepBegin  # noqa: E402

SYSTEMS = ("llama_cpp_lfu", "bevy")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_pack(tmp_path_factory.mktemp("tiny"))


def cells_of(pack, runs, *more):
    arguments = quick(pack, runs, f"system={','.join(SYSTEMS)}", *more)
    return [(settings, runs / settings["system"]["name"]) for settings in settings_of(arguments)]


def test_turns_of_two_with_equal_requests_and_own_time(tiny, tmp_path):
    cells = cells_of(tiny, tmp_path, "steps=9", "warmup=3", "settle=1")
    summaries = interleave(cells, measure=write_metrics, place="here")
    assert [s["system"] for s in summaries] == list(SYSTEMS)
    for summary in summaries:
        assert summary["steps"] == 9
        assert summary["interleaved"] == {"chunk_steps": 2, "systems": list(SYSTEMS)}
        assert summary["place"] == "here"
    runs = find_runs([folder for _, folder in cells])
    for run in runs:
        times = [r.t_s for r in open_journal(run.path)[2]]
        assert times == sorted(times)
        # The clock stands in the others' turns: no gap between steps is as long as a turn.
        ends = [r.t_s for r in open_journal(run.path)[2] if isinstance(r.events[0], StepBegin) and r.t_s > 0]
        assert len(ends) == 7  # of nine steps two were warmed in the core alone
        assert len(turns_s(run)) == 3


def test_it_stops_between_rounds_and_says_how_far_it_came(tiny, tmp_path):
    rounds = []
    cells = cells_of(tiny, tmp_path, "steps=20")
    summaries = interleave(
        cells, measure=write_metrics, stop=lambda: len(rounds) == 2, on_round=lambda: rounds.append(1)
    )
    assert [s["steps"] for s in summaries] == [3 + 4] * 2
    assert [s["requested_steps"] for s in summaries] == [20] * 2


def test_if_one_breaks_no_directory_is_written(tiny, tmp_path, monkeypatch):
    def eio():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("executor.sources.IoOps", failing_reads(25, eio))
    with pytest.raises(FetchError):
        interleave(cells_of(tiny, tmp_path), measure=write_metrics)
    assert list(tmp_path.iterdir()) == []


def test_the_table_pairs_neighbouring_turns(tiny, tmp_path):
    cells = cells_of(tiny, tmp_path, "steps=11")
    interleave(cells, measure=write_metrics)
    folders = tuple(folder for _, folder in cells)
    group = Group("a title", folders, {folders[1]: folders[0]})
    base, other = rows(group)
    assert base.ratios is None
    first, second = (turns_s(run) for run in find_runs(folders))
    assert other.ratios == pytest.approx(np.percentile(first / second, [10, 50, 90]))
    assert other.predicted_s == pytest.approx(first.sum() / (2 * len(first)))
    text = table([group])
    assert "a title" in text
    assert "Bevy" in text
    assert "prediction: mean error" in text


def test_time_and_steps_end_a_group(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interleave_module.time, "perf_counter", lambda: now[0])
    stop, on_round = interleave_module.until(deadline_s=10.0, most=8)
    now[0] = 11.0
    assert not stop()  # the deadline is over, but there is nothing yet to show
    for _ in range(interleave_module.MIN_STEPS // interleave_module.CHUNK_STEPS):
        assert not stop()
        on_round()
    assert stop()
    now[0] = 1.0
    assert not stop()
    on_round()
    on_round()
    assert stop()

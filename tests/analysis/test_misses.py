"""Step time against misses: bins and means by hand, and what cannot be binned is refused."""

from pathlib import Path

import pandas as pd
import pytest

from analysis.misses import FEWEST_STEPS, by_misses, pick, table
from analysis.runs import Run
from policies.core.types import UserError


def run(folder: Path, system: str, rows, warmup=0, **summary):
    """``rows``: (missing experts, step time in ms), each repeated so that its bin is full."""
    folder = folder / f"{system}{len(list(folder.iterdir()))}"
    folder.mkdir()
    steps = [row for row in rows for _ in range(FEWEST_STEPS)]
    frame = pd.DataFrame(steps, columns=["demand_fetches", "step_ms"])
    frame = frame.assign(step=range(len(frame)), step_s=frame["step_ms"] / 1e3)
    frame.to_parquet(folder / "steps.parquet")
    return Run(folder, {"system": system, "warmup": warmup, **summary}, {"system": {"name": system, "label": system}})


def test_steps_meet_in_the_bin_of_their_own_misses(tmp_path):
    batching = run(tmp_path, "batching", [(101, 50.0), (119, 54.0), (121, 60.0)])
    bevy = run(tmp_path, "bevy", [(100, 40.0), (139, 55.0), (500, 90.0)])
    means = by_misses([batching, bevy], width=20)
    assert means["batching"].to_dict() == pytest.approx({100: 52.0, 120: 60.0})
    assert means["bevy"].to_dict() == pytest.approx({100: 40.0, 120: 55.0}), "the bin of 500 has no step of the other"
    text = table(means, pick([batching, bevy]))
    assert "12.0" in text
    assert "5.0" in text


def test_warm_up_does_not_count_and_seeds_are_pooled(tmp_path):
    first = run(tmp_path, "bevy", [(10, 1.0), (10, 3.0)], warmup=FEWEST_STEPS)
    second = run(tmp_path, "bevy", [(10, 9.0), (10, 5.0)], warmup=FEWEST_STEPS)
    assert by_misses([first, second], width=20)["bevy"].to_dict() == pytest.approx({0: 4.0})


def test_runs_of_other_settings_or_thin_bins_are_refused(tmp_path):
    one, other = run(tmp_path, "bevy", [(10, 1.0)], model="a"), run(tmp_path, "llama_cpp", [(10, 1.0)], model="b")
    with pytest.raises(UserError, match="2 settings"):
        by_misses([one, other], width=20)
    far = run(tmp_path, "llama_cpp", [(99, 1.0)], model="a")
    with pytest.raises(UserError, match="run more steps"):
        by_misses([one, far], width=20)
    with pytest.raises(UserError, match="system=bevy"):
        pick([far])

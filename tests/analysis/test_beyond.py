"""The page of what goes beyond the paper, from a made-up table whose ratios are known."""

import math

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.beyond import draw, gains, read, text
from policies.core.types import UserError

STEP_S = {"batch": 2.0, "halves": 1.0, "pairs": 1.5, "bevy": 1.2, "auto": 0.8}
FETCHES = {"batch": 100, "halves": 104, "pairs": 106, "bevy": 110, "auto": 85}


def table(path, systems=STEP_S, seeds=(0, 1)):
    rows = [
        {
            "half": "report",
            "route": "demo",
            "requests": 8,
            "cache": cache,
            "device": device,
            "seed": seed,
            "system": system,
            "step_s": STEP_S[system] * (1 + seed),
            "gpu_s": 0.5,
            "link_s": 0.4 * (1 + seed),
            "fetches": FETCHES[system],
            "optimal_fetches": 60 if system == "batch" else None,
            "group_size": 1.0,
        }
        for cache in (0.1, 0.5)
        for device in ("m6", "thor")
        for seed in seeds
        for system in systems
    ]
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_ratios_of_step_times_bounds_and_the_share_of_the_gap(tmp_path):
    found = gains(read(table(tmp_path / "beyond.csv")))
    assert len(found) == 8
    assert found["auto_over_bevy"].tolist() == pytest.approx([1.5] * 8)
    assert found["auto_over_best"].tolist() == pytest.approx([1.25] * 8)
    assert found["best_over_bevy"].tolist() == pytest.approx([1.2] * 8)
    bound = found["bound"].groupby(level="seed").first()
    assert bound.tolist() == pytest.approx([1.2 / 0.5, 2.4 / 0.8])
    assert found["auto_closed"].tolist() == pytest.approx([0.5] * 8)


def test_no_share_where_there_is_no_gap(tmp_path):
    path = table(tmp_path / "beyond.csv")
    frame = pd.read_csv(path)
    frame.loc[frame["system"] == "batch", "optimal_fetches"] = 110
    frame.to_csv(path, index=False)
    assert all(math.isnan(share) for share in gains(read(path))["auto_closed"])


def test_the_page_says_and_shows_it(tmp_path, capsys):
    table(tmp_path / "beyond.csv")
    assert main(["beyond", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1.500 [1.500, 1.500]" in said
    assert "1.250 [1.250, 1.250]" in said
    assert sorted(path.name for path in tmp_path.glob("beyond_gains.*")) == [
        *("beyond_gains.csv", "beyond_gains.png", "beyond_gains.svg")
    ]
    assert len(draw(tmp_path / "beyond.csv").figure.axes) == 2


def test_a_system_that_a_device_cannot_run_has_no_line_there(tmp_path):
    path = table(tmp_path / "beyond.csv")
    frame = pd.read_csv(path)
    m6 = frame[(frame["system"] == "auto") & (frame["device"] == "m6")].assign(system="bevy_cpu")
    pd.concat([frame, m6]).to_csv(path, index=False)
    lines = [line.split()[:2] for line in text(path).splitlines() if line.startswith("bevy_cpu ")]
    assert lines == [["bevy_cpu", "m6"], ["bevy_cpu", "over"], ["bevy_cpu", "over"]]


def test_one_seed_has_no_spread(tmp_path):
    assert " - " in text(table(tmp_path / "beyond.csv", seeds=(0,)))


def test_other_tables_are_refused_in_one_line(tmp_path, capsys):
    assert main(["beyond", str(tmp_path)]) == 2
    assert "python -m benchmarks.beyond" in capsys.readouterr().err
    with pytest.raises(UserError, match="no table"):
        read(table(tmp_path / "beyond.csv", systems=("batch", "bevy")))

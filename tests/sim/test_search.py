"""``python -m sim.search``: Optuna over a sweep's lists; seeded, resumed from finished cells."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from statistics import fmean

import pytest

from policies.core.types import UserError
from sim.search import main

SMALL = ("experiment=search", "scale=smoke", "steps=4", "warmup=2", "concurrency=2", "workers=1", "seed=0,1")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def search(runs: str, trials: int, *more: str) -> list[dict[str, str]]:
    assert main([*SMALL, f"trials={trials}", f"runs={runs}", *more]) == 0
    folder = Path(runs) / "search_smoke"
    assert (folder / "search.png").read_bytes().startswith(b"\x89PNG")
    with (folder / "search.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("default::DeprecationWarning:optuna")
def test_trials_are_the_same_again_and_go_on_from_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
    (first,) = search("stopped", 1)
    assert list(first.values())[2:] == ["lfu", "1.0", "2", "False", "True"], "the first of each list"
    runs = [json.loads(path.read_text())["tokens_per_s"] for path in Path("stopped").rglob("summary.json")]
    assert len(runs) == 2, "two seeds"
    assert float(first["tokens_per_s"]) == pytest.approx(fmean(runs), rel=1e-5)
    cells = {path: path.stat().st_mtime_ns for path in Path("stopped").rglob("journal.jsonl.gz")}
    resumed = search("stopped", 5)
    assert {path: path.stat().st_mtime_ns for path in cells} == cells, "a finished cell was run again"
    capsys.readouterr()
    assert search("whole", 5) == resumed
    printed = capsys.readouterr().out.splitlines()
    best = max(float(row["tokens_per_s"]) for row in resumed)
    assert f"{best:.2f} tokens/s" in printed[1]


def test_without_optuna_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match="pip install optuna"):
        main(["experiment=search"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=all_figures"], "one experiment"),
        (["experiment=compare", "system=bevy"], "no setting has a list"),
        (["experiment=search", "trials=0"], "trials is 0"),
        (["experiment=search", "cache=nope,lfu"], "no such cache"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
    try:
        assert main([*words, "scale=smoke", "workers=1"]) == 2
        found = capsys.readouterr().err
    except UserError as error:
        found = str(error)
    assert message in found
    assert not list(Path("runs").rglob("summary.json"))

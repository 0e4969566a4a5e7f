"""What a search has found: the ranking and what is said of it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from analysis.searched import Trial, best_lines, ranked, write
from policies.core.types import UserError

TRIALS = [
    Trial(0, 10.0, {"cache": "lfu", "size": "2"}),
    Trial(1, 12.5, {"cache": "lru", "size": "10"}),
    Trial(2, None, {"cache": "lru", "size": "2"}),
    Trial(3, 12.5, {"cache": "lru", "size": "10"}),
    Trial(4, 11.0, {"cache": "lfu", "size": "10"}),
]


def test_each_choice_is_ranked_once_and_failures_are_not() -> None:
    assert [(value, trial.number) for value, trial in ranked(TRIALS)] == [(12.5, 1), (11.0, 4), (10.0, 0)]
    with pytest.raises(UserError, match="every trial failed"):
        ranked([TRIALS[2]])


def test_the_best_are_compared_with_the_first() -> None:
    head, best, first = best_lines(TRIALS, 1)
    assert head.startswith("5 trials of 3 different settings")
    assert "12.50 tokens/s (+25.0%)  cache=lru size=10" in best
    assert "10.00 tokens/s (+0.0%)  cache=lfu size=2" in first


def test_table_and_picture(tmp_path: Path) -> None:
    table, picture = write(TRIALS, tmp_path)
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["trial", "tokens_per_s", "cache", "size"]
    assert rows[1:4] == [["0", "10", "lfu", "2"], ["1", "12.5", "lru", "10"], ["2", "", "lru", "2"]]
    assert picture.read_bytes().startswith(b"\x89PNG")
    before = picture.read_bytes()
    write(TRIALS, tmp_path)
    assert picture.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["search.csv", "search.png"]

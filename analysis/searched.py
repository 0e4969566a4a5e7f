"""What a search has found, as a table and a picture.

Owns their layout.  Knows trials by number, value and settings; not who chose them.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from analysis.drawing import sheet
from policies.core.types import UserError

BEST, OTHERS = "#D55E00", "#56B4E9"
PANEL_IN = 2.5
ACROSS = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of settings; ``tokens_per_s`` is None if it failed."""

    number: int
    tokens_per_s: float | None
    settings: dict[str, str]


def ranked(trials: Sequence[Trial]) -> list[tuple[float, Trial]]:
    """Those that did not fail, the best first; equal ones by number, each choice of settings once.

    Raises UserError if there is none.
    """
    first = {tuple(trial.settings.values()): trial for trial in reversed(trials)}
    found = [(trial.tokens_per_s, trial) for trial in first.values() if trial.tokens_per_s is not None]
    if not found:
        raise UserError("every trial failed; the reasons are above")
    return sorted(found, key=lambda pair: (-pair[0], pair[1].number))


def best_lines(trials: Sequence[Trial], count: int) -> list[str]:
    """The best trials and the first one, with what they gain over it."""
    order = ranked(trials)
    base = trials[0].tokens_per_s
    first = [] if base is None else [pair for pair in order[count:] if pair[1].settings == trials[0].settings]
    lines = [f"{len(trials)} trials of {len(order)} different settings; the first takes the first of each list"]
    for value, trial in order[:count] + first:
        gain = "" if base is None else f" ({value / base - 1:+.1%})"
        settings = " ".join(f"{key}={chosen}" for key, chosen in trial.settings.items())
        lines.append(f"trial {trial.number:3d}  {value:8.2f} tokens/s{gain}  {settings}")
    return lines


def write(trials: Sequence[Trial], folder: Path) -> tuple[Path, Path]:
    """Write ``search.csv``, a row a trial, and ``search.png``; returns their paths."""
    table, picture = folder / "search.csv", folder / "search.png"
    unfinished = folder / f".search.{os.getpid()}"
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["trial", "tokens_per_s", *trials[0].settings])
        for trial in trials:
            value = "" if trial.tokens_per_s is None else f"{trial.tokens_per_s:.6g}"
            rows.writerow([trial.number, value, *trial.settings.values()])
    os.replace(unfinished, table)
    draw(trials, unfinished)
    os.replace(unfinished, picture)
    return table, picture


def draw(trials: Sequence[Trial], path: Path) -> None:
    """The best so far over the trials, then a panel for each setting with all trials by its value."""
    order = ranked(trials)
    best = order[0][1]
    keys = list(best.settings)
    across = min(ACROSS, len(keys) + 1)
    down = -(-(len(keys) + 1) // across)
    with sheet(PANEL_IN * across, PANEL_IN * down) as figure:
        panels = list(figure.subplots(down, across, sharey=True, squeeze=False).flat)
        for panel in panels[len(keys) + 1 :]:
            panel.set_visible(False)
        done = [(trial.number, trial.tokens_per_s) for trial in trials if trial.tokens_per_s is not None]
        numbers, values = zip(*done, strict=True)
        panels[0].plot(numbers, values, "o", color=OTHERS, markersize=4)
        panels[0].step(numbers, list(accumulate(values, max)), where="post", color=BEST, label="best so far")
        panels[0].xaxis.get_major_locator().set_params(integer=True)
        panels[0].set_xlabel("trial")
        panels[0].legend(loc="lower right")
        for panel, key in zip(panels[1:], keys, strict=False):
            choices = list(dict.fromkeys(trial.settings[key] for trial in trials))
            choices.sort(key=lambda text: (float(text), "") if _is_number(text) else (0.0, text))
            for value, trial in reversed(order):
                mark = {"color": BEST, "marker": "D"} if trial is best else {"color": OTHERS, "marker": "o"}
                panel.plot([choices.index(trial.settings[key])], [value], linestyle="none", markersize=4, **mark)
            panel.set_xticks(range(len(choices)), choices, rotation=20 if max(map(len, choices)) > 6 else 0)
            panel.set_xlim(-0.5, len(choices) - 0.5)
            panel.set_xlabel(key.removeprefix("prefetch."))
        for row in range(down):
            panels[row * across].set_ylabel("tokens/s")
        figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

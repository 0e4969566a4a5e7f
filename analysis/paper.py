"""The paper's numbers (``paper.yaml``) and which of them belong to a run's setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PaperNumber:
    """One number of the paper, or a range of one: ``low == high`` for a single value.

    ``derived`` tells a number that follows from printed ones by arithmetic, ``note`` how; ``fitted`` one that the
    device or the generated routing was fitted to, so that agreement shows nothing.
    """

    setting: Mapping[str, Any]
    system: str
    metric: str
    low: float
    high: float
    source: str
    derived: bool
    note: str = ""
    fitted: bool = False

    @property
    def middle(self) -> float:
        """The value, or the middle of the range."""
        return (self.low + self.high) / 2

    def matches(self, run: Mapping[str, Any]) -> bool:
        """True if ``run`` (a summary) has this number's system and setting."""
        return run.get("system") == self.system and all(
            _same(run.get(key), value) for key, value in self.setting.items()
        )


@cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """All of ``paper.yaml``."""
    from omegaconf import OmegaConf  # noqa: PLC0415

    groups: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("paper.yaml")))
    numbers = []
    for group in groups:
        for entry in group["numbers"]:
            value = entry["value"]
            low, high = value if isinstance(value, list) else (value, value)
            numbers.append(
                PaperNumber(
                    setting=group["setting"],
                    system=entry["system"],
                    metric=entry["metric"],
                    low=float(low),
                    high=float(high),
                    source=entry["source"],
                    derived=entry["status"] == "derived",
                    note=entry.get("note", ""),
                    fitted=entry.get("fitted", False),
                )
            )
    return tuple(numbers)


def paper_for(run: Mapping[str, Any]) -> dict[str, PaperNumber]:
    """The paper's numbers for a run's system and setting, by metric; empty where it prints none."""
    return {number.metric: number for number in paper_numbers() if number.matches(run)}


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return isclose(ours, theirs, rel_tol=2e-3)  # a cache has whole slots
    return bool(ours == theirs)

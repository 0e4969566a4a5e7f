"""The paper's figures from finished runs: a picture (PNG and SVG), its values (CSV) and what it says beside the paper.

Owns which figures there are and the files they become.  A figure is a module of this folder with a function
``draw(study) -> Drawing``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from analysis.drawing import Drawing
from analysis.study import find_study
from policies.core.types import UserError

OF_RUNS = ("fig4", "fig5", "fig8", "fig9", "fig10", "fig11", "fig12", "fig13")
"""Made from run directories, by the name of the experiment and study."""

NAMES = ("fig2", *OF_RUNS)
"""``fig2`` is made from the CSV that ``python -m sim.precision`` writes."""


def figure_of(study: Path) -> str | None:
    """The figure that a study of this name is for: ``fig8`` and ``fig8_smoke`` are for Figure 8."""
    name = study.name.removesuffix("_smoke")
    return name if name in OF_RUNS else None


def make(name: str, paths: Sequence[Path]) -> Drawing:
    """Draw a figure from the runs at or under ``paths`` (``fig2``: from one ``precision.csv`` or its folder).

    Raises:
        UserError: there is nothing to draw it from, or it belongs to another figure.
    """
    if name not in NAMES:
        raise UserError(f"unknown figure {name!r}; expected one of {', '.join(NAMES)}")
    module = import_module(f"analysis.figures.{name}")
    drawing: Drawing = module.draw(paths[0] if name == "fig2" else find_study(paths))
    return drawing


def write(drawing: Drawing, name: str, folder: Path) -> list[Path]:
    """Write ``NAME.png``, ``NAME.svg`` and ``NAME.csv``, each whole or not at all; returns their paths."""
    from analysis.bars import save  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    pictures = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for picture in pictures:
        save(drawing.figure, picture)
    values = folder / f"{name}.csv"
    unfinished = folder / f".{name}.{os.getpid()}.csv"
    drawing.values.to_csv(unfinished, index=False, float_format="%.6g", lineterminator="\n")
    os.replace(unfinished, values)
    return [*pictures, values]


def draw_figure(name: str, paths: Sequence[Path], folder: Path) -> str:
    """``make`` and ``write``; returns the text to print."""
    drawing = make(name, paths)
    files = write(drawing, name, folder)
    return "\n".join([*drawing.lines(), "", f"figure: {files[0]} (and .svg; values in {files[2].name})"])

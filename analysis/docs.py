"""The figures' part of ``README.md`` and ``docs/figures.md``: numbers and pictures from finished runs, in their places.

Owns the marked blocks of the two files and nothing between them; what people wrote around the blocks stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis import figures
from analysis.bars import save
from analysis.paper_table import ABSENT, Row, paper_text, rows
from conf.scale import study_of
from policies.core.types import UserError

_SECTIONS = {"2.4": 2, "5.2.1": 8, "5.2.2": 9, "5.3": 10, "5.4.1": 11, "5.4.2": 12, "5.5": 13}
"""Of the paper, and the figure that they speak of."""


def write(runs: Path, root: Path) -> Iterator[str]:
    """Bring both files below ``root`` up to date with the paper-scale studies in ``runs``; yields a line a figure.

    A figure without a study keeps what its block says.

    Raises:
        UserError: there is no study of any figure, or a file lacks a block.
    """
    folders = {name: runs / study_of("precision" if name == "fig2" else name, "paper") for name in figures.NAMES}
    there = {name: folder for name, folder in folders.items() if folder.is_dir()}
    if not there:
        raise UserError(f"{runs} has no finished study of a figure; run python -m sim experiment=all_figures")
    table = rows([*there.values()])
    page, readme = root / "docs" / "figures.md", root / "README.md"
    texts = {path: path.read_text(encoding="utf-8") for path in (page, readme)}
    for name, folder in there.items():
        drawing = figures.make(name, [folder])
        save(drawing.figure, root / "docs" / f"{name}.png")
        own = [row for row in table if figure_of(row) == name]
        block = "\n\n".join([drawing.caption, _table(own), f"![{drawing.title}]({name}.png)"])
        texts[page] = replaced(texts[page], name, block, page)
        yield f"{name}: {len(own)} numbers"
    others = [row for row in table if figure_of(row) is None]
    texts[page] = replaced(texts[page], "others", _table(others), page)
    texts[readme] = replaced(texts[readme], "figures", _overview(table, there), readme)
    for path, text in texts.items():
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)


def figure_of(row: Row) -> str | None:
    """The figure that a number of the paper belongs to, by where it is printed."""
    if found := re.match(r"Fig(?:ure|\.) (\d+)", row.where):
        return f"fig{found[1]}"
    number = _SECTIONS.get(row.where.removeprefix("Section "))
    return f"fig{number}" if number else None


def replaced(text: str, name: str, block: str, path: Path) -> str:
    """``text`` with ``block`` between the marks of ``name``.  Raises UserError if they are not there once."""
    begin, end = f"<!-- {name}: written by python -m analysis docs -->", f"<!-- end of {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise UserError(f"{path} needs the lines {begin} and {end} once each; put them where the numbers are to stand")
    return f"{text[: text.index(begin)]}{begin}\n{block}\n{text[text.index(end) :]}"


def _table(table: Sequence[Row]) -> str:
    lines = [
        f"| {row.setting} | `{row.metric}` | {paper_text(row)} | {_ours(row)} | {row.inside} |"
        for row in table
        if row.inside != ABSENT
    ]
    return "\n".join(["| setting | number | paper | ours | inside |", "|---|---|---|---|---|", *lines])


def _ours(row: Row) -> str:
    text = row.text(row.ours)
    return text if row.inside == "yes" else f"**{text}**"


def _overview(table: Sequence[Row], there: Mapping[str, Path]) -> str:
    """A line a figure: command, picture, numbers, reasons."""
    from omegaconf import OmegaConf  # noqa: PLC0415

    about: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("docs.yaml")))
    own: dict[str, Row]
    lines = ["| figure | paper; ours | why they differ |", "|---|---|---|"]
    for name in there:
        own = {}
        for row in table:
            if figure_of(row) == name and row.inside != ABSENT:
                own.setdefault(row.metric, row)  # the widest setting comes first
        shown = [own[metric] for metric in about[name]["shows"] if metric in own]
        numbers = "<br>".join(f"`{row.metric}` {paper_text(row)}; {_ours(row)}" for row in shown)
        command = about[name].get("command", f"python -m sim experiment={name}")
        lines.append(f"| [{name[3:]}](docs/{name}.png) `{command}` | {numbers} | {about[name]['why']} |")
    return "\n".join(lines)

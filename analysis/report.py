"""One page for a reader who was not there: figures, the paper's numbers beside ours, and what they rest on.

Owns the page.  It holds everything that it shows (pictures too) and no time of writing: same runs, same bytes.
"""

from __future__ import annotations

import base64
import html
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis import figures
from analysis.paper_table import ABSENT, INSIDE, OUTSIDE, Row, paper_text, rows
from analysis.runs import Run
from analysis.study import find_study
from conf.compose import FOLDER
from conf.scale import study_of
from policies.core.types import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 "DejaVu Sans", Helvetica, Arial, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.4rem } h3 { font-size: 1rem; margin-bottom: .3rem }
img { max-width: 100%; height: auto; display: block; margin: .6rem 0 }
table { border-collapse: collapse; width: 100%; font-size: .8rem } td, th { padding: .2rem .5rem; text-align: left;
       border-bottom: 1px solid #ddd; vertical-align: top } th { border-bottom: 2px solid #888 }
td.n { white-space: nowrap } .yes { color: #00654a } .NO { color: #a33c00; font-weight: bold } .none { color: #777 }
code { font-size: .85em; background: #f3f3f3; padding: 0 .2em } .note { color: #555; font-size: .85rem }
"""
_PIXELS_PER_INCH = 118
_SOURCES = {
    "measured": "measured by somebody, or printed as a fact",
    "fitted": "chosen so that the model meets numbers of the paper",
    "assumed": "nobody measured it; the note says why this value",
    "generated": "routing drawn by a synthetic router with a preset's statistics",
}


def write(runs: Path, scale: str, out: Path) -> Iterator[str]:
    """Write the page for the studies of the figures in the folder ``runs``; yields a line for each figure.

    Raises:
        UserError: there is no study of any figure.
    """
    sections: list[str] = []
    studies: list[Path] = []
    everything: list[Run] = []
    for name in figures.NAMES:
        folder = runs / study_of("precision" if name == "fig2" else name, scale)
        if not folder.is_dir():
            sections.append(_absent(name))
            yield f"{name}: {folder} is not there"
            continue
        try:
            drawing = figures.make(name, [folder])
        except UserError as error:
            sections.append(_absent(name, str(error)))
            yield f"{name}: {error}"
            continue
        own = [] if name == "fig2" else list(find_study([folder]).runs)
        studies.append(folder)
        everything += own
        lost = "".join(f"<li>{_text(line)}</li>" for line in drawing.missing)
        sections.append(
            f'<h3 id="{name}">{_text(drawing.title)}</h3><img alt="{_text(drawing.title)}" {_picture(drawing.figure)}>'
            f"<p>{_text(drawing.caption)}</p>"
            + (f"<p>Cells without a result:</p><ul>{lost}</ul>" if lost else "")
            + f'<p class="note">{_text(_about(name, scale))} {_text(_rests_on(own))}</p>'
        )
        yield f"{name}: {len(own)} runs" if own else name
    if not everything:
        raise UserError(f"{runs} has no finished study of a figure at scale={scale}; run python -m sim experiment=fig8")
    table = rows(studies)
    page = (
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>Figures</title><style>{STYLE}</style></head>"
        f"<body><h1>The paper's figures, from {len(everything)} simulated runs</h1>{_summary(table, scale)}"
        f"<h2>Figures</h2>{''.join(sections)}<h2>The paper's numbers and ours</h2>{_table(table)}"
        f"<h2>What the numbers rest on</h2>{_constants(everything)}{_routing(everything)}"
        f"<h2>Environment</h2>{_environment(everything)}</body></html>\n"
    )
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, out)


def _summary(table: Sequence[Row], scale: str) -> str:
    count = Counter(row.inside for row in table)
    small = (
        "<p><b>This is the small scale: a few steps with hardly any warm-up. It shows that everything works; its "
        "numbers are not to be compared.</b></p>"
        if scale != "paper"
        else ""
    )
    return (
        f"{small}<p>Of {len(table)} numbers that the paper prints or that follow from printed ones, {count[INSIDE]} of "
        f"ours lie inside, {count[OUTSIDE]} outside, and {count[ABSENT]} have no run here. "
        "The device is a model with fitted and assumed constants and the routing is generated: the numbers show what "
        "follows from the scheduling rules, not that a machine was measured.</p>"
    )


def _picture(figure: Figure) -> str:
    """The attributes of an ``img``; all figures in the size of one type."""
    import matplotlib.style  # noqa: PLC0415

    from analysis.bars import STYLE as FIGURE_STYLE  # noqa: PLC0415

    memory = io.BytesIO()
    with matplotlib.style.context(FIGURE_STYLE):
        figure.savefig(memory, format="png", metadata={"Software": None})
    encoded = base64.b64encode(memory.getvalue()).decode()
    return f'style="width: {figure.get_figwidth() * _PIXELS_PER_INCH:.0f}px" src="data:image/png;base64,{encoded}"'


def _absent(name: str, reason: str = "") -> str:
    command = "python -m sim.precision" if name == "fig2" else f"python -m sim experiment={name}"
    said = _text(reason) if reason else f"No runs; <code>{command}</code> makes them."
    return f'<h3 id="{name}">Figure {name[3:]}</h3><p class="none">{said}</p>'


def _about(name: str, scale: str) -> str:
    """The command, and the opening comment of the experiment, which says how it differs from the paper."""
    if name == "fig2":
        return "Command: python -m sim.precision."
    lines = (FOLDER / "experiment" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line[2:] for line in lines if line.startswith("# ") and not line.startswith("# @")]
    small = "" if scale == "paper" else f" scale={scale}"
    return f"Command: python -m sim experiment={name}{small}. {' '.join(comment)}"


def _rests_on(runs: Sequence[Run]) -> str:
    """How many device constants of which origin, and what the routing is."""
    if not runs:
        return "Routing: generated."
    parts = []
    for device in dict.fromkeys(run.label("device") for run in runs):
        sources: dict[str, str] = {}
        for run in runs:
            if run.label("device") == device:
                sources |= run.summary.get("device_constants", {}).get("sources", {})
        count = Counter(sources.values())
        parts.append(
            f"constants of the {device}: " + ", ".join(f"{number} {origin}" for origin, number in sorted(count.items()))
        )
    kinds = dict.fromkeys(str(run.summary.get("routing", {}).get("source")) for run in runs)
    return f"Rests on: {'; '.join(parts)}; routing: {'; '.join(kinds)}."


def _table(table: Sequence[Row]) -> str:
    lines = "".join(
        f"<tr><td>{_text(row.where)}</td><td>{_text(row.setting)}</td><td><code>{_text(row.metric)}</code>"
        + (f'<br><span class="note">{_text(row.note)}</span>' if row.note else "")
        + f'</td><td class="n">{_text(paper_text(row))}</td><td class="n">{_text(row.text(row.ours))}</td>'
        f'<td class="{_class(row)}">{row.inside}</td></tr>'
        for row in sorted(table, key=lambda row: row.inside != OUTSIDE)
    )
    return (
        '<p class="note">Mismatches first. A range holds what the paper prints; a single value has a tolerance. Ours '
        "is a range where several settings belong to the number. *: derived from printed numbers; f: a constant or "
        "preset of ours was fitted to it, so that agreement shows nothing.</p>"
        "<table><thead><tr><th>where<th>setting<th>metric<th>"
        f"paper<th>ours<th>inside</tr></thead><tbody>{lines}</tbody></table>"
    )


def _class(row: Row) -> str:
    return row.inside if row.inside in (INSIDE, OUTSIDE) else "none"


def _constants(runs: Sequence[Run]) -> str:
    """Every constant of the devices with its source."""
    lines: dict[str, None] = {}
    for run in runs:
        used = set(run.summary.get("device_constants", {}).get("sources", {}))
        for key, node in _leaves(run.config["device"]):
            if key in used:
                lines[
                    f"<tr><td>{_text(run.label('device'))}</td><td>{_text(key)}</td><td class=n>{node['value']:g}</td>"
                    f"<td>{_text(str(node['source']))}</td><td>{_text(str(node.get('note', '')))}</td></tr>"
                ] = None
    legend = "".join(f"<li><b>{name}</b>: {meaning}</li>" for name, meaning in _SOURCES.items())
    return (
        f"<ul>{legend}</ul><table><thead><tr><th>device<th>constant<th>value<th>source<th>note</tr></thead><tbody>"
        f"{''.join(sorted(lines))}</tbody></table>"
    )


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            if "value" in value and "source" in value:
                yield f"{prefix}{key}", value
            else:
                yield from _leaves(value, f"{prefix}{key}.")


def _routing(runs: Sequence[Run]) -> str:
    counts = Counter(str(run.summary.get("routing", {}).get("source")) for run in runs)
    lines = "".join(f"<li>{_text(source)}: {number} runs, generated</li>" for source, number in sorted(counts.items()))
    return f"<p>Routing:</p><ul>{lines}</ul>"


def _environment(runs: Sequence[Run]) -> str:
    """Each different environment record with the number of its runs."""
    counts: Counter[str] = Counter()
    for run in runs:
        try:
            record = json.loads((run.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            record = {"environment": "not recorded"}
        counts[json.dumps(record, sort_keys=True)] += 1
    lines = "".join(
        f"<li>{number} runs: <code>{_text(record)}</code></li>" for record, number in sorted(counts.items())
    )
    return f"<ul>{lines}</ul>"


def _text(text: str) -> str:
    return html.escape(text)

"""``python -m analysis``: finished runs as tables, pictures, timelines and stories."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from analysis.figures import NAMES
from conf.scale import SCALES
from policies.core.types import ModelSpec, UserError

USAGE = """\
usage: python -m analysis COMMAND ...

  compare RUN... [out=compare.png]
      Runs side by side: a table, and a picture of where the step time went.  RUN is a run's folder
      (runs/STUDY/CELL) or a folder of runs (runs/STUDY).  Several seeds of one setting are averaged.
      out: a .png, .svg or .pdf file.
  misses RUN... [width=20] [out=misses.png]
      Step time against the number of missing experts, a line a system, Bevy against the others.
  fig2 CSV | fig4, fig5, fig8 ... fig13 [RUN...] [out=FOLDER]
      A figure of the paper from finished runs: PNG, SVG and its values as CSV.  Without RUN: those of
      python -m sim experiment=fig8, in runs/fig8; fig2: of python -m sim.precision, in runs/precision.
  paper RUN... [out=FILE.csv]
      Every number that the paper prints, ours beside it, and whether ours lies inside.
  report [RUNS] [out=report.html] [scale=paper]
      One page with the figures of the studies in RUNS (default: runs), the table of the paper's numbers,
      environment, settings and what each number depends on.  scale=smoke: of the small runs.
  docs [RUNS]
      Put the numbers and pictures of the paper-scale studies in RUNS (default: runs) into README.md and docs/.
  beyond [FOLDER] [out=FOLDER]
      What goes beyond the paper, from FOLDER/beyond.csv (default: runs/beyond), which
      python -m benchmarks.beyond writes: gains over Bevy and over the best of batching, static groups and Bevy.
  validate SIM_RUN EXEC_RUN [out=validate.png]
      A simulated run against one on a machine, step by step: counts, decisions and times.
  timeline RUN [steps=FIRST:STOP] [out=RUN/timeline.json]
      A few steps as trace events for https://ui.perfetto.dev: one track a reader, compute slot and request.
      steps: from FIRST up to, not including, STOP; the first four measured steps unless given.
  story RUN expert=LAYER:INDEX
      Everything that happened to one expert, a line each.

Exit code 2 with one line for what cannot be read.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(USAGE, end="")
        return 0 if arguments else 2
    name, *rest = arguments
    if "--help" in rest or "-h" in rest:
        print(USAGE, end="")
        return 0
    try:
        if name not in COMMANDS:
            raise UserError(f"unknown command {name!r}; expected one of {', '.join(COMMANDS)}")
        command, known = COMMANDS[name]
        command(*_parse(rest, known))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a long story has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parse(arguments: Sequence[str], known: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Folders, and the ``key=value`` settings among ``known``; a folder's name may hold a ``=`` too."""
    paths, settings = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in known:
            settings[key] = value
        elif equals and key.isidentifier() and not Path(argument).exists():
            raise UserError(f"unknown setting {key!r}; expected one of {', '.join(known)}")
        else:
            paths.append(Path(argument))
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is no folder; give a run, runs/STUDY/CELL")
    return paths, settings


def _one(paths: Sequence[Path]) -> Path:
    if len(paths) != 1:
        raise UserError(f"expected one run folder, got {len(paths)}")
    return paths[0]


def _compare(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.bars import draw, save  # noqa: PLC0415
    from analysis.compare import compare, table  # noqa: PLC0415
    from analysis.runs import find_runs  # noqa: PLC0415

    out = Path(settings.get("out", "compare.png"))
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"out={out} has no known suffix; expected .png, .svg or .pdf")
    if not paths:
        raise UserError("expected at least one run folder, got none")
    blocks = compare(find_runs(paths))
    print(table(blocks), end="")
    save(draw(blocks), out)
    print(f"figure: {out}")


def _misses(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.bars import save  # noqa: PLC0415
    from analysis.misses import by_misses, draw, pick, table  # noqa: PLC0415
    from analysis.runs import find_runs  # noqa: PLC0415

    width = settings.get("width", "20")
    if not width.isdecimal() or int(width) < 1:
        raise UserError(f"width={width} is no whole number of experts of at least 1")
    runs = find_runs(paths)
    ours = pick(runs)
    means = by_misses(runs, int(width))
    print(table(means, ours), end="")
    out = Path(settings.get("out", "misses.png"))
    save(draw(means, ours, int(width)), out)
    print(f"figure: {out}")


def _figure(name: str, paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.figures import draw_figure  # noqa: PLC0415

    chosen = list(paths) or [Path("runs/precision" if name == "fig2" else f"runs/{name}")]
    folder = Path() if (chosen[0] / "summary.json").is_file() else chosen[0]
    print(draw_figure(name, chosen, Path(settings.get("out", folder))))


def _paper(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.paper_table import rows, text, write_csv  # noqa: PLC0415

    if not paths:
        raise UserError("expected at least one folder of runs, such as runs")
    table = rows(paths)
    print(text(table))
    if "out" in settings:
        write_csv(table, Path(settings["out"]))
        print(f"table: {settings['out']}")


def _report(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.report import write  # noqa: PLC0415

    scale = settings.get("scale", "paper")
    if scale not in SCALES:
        raise UserError(f"scale={scale}: expected one of {', '.join(SCALES)}")
    if len(paths) > 1:
        raise UserError(f"expected one folder that holds the studies, got {len(paths)}")
    out = Path(settings.get("out", "report.html"))
    for line in write(paths[0] if paths else Path("runs"), scale, out):
        print(line)
    print(f"report: {out}")


def _docs(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.docs import write  # noqa: PLC0415

    if len(paths) > 1:
        raise UserError(f"expected one folder that holds the studies, got {len(paths)}")
    for line in write(paths[0] if paths else Path("runs"), Path(__file__).resolve().parents[1]):
        print(line)


def _beyond(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.beyond import draw, text  # noqa: PLC0415
    from analysis.figures import write  # noqa: PLC0415

    if len(paths) > 1:
        raise UserError(f"expected one folder with beyond.csv, got {len(paths)}")
    folder = paths[0] if paths else Path("runs/beyond")
    print(text(folder / "beyond.csv"))
    drawing = draw(folder / "beyond.csv")
    files = write(drawing, "beyond_gains", Path(settings.get("out", folder)))
    print("\n".join([*drawing.lines(), "", f"figure: {files[0]} (and .svg; values in {files[2].name})"]))


def _validate(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.bars import save  # noqa: PLC0415
    from analysis.validate import check_replay, compare_runs, draw, table  # noqa: PLC0415

    if len(paths) != 2:
        raise UserError(f"expected two run folders, SIM_RUN EXEC_RUN, got {len(paths)}")
    found = compare_runs(*paths)
    print(table(found), end="")
    out = Path(settings.get("out", "validate.png"))
    save(draw(found), out)
    print(f"figure: {out}")
    check_replay(found)


def _timeline(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.runs import open_journal  # noqa: PLC0415
    from analysis.timeline import build, write  # noqa: PLC0415

    run = _one(paths)
    config, model, records = open_journal(run)
    first = int(config.get("warmup", 0))
    stop = first + 4
    if "steps" in settings:
        first, stop = _pair(settings["steps"], "steps", "FIRST:STOP")
    timeline = build(records, model, first, stop)
    out = Path(settings.get("out", run / "timeline.json"))
    size = write(timeline, out)
    print(f"{out}: steps {timeline.first} to {timeline.last}, {size / 1e6:.1f} MB; open it at https://ui.perfetto.dev")
    if timeline.note:
        print(f"note: {timeline.note}", file=sys.stderr)


def _story(paths: Sequence[Path], settings: dict[str, str]) -> None:
    from analysis.runs import open_journal  # noqa: PLC0415
    from policies.core.journal import story  # noqa: PLC0415

    _, model, records = open_journal(_one(paths))
    if "expert" not in settings:
        raise UserError("expected expert=LAYER:INDEX, such as expert=12:83")
    expert = _expert(model, *_pair(settings["expert"], "expert", "LAYER:INDEX"))
    for line in story(model, records, expert):
        print(line)


def _expert(model: ModelSpec, layer: int, index: int) -> int:
    if not (0 <= layer < model.n_layers and 0 <= index < model.n_experts):
        raise UserError(
            f"expert={layer}:{index} is not in {model.name}; layers go from 0 to {model.n_layers - 1}, "
            f"experts from 0 to {model.n_experts - 1}"
        )
    return model.expert(layer, index)


def _pair(text: str, name: str, form: str) -> tuple[int, int]:
    left, _, right = text.partition(":")
    if not (left.isdecimal() and right.isdecimal()):
        raise UserError(f"{name}={text} is not of the form {form}, two whole numbers")
    return int(left), int(right)


COMMANDS: dict[str, tuple[Callable[[Sequence[Path], dict[str, str]], None], tuple[str, ...]]] = {
    "compare": (_compare, ("out",)),
    "misses": (_misses, ("width", "out")),
    **{name: (partial(_figure, name), ("out",)) for name in NAMES},
    "paper": (_paper, ("out",)),
    "report": (_report, ("out", "scale")),
    "docs": (_docs, ()),
    "beyond": (_beyond, ("out",)),
    "validate": (_validate, ("out",)),
    "timeline": (_timeline, ("steps", "out")),
    "story": (_story, ("expert",)),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

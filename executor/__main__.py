"""``python -m executor``: decode on this machine.

Wires the parts together: the sweep (``conf.launch``), one run (``executor.run``), the demo, the analysis of finished
runs, and the simulator for the demo's prediction: the only place that knows both worlds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from analysis.compare import print_table
from analysis.metrics import write_metrics
from analysis.paired import Group, table
from analysis.predict import predict as simulated
from conf import rundir
from conf.cells import cell_name, check, recorded, resolved
from conf.compose import composing, expand
from conf.launch import launch
from executor.compose import overrides_for, replay_settings, settings_of
from executor.demo import Options, demo
from executor.run import execute, validate
from policies.core.types import UserError

USAGE = """\
python -m executor
    The demo: makes a small random model once (runs/packs/demo, 1.5 GB), measures this machine, and lets conventional
    batching, static grouping and Bevy decode in turns with real reads; under six minutes.
python -m executor demo [seconds=300] [steps=N] [pack=DIR] [runs=runs] [allow_buffered=true]
    The same with settings.

python -m executor pack=DIR [key=value ...]                 routing is given by a workload: what decisions cost
python -m executor pack=DIR mode=live [prompts=FILE] ...    the model's own tokens
python -m executor pack=DIR journal=RUN/journal.jsonl.gz    the order of events of another run, imposed

    system, schedule, cache, prefetch, workload, concurrency, steps, warmup, seed: as for python -m sim
    pack               an expert pack, made by python -m executor.pack; demo: the small model that comes along
    prompts            a file with a prompt a line: text, or a JSON list of token ids; without it, random tokens
    link=raw|paced     paced: real reads held to bytes_per_s
    store=disk|ram     ram: the pack is held in host memory
    readers=8          reader threads
    torch_device=cpu   or cuda;  threads=N: torch's
    record_trace=FILE  with mode=live: write the routing as a trace; record_columns=[scores,...]: what it holds
    verify_reads=true  compare the checksum of every expert that is read
    allow_buffered     run although reads may come from the page cache; the run is marked invalid
    study, runs, force as for python -m sim; cells run one after the other

Other commands: executor.pack, executor.verify, executor.calibrate.
Exit codes: 0 all there, 1 some runs broke or are invalid, 2 bad input, 130 stopped by Ctrl-C.
"""

work = partial(execute, measure=write_metrics)


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(USAGE, end="")
        return 0
    try:
        if not arguments or arguments[0] == "demo":
            return _demo(arguments[1:])
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config-dir", "-cd", type=Path)
        flags, overrides = parser.parse_known_args(arguments)
        if unknown := [override for override in overrides if override.startswith("-")]:
            raise UserError(f"unknown option {unknown[0]}; --help shows the usage")
        if any(override.startswith("journal=") for override in overrides):
            return _replay(overrides, flags.config_dir)
        return launch(overrides_for(overrides, flags.config_dir), work=work, validate=validate, report=report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; no result of the run in progress was kept", file=sys.stderr)
        return 130


def _demo(arguments: Sequence[str]) -> int:
    done = demo(Options.parse(arguments), measure=write_metrics, predict=predict)
    print(table([Group(group.title, group.runs, done.predicted) for group in done.groups]), end="")
    print(f"runs: {done.groups[0].runs[0].parent}/")
    return _complain([run for group in done.groups for run in group.runs])


def predict(overrides: Sequence[str], config_dir: Path) -> list[Path]:
    """Simulate cells with the options below ``config_dir``; their run directories, in order."""
    with composing(config_dir) as more:
        cells = [resolved(point.config) for point in expand([*more, "~experiment", *overrides])]
    return [simulated(settings) for settings in cells]


def _folder(settings: Mapping[str, Any]) -> Path:
    return Path(str(settings["runs"])) / str(settings["study"]) / cell_name(settings)


def _replay(overrides: Sequence[str], config_dir: Path | None) -> int:
    cells = list(settings_of(overrides, config_dir))
    if len(cells) != 1:
        raise UserError("a journal is one run; give no lists of values with journal=")
    settings = replay_settings(cells[0])
    check(settings)
    validate(recorded(settings))
    folder = _folder(settings)
    with rundir.writing(folder, replace=True) as unfinished:
        rundir.write_records(unfinished, recorded(settings))
        work(recorded(settings), unfinished, bool(settings["progress"]))
    report([folder], folder.parent)
    return _complain([folder])


def report(run_dirs: Sequence[Path], study: Path) -> None:
    """Print the table of the finished runs that are valid.  Raises UserError if others are not."""
    valid = [path for path in run_dirs if (rundir.read_summary(path) or {}).get("valid")]
    if valid:
        print(print_table(valid))
    print(f"runs:   {study}/")
    if len(valid) < len(run_dirs):
        raise UserError(_invalid([path for path in run_dirs if path not in valid]))


def _complain(run_dirs: Sequence[Path]) -> int:
    """1 and a line if a run is invalid, unless the user allowed it."""
    invalid = [path for path in run_dirs if not (rundir.read_summary(path) or {}).get("valid")]
    if not invalid:
        return 0
    print(f"error: {_invalid(invalid)}", file=sys.stderr)
    return 1


def _invalid(run_dirs: Sequence[Path]) -> str:
    reasons = (rundir.read_summary(run_dirs[0]) or {}).get("invalid") or ["no summary"]
    return f"{len(run_dirs)} run(s) are invalid, first {run_dirs[0]}: {reasons[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

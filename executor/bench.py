"""``python -m executor.bench``: systems side by side on this machine, with numbers that can be trusted.

Wires the comparison to metrics, table and prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.metrics import write_metrics
from analysis.paired import Group, Lines
from analysis.predict import predict
from conf import rundir
from executor.comparison import SENTINEL_DRIFT, Outcome, Turns, plan, record, run_groups
from policies.core.types import UserError
from traces import command

USAGE = """\
python -m executor.bench pack=DIR [turns=12] [seconds=S] [calibrate=true] [key=value ...]

Settings of python -m executor, with lists: system=llama_cpp_lfu,static_4_4,bevy cache.fraction=0.3,0.5 concurrency=2,8.
Cells that differ only in the system take turns of two steps in one process (A B A B) on the same shared weights, each
with a cache, readers and journal of its own.  Warm-up is not timed; a kernel that is compiled in timed steps, a read
from the page cache or a step without a token makes a run invalid.  The first cell runs alone at start and end: if its
step time moved, the machine did.

  turns=12       measured turns of each system
  seconds=S      about so long in all: each group has its share of what is left and at least four steps, and one for
                 which too little is left is left out and named
  store=ram      experts from host memory, read once for all cells;  store=disk: direct reads
  calibrate=true measure this machine, too, and let the simulator predict the step times; needs mode=replay
  device=m6      link and batches held to a profile of conf/device; device=host: as fast as this machine is
  experiment=exec_fig8   to exec_fig12: the paper's figures in this form; scale=smoke: a minute of them
  kernels=triton torch_device=cuda   and all other settings of python -m executor

Prints a group's lines when it has ended.  Writes runs/bench/<cell>/ (study=, runs=) and bench.json.
For device=NAME the simulator predicts without calibrating.
Exit codes: 0 all valid, 1 some runs broke or are invalid, 2 bad input, 130 stopped by Ctrl-C.
"""

DEFAULTS = {"system": "llama_cpp_lfu,static_4_4,bevy", "study": "bench", "settle": "4"}


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    if not arguments or {"--help", "-h"} & set(arguments):
        print(USAGE, end="")
        return 0 if arguments else 2
    try:
        return _bench(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; groups that had finished are kept", file=sys.stderr)
        return 130


def _bench(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    flags, words = parser.parse_known_args(arguments)
    own, overrides = command.split(words, ("turns", "seconds", "calibrate"))
    if any(word.startswith("steps=") for word in overrides):
        raise UserError("steps= follows from turns=: each turn is two steps after the warm-up; give turns=")
    given = {word.lstrip("+").split("=", 1)[0] for word in overrides}
    given |= {"system", "study"} if "experiment" in given else set()  # it brings its own
    extra = [f"{key}={value}" for key, value in DEFAULTS.items() if key not in given]
    groups = plan([*extra, *overrides], command.whole_number(own, "turns", least=2) or 12, flags.config_dir)
    seconds = command.whole_number(own, "seconds")
    workload = _workload(overrides) if command.flag(own, "calibrate") else None
    lines, unpredicted = Lines(), list[str]()

    def ended(group: Turns, summaries: Sequence[Mapping[str, Any]], device: Mapping[str, Any] | None) -> None:
        try:
            shown = _shown(group, summaries, device)
        except Exception as error:  # what was measured counts without it
            unpredicted.append(f"{group.title}: not predicted: {type(error).__name__}: {error}")
            shown = Group(group.title, group.folders, {})
        print(lines.add(shown), end="", flush=True)

    outcome = run_groups(groups, measure=write_metrics, seconds=seconds, workload=workload, ended=ended)
    study = groups[0].folders[0].parent
    study.mkdir(parents=True, exist_ok=True)
    rundir.write_json(study / "bench.json", record(outcome, arguments))
    print(lines.end(), end="")
    return _judge(outcome, study, unpredicted)


def _workload(overrides: Sequence[str]) -> list[str]:
    """The words that choose the workload.  Raises UserError if there are several."""
    words = [word for word in overrides if word.lstrip("+").startswith("workload")]
    if any(word.startswith("workload=") and "," in word for word in words):
        raise UserError("calibrate=true is for one workload; give one, or leave it out")
    return words


def _shown(group: Turns, summaries: Sequence[Mapping[str, Any]], device: Mapping[str, Any] | None) -> Group:
    """A group with the simulator's runs beside it, if there is a device to simulate."""
    predicted = {}
    if device is not None:
        for cell, folder, summary in zip(group.cells, group.folders, summaries, strict=True):
            changed = {"device": dict(device), "steps": summary["steps"], "study": f"{cell['study']}_predicted"}
            predicted[folder] = predict({**cell, **changed})
    return Group(group.title, group.folders, predicted)


def _judge(outcome: Outcome, study: Path, unpredicted: Sequence[str]) -> int:
    """Print what is wrong with the result; the exit code."""
    first_s, last_s = outcome.sentinel_s
    print(f"sentinel: {1e3 * first_s:.2f} ms a step first, {1e3 * last_s:.2f} ms last ({outcome.drift:.2f})")
    print(f"runs: {study}/")
    if abs(outcome.drift - 1) > SENTINEL_DRIFT:
        print("note: the machine's speed moved between start and end: compare within groups only")
    wrong = [*unpredicted, *(f"{title}: {reason}" for title, reason in outcome.failed)]
    for group, summaries in outcome.done:
        for folder, summary in zip(group.folders, summaries, strict=True):
            wrong += [f"{folder.name}: invalid: {reason}" for reason in summary["invalid"]]
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m sim.search``: Optuna chooses among a sweep's settings instead of running all of them.

Owns the search: what is asked, run and told.  A trial is a sweep over its seeds, in the run directories of the study.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from analysis.metrics import Metrics
from analysis.searched import Trial, best_lines, write
from conf import rundir
from conf.compose import composing, lists
from conf.launch import launch
from policies.core.types import UserError
from sim.run import simulate, validate
from traces import command

USAGE = """
python -m sim.search experiment=search [trials=40] [sampler_seed=0] [setting=value,value ...]

Every setting with a list of values, here or in the experiment, is searched; seed is averaged over.  The first trial
takes the first value of each list.  Maximises tokens_per_s with Optuna's TPE sampler (pip install optuna).
The study's folder gets search.csv and search.png.  The same command gives the same trials, so one that was stopped
goes on where it stopped: its finished cells are kept.
"""
OWN = ("trials", "sampler_seed")
SHOWN = 5


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    own, settings = command.split(argv, OWN)
    trials = command.whole_number(own, "trials") or 40
    seed = command.whole_number(own, "sampler_seed", least=0) or 0
    try:
        import optuna  # noqa: PLC0415
    except ImportError:
        raise UserError("the search needs Optuna, which is not installed; pip install optuna") from None
    with composing() as more:
        kept, varied = lists([*more, *settings])
    if "experiment" in varied:
        raise UserError(f"a search is of one experiment; give one of {', '.join(varied['experiment'])}")
    kept += [f"seed={','.join(seeds)}" for seeds in [varied.pop("seed", None)] if seeds]
    if not varied:
        raise UserError("no setting has a list of values to search; give one, as in cache=lfu,lru")

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial({key: values[0] for key, values in varied.items()})
    done: list[Trial] = []
    folders: list[Path] = []
    worst = 0
    for number in range(trials):
        trial = study.ask()
        chosen = {key: str(trial.suggest_categorical(key, values)) for key, values in varied.items()}
        found: list[Path] = []
        code = launch(
            [*kept, *(f"{key}={value}" for key, value in chosen.items())],
            work=partial(simulate, measure=Metrics),
            validate=validate,
            report=partial(_keep, found, folders),
        )
        if code not in (0, 1):
            return code
        worst = max(worst, code)
        value = None if code else fmean(_tokens_per_s(folder) for folder in found)
        if value is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, value)
        done.append(Trial(number, value, chosen))
        print(f"trial {number}: {'failed' if value is None else f'{value:.2f} tokens/s'}", file=sys.stderr, flush=True)
    if not folders:
        raise UserError("every trial failed; the reasons are above")
    print("\n".join(best_lines(done, SHOWN)))
    for path in write(done, folders[0]):
        print(path)
    return worst


def _keep(found: list[Path], folders: list[Path], run_dirs: Sequence[Path], folder: Path) -> None:
    found += run_dirs
    folders.append(folder)


def _tokens_per_s(folder: Path) -> float:
    summary = rundir.read_summary(folder)
    assert summary is not None, "the sweep has just reported this run"
    return float(summary["tokens_per_s"])


if __name__ == "__main__":
    sys.exit(command.run(main, USAGE))

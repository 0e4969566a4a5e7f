"""One command: compose the cells, check them, run what is not there yet, report.

Owns the order of these, the outcome of each cell and the exit code.  What a cell does, how its settings are
checked further and what is reported are given to it; any Hydra launcher carries the cells.

Exit codes: 0 all cells are there; 1 some failed; 2 bad input, nothing ran; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict
from tqdm import tqdm

from conf import rundir
from conf.cells import Cell, cell_name, check, recorded, resolved
from conf.compose import Planned, composing, expand
from conf.progress import State, Watch, shown
from policies.core.types import UserError

Work = Callable[[Mapping[str, Any], Path, bool], None]
"""``work(settings, folder, progress)`` runs one cell and writes its files into ``folder``."""

Validate = Callable[[Mapping[str, Any]], None]
"""Raises UserError for settings that ``Work`` would refuse; cheap."""

Report = Callable[[Sequence[Path], Path], None]
"""``report(run_dirs, study)`` shows the finished runs; figures go into the folder ``study``."""


def launch(
    overrides: Sequence[str],
    *,
    work: Work,
    validate: Validate,
    report: Report,
    config_dir: Path | None = None,
    only_failed: bool = False,
) -> int:
    """Run the sweep that a command line describes; returns the exit code.

    ``config_dir``: a folder with more options for the groups.  ``only_failed``: of the cells that are not there, run
    those alone that failed before.
    """
    try:
        with composing(config_dir) as more:
            return _sweep([*more, *overrides], work, validate, report, only_failed)
    except BaseException as error:
        if _interrupted(error):
            _say("stopped before any cell was started")
            return 130
        if not isinstance(error, UserError):
            raise
        for line in str(error).splitlines():
            _say(f"error: {line}")
        return 2


def _interrupted(error: BaseException | None) -> bool:
    """True for Ctrl-C, and for what was raised while one was on its way: OmegaConf's clean-up hides it so."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def run_cell(work: Work, launcher: int, config: DictConfig) -> None:
    """What a launcher's worker does: one cell, into its run directory.

    ``launcher``: the process that started the sweep.  Never raises for the cell's own faults: the reason is written
    beside where the run would be.
    """
    if os.getpid() != launcher:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the launcher alone answers it
    try:
        _run_cell(work, config)
    except Exception as error:
        if _interrupted(error):
            raise KeyboardInterrupt from error  # Hydra would take it for a fault of the cell
        raise


def _run_cell(work: Work, config: DictConfig) -> None:
    cell = _cell((), config)
    force = bool(cell.settings["force"])
    if rundir.is_finished(cell.folder) and not force:
        return  # another sweep was faster
    try:
        with rundir.writing(cell.folder, replace=force) as folder:
            settings = recorded(cell.settings)
            rundir.write_records(folder, settings)
            work(settings, folder, bool(cell.settings["progress"]))
    except Exception as error:
        if _interrupted(error):
            raise
        _write_failure(cell, error)
    else:
        rundir.failure_file(cell.folder).unlink(missing_ok=True)


def _sweep(arguments: Sequence[str], work: Work, validate: Validate, report: Report, only_failed: bool) -> int:
    master: DictConfig | None = None
    planned: dict[Path, Cell] = {}
    refused: dict[str, list[str]] = {}  # by reason
    for point in tqdm(expand(arguments), "composing", unit="cell", disable=None, leave=False, delay=2):
        master = master or point.config
        overrides = [override for override in point.overrides if not override.startswith("hydra")]
        try:
            cell = _cell(overrides, point.config)
            _validate(cell, validate)
            planned[cell.folder] = cell
        except UserError as error:
            if _interrupted(error):
                raise
            refused.setdefault(str(error), []).append(" ".join(overrides))
    if not planned or master is None:
        raise UserError("\n".join(refused))

    cells = list(planned.values())
    if only_failed:
        failed_before = [cell for cell in cells if rundir.failure_file(cell.folder).exists()]
        _say(f"of {len(cells)} cells {len(failed_before)} have failed before")
        cells = [cell for cell in cells if cell in failed_before or rundir.is_finished(cell.folder)]
        if not cells:
            raise UserError("no cell of this sweep is finished or has failed; run it without --cells failed")
    try:
        return _run(cells, refused, work, report, master)
    except BaseException as error:
        if not _interrupted(error):
            raise
        _remove_stale(cells)
        finished = sum(rundir.is_finished(cell.folder) for cell in cells)
        _say(f"stopped: {finished} of {len(cells)} cells are finished; the same command goes on from there")
        return 130


def _run(
    cells: Sequence[Cell], refused: Mapping[str, Sequence[str]], work: Work, report: Report, master: DictConfig
) -> int:
    _make_folders(cells)
    _remove_stale(cells)
    todo = [cell for cell in cells if cell.settings["force"] or not rundir.is_finished(cell.folder)]
    _say_what_is_there([cell for cell in cells if cell not in todo])
    watch = Watch(todo)
    trouble = ""
    if todo:
        sources = _sources(cells)
        with shown(watch):
            trouble = _carry([cell for cell in todo if sources[cell.name] is cell], work, master)
            for cell in todo:
                _share(sources[cell.name], cell)

    states = watch.states()
    failed = [cell for cell in todo if states[cell.folder] is not State.FINISHED]
    for cell in failed:
        if not rundir.failure_file(cell.folder).exists():
            _write_reason(cell, "no result", trouble or "the worker ended without a word", [])
    failures = [rundir.read_json(rundir.failure_file(cell.folder)) or {} for cell in failed]
    there = [cell.folder for cell in cells if cell not in failed]
    if not there and all(failure["kind"] == UserError.__name__ for failure in failures):
        # Bad input that only showed when the cells ran: nothing of them stays.
        for cell in failed:
            rundir.failure_file(cell.folder).unlink(missing_ok=True)
        raise UserError("\n".join(dict.fromkeys([*refused, *(failure["reason"] for failure in failures)])))
    code = 1 if failed or refused else 0
    for study in dict.fromkeys(folder.parent for folder in there):
        try:
            report([folder for folder in there if folder.parent == study], study)
        except UserError as error:
            _say(f"error: {error}")
            code = 1
    _say_all("refused", refused)
    reasons: dict[str, list[str]] = {}
    for cell, failure in zip(failed, failures, strict=True):
        kind = "" if failure["kind"] == UserError.__name__ else f"{failure['kind']}: "
        reasons.setdefault(kind + failure["reason"], []).append(str(cell.folder))
    _say_all("failed", reasons)
    if failed:
        _say("each failed cell has a file NAME.failed.json with the traceback; --cells failed runs these alone again")
    return code


def _make_folders(cells: Sequence[Cell]) -> None:
    for study in dict.fromkeys(cell.folder.parent for cell in cells):
        try:
            study.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{study} cannot be made ({error.strerror}); give another runs= or study=") from error


def _remove_stale(cells: Sequence[Cell]) -> None:
    for study in dict.fromkeys(cell.folder.parent for cell in cells):
        rundir.remove_stale(study)


def _cell(overrides: Sequence[str], config: DictConfig) -> Cell:
    settings = resolved(config)
    check(settings)
    name = cell_name(settings)
    return Cell(name, Path(str(settings["runs"])) / str(settings["study"]) / name, tuple(overrides), settings)


def _validate(cell: Cell, validate: Validate) -> None:
    try:
        validate(recorded(cell.settings))
    except UserError:
        raise
    except Exception as error:
        if _interrupted(error):
            raise
        # A fault of the code, not of the input: the cell shows it when it runs, and the others go on.
        return


def _sources(cells: Sequence[Cell]) -> dict[str, Cell]:
    """By name, the cell that is run, or is there already, for all studies that hold it; the others get a copy."""
    there = [cell for cell in cells if not cell.settings["force"] and rundir.is_finished(cell.folder)]
    return {cell.name: cell for cell in reversed([*there, *cells])}


def _share(source: Cell, cell: Cell) -> None:
    """What became of ``source`` becomes of the equal cell of another study."""
    if source is cell:
        return
    if rundir.is_finished(source.folder):
        rundir.copy(source.folder, cell.folder)
    elif (failure := rundir.read_json(rundir.failure_file(source.folder))) is not None:
        rundir.write_json(rundir.failure_file(cell.folder), failure)


def _carry(cells: Sequence[Cell], work: Work, master: DictConfig) -> str:
    """Let the configured launcher run the cells; returns its complaint, if any."""
    if not cells:
        return ""
    workers = cells[0].settings["workers"] or cpus()
    with open_dict(master.hydra):
        if "n_jobs" in master.hydra.launcher:
            master.hydra.launcher.n_jobs = min(workers, len(cells))  # one cell or one worker needs no processes
    search_path = GlobalHydra.instance().config_loader().get_search_path()
    planned = {cell.overrides: _for_worker(cell, alone=len(cells) == 1) for cell in cells}
    context = HydraContext(config_loader=Planned(search_path, planned), callbacks=Callbacks(master))
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=partial(run_cell, work, os.getpid()), config=master
    )
    try:
        for job in launcher.launch([list(cell.overrides) for cell in cells], initial_job_idx=0):
            _ = job.return_value
    except Exception as error:
        if _interrupted(error):
            raise
        return f"{type(error).__name__}: {error}"
    return ""


def cpus() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _for_worker(cell: Cell, alone: bool) -> dict[str, Any]:
    """A worker may have another working directory, and only one cell can have the terminal."""
    runs = str(Path(str(cell.settings["runs"])).resolve())
    return {**cell.settings, "runs": runs, "progress": alone and bool(cell.settings["progress"])}


def _write_failure(cell: Cell, error: Exception) -> None:
    kind = UserError.__name__ if isinstance(error, UserError) else type(error).__name__
    _write_reason(cell, kind, (str(error).splitlines() or [""])[0], traceback.format_exception(error))


def _write_reason(cell: Cell, kind: str, reason: str, lines: Sequence[str]) -> None:
    """Beside where the run would be; with the settings, so that a figure can mark the gap."""
    failure = {
        "cell": cell.name,
        "kind": kind,
        "reason": reason,
        "settings": recorded(cell.settings),
        "traceback": list(lines),
    }
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    rundir.write_json(rundir.failure_file(cell.folder), failure)


def _say_what_is_there(cells: Sequence[Cell]) -> None:
    if not cells:
        return
    _say(f"already there: {len(cells)} finished cells (force=true runs them again)")
    now = rundir.environment()["git"]
    if any((rundir.read_json(cell.folder / "environment.json") or {}).get("git") != now for cell in cells):
        _say("some of them were made by another state of the code (environment.json has its commit)")


def _say_all(what: str, reasons: Mapping[str, Sequence[str]]) -> None:
    for reason, whom in reasons.items():
        more = f" and {len(whom) - 1} more" if len(whom) > 1 else ""
        _say(f"{what}: {whom[0]}{more}: {reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

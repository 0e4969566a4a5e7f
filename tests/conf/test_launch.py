"""Sweeps of toy cells: resume, force, failures, bad input, kills, parallel starts, Ctrl-C."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from conf import launch
from tests.conf import toy

ROOT = Path(__file__).resolve().parents[2]
TWO = "system=bevy,llama_cpp"
THREE = "system=bevy,llama_cpp,bevy_fifo"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TOY_SLEEP_S", "TOY_BROKEN", "TOY_DIES", "TOY_REFUSES"):
        monkeypatch.delenv(name, raising=False)


def run(*overrides: str) -> int:
    return toy.main(["workers=1", *overrides])


def start(*overrides: str, **environment: str) -> subprocess.Popen[str]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under nohup a child would not hear Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.conf.toy", *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def names(study: str = "compare") -> list[str]:
    """What is in the study: systems of finished runs, and other names as they are."""
    found = os.listdir(Path("runs") / study)
    return sorted(name.split("-")[0] for name in found if name != "calls")


def calls(study: str = "compare") -> list[str]:
    return (Path("runs") / study / "calls").read_text().split()


def finished_cells() -> list[Path]:
    return list(Path("runs/compare").glob("[a-z]*/summary.json"))


def contents(study: str) -> dict[str, bytes]:
    """All files of all runs but the record of the environment: somebody may commit while this test runs."""
    root = Path("runs") / study
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.glob("[a-z]*/*"))
        if path.name != "environment.json"
    }


def test_second_start_runs_nothing_and_a_longer_list_only_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TWO) == 0
    first = capsys.readouterr()
    assert run(TWO) == 0
    second = capsys.readouterr()
    assert first.out == second.out
    assert "finished, 1.0 tokens/s (2 of 2)" in first.err
    assert "already there: 2 finished cells" in second.err
    assert calls() == ["bevy", "llama_cpp"]
    assert run(THREE) == 0
    assert calls() == ["bevy", "llama_cpp", "bevy_fifo"]
    assert names() == ["bevy", "bevy_fifo", "llama_cpp"]
    assert os.listdir() == ["runs"]


def test_equal_cells_run_once() -> None:
    assert run("system=bevy,bevy", "cache.fraction=0.3,0.30") == 0
    assert calls() == ["bevy"]


BOTH_STUDIES = ("study=one,two", "system=bevy,llama_cpp")


def test_equal_cells_of_two_studies_run_once() -> None:
    assert run("study=two", "system=bevy") == 0
    assert run(*BOTH_STUDIES) == 0
    assert calls("two") == ["bevy"], "it was there, and the other study got a copy"
    assert calls("one") == ["llama_cpp"]
    assert contents("one") == contents("two")
    assert len(contents("one")) == 6
    assert run(*BOTH_STUDIES, "force=true") == 0
    assert calls("one") == ["llama_cpp", "bevy", "llama_cpp"]
    assert calls("two") == ["bevy"]


def test_equal_cells_of_two_studies_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_BROKEN", "llama_cpp")
    assert run(*BOTH_STUDIES) == 1
    reasons = [json.loads(path.read_text()) for path in sorted(Path("runs").glob("*/llama_cpp-*.failed.json"))]
    assert [failure["reason"] for failure in reasons] == ["a policy divided by zero"] * 2
    monkeypatch.delenv("TOY_BROKEN")
    assert run(*BOTH_STUDIES) == 0
    assert contents("one") == contents("two")
    assert not list(Path("runs").glob("*/*.failed.json"))


def test_force_runs_again() -> None:
    assert run("system=bevy") == 0
    (before,) = finished_cells()
    inode = before.stat().st_ino
    assert run("system=bevy", "force=true") == 0
    (after,) = finished_cells()
    assert after == before
    assert after.stat().st_ino != inode
    assert names() == ["bevy"]


def test_a_forced_cell_that_fails_keeps_its_old_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("system=bevy") == 0
    monkeypatch.setenv("TOY_BROKEN", "bevy")
    assert run("system=bevy", "force=true") == 1
    assert len(finished_cells()) == 1


def test_a_broken_cell_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_BROKEN", "llama_cpp")
    assert run(TWO) == 1
    assert "ZeroDivisionError: a policy divided by zero\n" in capsys.readouterr().err
    assert len(finished_cells()) == 1
    (reason,) = Path("runs/compare").glob("llama_cpp-*.failed.json")
    failure = json.loads(reason.read_text())
    assert (failure["kind"], failure["reason"]) == ("ZeroDivisionError", "a policy divided by zero")
    assert "toy.py" in "".join(failure["traceback"])
    monkeypatch.delenv("TOY_BROKEN")
    assert run(TWO) == 0
    assert not reason.exists()
    assert len(finished_cells()) == 2


def test_cells_failed_runs_those_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOY_BROKEN", "llama_cpp")
    assert run(TWO) == 1
    (reason,) = Path("runs/compare").glob("llama_cpp-*.failed.json")
    assert json.loads(reason.read_text())["settings"]["system"]["name"] == "llama_cpp"
    monkeypatch.delenv("TOY_BROKEN")
    assert toy.main(["workers=1", THREE], only_failed=True) == 0
    assert "of 3 cells 1 have failed before" in capsys.readouterr().err
    assert calls() == ["bevy", "llama_cpp", "llama_cpp"]
    assert names() == ["bevy", "llama_cpp"]
    assert toy.main(["workers=1", "system=bevy_both"], only_failed=True) == 2
    assert "no cell of this sweep is finished or has failed" in capsys.readouterr().err


def test_all_broken_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_BROKEN", "bevy")
    assert run("system=bevy") == 1


def test_bad_input_that_shows_late_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOY_REFUSES", "1")
    assert run(TWO) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert lines == ["error: the trace has no requests; give another one"]
    assert names() == []


def test_what_is_refused_does_not_stop_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("system=bevy", "cache.fraction=0.5,2,3") == 1
    errors = capsys.readouterr().err
    assert "refused: workers=1 system=bevy cache.fraction=2: cache.fraction=2: expected" in errors
    assert names() == ["bevy"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("cache.fraction=2", "cache.fraction=2: expected a number above 0"),
        ("concurrency=0", "concurrency=0: expected a whole number"),
        ("concurrency=101", "concurrency is above 100"),
        ("nonsense=1", "nonsense: there is no such setting"),
        ("system=nonsense", "there is no such system"),
    ],
)
def test_bad_input_writes_nothing(override: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = [] if override.startswith("system") else ["system=bevy"]
    assert run(override, *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {'system=nonsense: ' if override.startswith('system') else ''}{says}")
    assert os.listdir() == []


def test_runs_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert run("runs=file", "system=bevy") == 2
    assert "error: file/compare cannot be made (Not a directory)" in capsys.readouterr().err


def test_another_state_of_the_code_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("system=bevy") == 0
    (summary,) = finished_cells()
    (summary.parent / "environment.json").write_text('{"git": {"commit": "old"}}')
    assert run("system=bevy") == 0
    assert "another state of the code" in capsys.readouterr().err


def test_workers_make_no_difference_and_one_may_die() -> None:
    assert run(TWO, "study=serial") == 0
    both = start(TWO, "study=parallel", "workers=2")
    dying = start(THREE, "workers=2", TOY_DIES="llama_cpp")
    both.communicate(timeout=60)
    assert both.returncode == 0
    assert contents("serial") == contents("parallel")
    _, errors = dying.communicate(timeout=60)
    assert dying.returncode == 1
    assert "llama_cpp-" in errors
    assert "no result: TerminatedWorkerError" in errors
    assert list(Path("runs/compare").glob("llama_cpp-*.failed.json")), (
        "what no worker could say is written all the same"
    )
    assert run(THREE) == 0


def test_two_starts_side_by_side() -> None:
    processes = [start(TWO, "workers=1", TOY_SLEEP_S="0.3") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert names() == ["bevy", "llama_cpp"]
    assert {path.read_text() for path in Path("runs/compare").glob("*/part")} == {"whole"}


def test_kill_and_go_on() -> None:
    assert run(THREE, "study=uninterrupted") == 0
    process = start(THREE, "study=killed", "workers=2", TOY_SLEEP_S="0.7")
    killed = Path("runs/killed")
    until(lambda: any(killed.glob("[a-z]*/summary.json")) and any(killed.glob(".*@*")))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert run(THREE, "study=killed") == 0
    assert contents("killed") == contents("uninterrupted")
    assert names("killed") == ["bevy", "bevy_fifo", "llama_cpp"]
    assert len(calls("killed")) < 6


def test_kills_at_random_moments() -> None:
    assert run(THREE, "study=uninterrupted") == 0
    moments = random.Random(6)
    for _ in range(3):
        process = start(THREE, "study=killed", "workers=2", TOY_SLEEP_S="0.3")
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=moments.uniform(0.5, 3.0))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert run(THREE, "study=killed") == 0
    assert contents("killed") == contents("uninterrupted")
    assert names("killed") == ["bevy", "bevy_fifo", "llama_cpp"]


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_how_to_go_on(workers: int) -> None:
    process = start(THREE, f"workers={workers}", TOY_SLEEP_S="0.7")
    until(lambda: bool(finished_cells()) and any(Path("runs/compare").glob(".*@*")))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    finished = len(finished_cells())
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == (
        f"stopped: {finished} of 3 cells are finished; the same command goes on from there"
    )
    assert "Traceback" not in errors
    assert run(THREE) == 0
    assert names() == ["bevy", "bevy_fifo", "llama_cpp"]


def test_ctrl_c_that_a_library_hides_is_one_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OmegaConf's clean-up fails when Ctrl-C meets it half-way, and its error takes the place of the interrupt."""

    def hidden(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("half-made")

    for place, says in (
        ("conf.launch._cell", "stopped before any cell"),
        ("tests.conf.toy.rundir.write_json", "stopped: 0 of 2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, hidden)
            assert run(TWO) == 130
        assert says in capsys.readouterr().err
    assert run(TWO) == 0


def test_ctrl_c_before_anything_ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "expand", interrupted)
    assert run() == 130
    assert "stopped before any cell" in capsys.readouterr().err

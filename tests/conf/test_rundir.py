"""Run directories appear whole or not at all, and nobody's work is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf import rundir


def write(folder: Path, text: str, *, replace: bool = False) -> None:
    with rundir.writing(folder, replace=replace) as temporary:
        (temporary / "text").write_text(text)
        rundir.write_json(temporary / "summary.json", {"text": text})


def test_appears_when_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "study" / "cell"
    with rundir.writing(folder) as temporary:
        assert temporary.parent == folder.parent
        assert rundir.look(folder.parent).started == {"cell"}
        assert rundir.look(folder.parent).runs == {}
        rundir.write_json(temporary / "summary.json", {})
        assert not folder.exists()
    assert rundir.is_finished(folder)
    assert os.listdir(folder.parent) == ["cell"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with rundir.writing(tmp_path / "cell") as temporary:
            (temporary / "text").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == []


def test_the_first_of_two_stays(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    with rundir.writing(folder) as temporary:
        rundir.write_json(temporary / "summary.json", {"text": "second"})
        folder.mkdir()
        rundir.write_json(folder / "summary.json", {"text": "first"})
    assert rundir.read_summary(folder) == {"text": "first"}
    assert os.listdir(tmp_path) == ["cell"]


def test_replaces_when_told_and_when_broken(tmp_path: Path) -> None:
    folder = tmp_path / "cell"
    write(folder, "first")
    write(folder, "second", replace=True)
    assert (folder / "text").read_text() == "second"
    (folder / "summary.json").write_text('{"text": "sec')
    assert not rundir.is_finished(folder)
    write(folder, "third")
    assert rundir.read_summary(folder) == {"text": "third"}
    assert os.listdir(tmp_path) == ["cell"]


def test_only_leftovers_of_dead_processes_of_this_host_go(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    with rundir.writing(tmp_path / "mine") as own:
        host = own.name.split("@")[1]
        for name in (f".a@{host}@{int(dead.stdout)}", f".a@{host}@{int(dead.stdout)}.old", ".a@elsewhere@1", "a"):
            (tmp_path / name).mkdir()
        rundir.remove_stale(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".a@elsewhere@1", own.name, "a"]
        rundir.write_json(own / "summary.json", {})


def test_environment_says_what_ran_and_not_where(tmp_path: Path) -> None:
    rundir.write_records(tmp_path, {"seed": 1, "list": [1, 2]})
    text = (tmp_path / "environment.json").read_text()
    assert str(Path.home()) not in text
    assert {"python", "platform", "packages", "git", "cpus"} <= rundir.environment().keys()
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\nlist:\n- 1\n- 2\n"

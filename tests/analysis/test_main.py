"""``python -m analysis`` as a user meets it."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.__main__ import main

MakeRun = Callable[..., Path]


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["timeline", "--help"]):
        assert main(arguments) == 0
        assert "python -m analysis COMMAND" in capsys.readouterr().out
    assert main([]) == 2


def test_compare_prints_the_table_and_writes_the_picture(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(make_run("llama_cpp")), str(make_run("bevy"))]
    assert main(["compare", *runs, f"out={tmp_path / 'c.png'}"]) == 0
    out = capsys.readouterr().out
    assert "llama_cpp" in out
    assert "Bevy" in out
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_shows_the_first_measured_steps_unless_told(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.json"
    assert main(["timeline", str(make_run("bevy")), f"out={out}"]) == 0
    assert "steps 3 to 6" in capsys.readouterr().out
    assert main(["timeline", str(make_run("bevy")), "steps=1:2", f"out={out}"]) == 0
    assert "steps 1 to 1" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]


def test_story_follows_one_expert(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["story", str(make_run("bevy")), "expert=2:0"]) == 0
    out = capsys.readouterr().out
    assert "fetch" in out
    assert "2:0" in out


BAD = [
    ([], "expected one run folder, got 0"),
    (["/nowhere"], "/nowhere is no folder"),
    (["{empty}"], "has no journal.jsonl.gz"),
    (["{broken}"], "journal.jsonl.gz"),
    (["{cut}"], "journal.jsonl.gz"),
    (["{headless}"], "no config and model"),
    (["{run}", "steps=4"], "steps=4 is not of the form FIRST:STOP"),
    (["{run}", "steps=90:95"], "the journal has steps 0 to 7"),
    (["{run}", "step=1:2"], "unknown setting 'step'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = make_run("bevy")
    folders = {"run": run}
    for name in ("empty", "broken", "cut", "headless"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
    whole = (run / "journal.jsonl.gz").read_bytes()
    (folders["broken"] / "journal.jsonl.gz").write_bytes(b"no gzip at all")
    (folders["cut"] / "journal.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (folders["headless"] / "journal.jsonl.gz").write_bytes(gzip.compress(b'{"schema":2}\n'))
    out = tmp_path / "out.json"
    given = [argument.format(**folders) for argument in arguments]
    assert main(["timeline", *given, f"out={out}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["compare"], "at least one run folder"),
        (["compare", "{run}", "out=x.bmp"], "expected .png, .svg or .pdf"),
        (["compare", "{empty}"], "holds no finished run"),
        (["story", "{run}"], "expected expert=LAYER:INDEX"),
        (["story", "{run}", "expert=99:0"], "layers go from 0 to 23"),
        (["story", "{run}", "expert=x"], "two whole numbers"),
    ],
)
def test_bad_commands(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    folders = {"run": make_run("bevy"), "empty": tmp_path}
    assert main([argument.format(**folders) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err

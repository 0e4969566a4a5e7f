import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from policies.core.types import UserError
from traces import convert, info, validate
from traces.command import parse, run, whole_number
from traces.storage import write_trace
from traces.trace_file import read_trace

ROOT = Path(__file__).resolve().parents[2]


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def source(tmp_path):
    ids = np.stack([np.random.default_rng(r).random((12, 3, 8)).argsort(-1)[..., :2] for r in range(9)])
    np.savez(tmp_path / "ids.npz", ids=ids)
    return tmp_path / "ids.npz"


def test_convert_validate_info_from_the_shell(tmp_path, source):
    out = tmp_path / "t.parquet"
    code, printed, error = command("traces.convert", f"source={source}", f"out={out}", "model=toy")
    assert (code, error) == (0, "")
    assert "toy: 3 MoE layers x 8 experts, top-2" in printed
    assert "9 requests, 108 decode and 0 prefill tokens" in printed
    assert "n_experts is INFERRED: 8" in printed

    before = out.read_bytes()
    code, printed, error = command("traces.convert", f"source={source}", f"out={out}")
    assert (code, printed) == (2, "")
    assert error == f"error: {out} exists; choose another out= or add overwrite=true\n"
    assert out.read_bytes() == before

    code, printed, error = command("traces.validate", out)
    assert (code, error) == (0, "")
    assert printed.startswith("OK: toy, 9 requests, 108 decode and 0 prefill tokens, 3 MoE layers (layers 0 to 2) x 8")

    out.write_bytes(before[:-20])
    code, printed, error = command("traces.validate", out)
    assert (code, printed) == (2, "")
    assert error.startswith(f"error: {out} is no readable trace")
    assert error.count("\n") == 1


@pytest.mark.parametrize("module", [convert, validate, info])
def test_help(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "--help"])
    assert run(module.main, module.__doc__) == 0
    assert f"usage: python -m {module.__name__}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "source= is missing"),
        (("source=x",), "out= is missing"),
        (("source=x", "out=y", "colour=red"), "unknown key colour; expected source=, out=, format="),
        (("source=x", "source=z"), "source is given twice"),
        (("x",), "x is not key=value"),
        (("source=none.npz", "out=y"), "no such file: none.npz"),
        (("source=none.npz", "out=y", "n_experts=many"), "n_experts is many, expected a whole number from 1"),
        (("source=none.npz", "out=y", "top_k=0"), "top_k is 0, expected a whole number from 1"),
        (("source=none.npz", "out=y", "overwrite=yes"), "overwrite is yes, expected true or false"),
        (("source=none.npz", "out=y", "format=zip"), "unknown format zip"),
    ],
)
def test_bad_arguments(words, message):
    with pytest.raises(UserError, match=message):
        convert.main(words)


def test_convert_overwrites_only_when_told_and_only_with_a_good_source(tmp_path, source, capsys):
    out = tmp_path / "t.parquet"
    out.write_text("old")
    words = [f"source={source}", f"out={out}", "overwrite=true"]
    with pytest.raises(UserError, match="out of range"):
        convert.main([*words, "n_experts=3"])
    assert out.read_text() == "old"
    assert convert.main([*words, "top_k=1"]) == 0
    assert read_trace(out).model.top_k == 1
    assert "wrote" in capsys.readouterr().out


def test_convert_says_what_it_dropped(tmp_path, capsys):
    rows = [
        {"request_id": "a", "step_id": step, "layer_id": layer, "expert_ids": [0, 1]}
        for step in range(3)
        for layer in (3, 5)
    ]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, rows[:-1])) + "\nbroken")
    assert convert.main([f"source={source}", f"out={tmp_path / 'out'}", "n_experts=64"]) == 0
    printed = capsys.readouterr().out
    assert "2 MoE layers (layers 3, 5 of the model) x 64 experts" in printed
    assert "dropped  1 lines that are no JSON object, 1 decode tokens that lack a layer" in printed


def test_validate_names_every_bad_request(tmp_path, rich_trace, monkeypatch, capsys):
    path = tmp_path / "t.parquet"
    with monkeypatch.context() as patch:
        patch.setattr("traces.format.check_request", lambda *_: None)
        patch.setattr("traces.storage.check_request", lambda *_: None)
        rich_trace.requests[0].experts[5, 1] = 99
        rich_trace.requests[2].experts[6, 2] = 4
        write_trace(path, rich_trace)
    assert validate.main([str(path)]) == 2
    problems = capsys.readouterr().err.splitlines()
    assert len(problems) == 2
    assert "request 0, token 5, layer 1: expert id 99 is out of range" in problems[0]
    assert "request 20, token 6, layer 2: one gate chose an expert twice" in problems[1]
    with pytest.raises(UserError, match="which file"):
        validate.main([])


def test_info(tmp_path, source, capsys):
    out = tmp_path / "t.parquet"
    convert.main([f"source={source}", f"out={out}"])
    capsys.readouterr()
    assert info.main([str(out), "steps=8"]) == 0
    printed = capsys.readouterr().out
    for title in (
        "popularity",
        "reuse",
        "other request",
        "union",
        "concurrency 1",
        "concurrency 8",
        "Belady",
        "stragglers",
    ):
        assert title in printed
    with pytest.raises(UserError, match="steps is 1, expected a whole number from 2"):
        info.main([str(out), "steps=1"])


def test_info_of_one_request_with_a_prompt(tmp_path, rich_trace, capsys):
    write_trace(tmp_path / "t.parquet", rich_trace)
    assert info.main([str(tmp_path / "t.parquet")]) == 0
    printed = capsys.readouterr().out
    assert "decode tokens 2 to 7, 13 in all; prefill tokens 5" in printed
    assert "concurrency 8" not in printed


def test_info_is_near_the_published_statistics(shared_data, tmp_path, capsys):
    """The same statistics of 703 requests, of which these are 32; the reference implementation is another one."""
    source = shared_data / "gptoss20b_routes" / "routes_512.npz"
    convert.main([f"source={source}", f"out={tmp_path / 't'}"])
    capsys.readouterr()
    info.main([str(tmp_path / "t"), "steps=96"])
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()}
    assert float(rows["hottest 30%"][0]) == pytest.approx(0.582, abs=0.02)
    reuse = [float(cell) for cell in rows["same request"]]
    assert reuse == pytest.approx([0.437, 0.382, 0.364, 0.351, 0.341, 0.336, 0.331], abs=0.02)
    assert float(rows["other request"][0]) == pytest.approx(0.194, abs=0.02)
    assert [float(cell) for cell in rows["union"]] == pytest.approx(
        [0.125, 0.224, 0.376, 0.562, 0.658, 0.727], abs=0.02
    )


def test_arguments():
    assert parse(["a=b=c", "x"], ("a",), positional="file") == {"a": "b=c", "file": "x"}
    assert parse(["dir=1/t.parquet"], ("steps",), positional="file") == {"file": "dir=1/t.parquet"}
    assert whole_number({}, "n") is None
    assert whole_number({"n": "0"}, "n", least=0) == 0

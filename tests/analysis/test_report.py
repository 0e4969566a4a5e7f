"""The page: self-contained, all figures or why not, mismatches first, the same bytes again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from analysis.__main__ import main
from tests.analysis.figure_world import Runs


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    runs = Runs(tmp_path / "runs" / "fig8")
    for k, system in enumerate(("llama_cpp", "finemoe", "bevy")):
        runs.add(system, 10.0 + k, routing={"source": "synthetic router, preset <x>"},
                 device_constants={"sources": {"link.bytes_per_s": "fitted", "link.readers": "measured"}})  # fmt: skip
    runs.fail("specmd", "no order today")
    return tmp_path / "runs"


def test_one_page_with_all_that_it_shows(studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(studies), f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "fig8: 3 runs" in printed
    assert "fig9: " in printed
    page = out.read_text()
    assert page.count('src="data:image/png;base64,') == 1
    assert not re.search(r"(src|href)=\"(?!data:|#)", page), "nothing is loaded from elsewhere"
    for figure in (2, 4, 5, 8, 9, 10, 11, 12, 13):
        assert f'id="fig{figure}"' in page
    assert "no order today" in page
    assert "preset &lt;x&gt;" in page
    assert "6.62e+09" in page
    assert "Unlike the paper: " in page
    body = page[page.index("<tbody>") :]
    assert body.index('class="NO"') < body.index('class="yes"'), "mismatches first"
    assert main(["report", str(studies), f"out={out}"]) == 0
    assert out.read_text() == page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}"], "has no finished study of a figure at scale=paper"),
        (["{runs}", "scale=huge"], "expected one of paper, smoke"),
        (["{runs}", "scale=smoke"], "has no finished study of a figure at scale=smoke"),
        (["{runs}", "{empty}"], "expected one folder"),
    ],
)
def test_bad_input_writes_nothing(
    studies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    out = tmp_path / "page.html"
    given = [argument.format(empty=tmp_path / "empty", runs=studies) for argument in arguments]
    assert main(["report", *given, f"out={out}"]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()

"""The numbers in README.md and docs/figures.md: their blocks alone change, and the same runs give the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from analysis.docs import figure_of, replaced, write
from analysis.figures import NAMES
from analysis.paper_table import rows
from policies.core.types import UserError
from tests.analysis.figure_world import Runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/figures.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    runs = Runs(tmp_path / "runs" / "fig8")
    for k, system in enumerate(("llama_cpp", "finemoe", "specmd", "bevy")):
        runs.add(system, 10.0 + k)
    return tmp_path


def outside(text: str, *names: str) -> str:
    for name in names:
        text = replaced(text, name, "", Path("page"))
    return text


def test_the_blocks_of_finished_figures_change_and_nothing_else(checkout: Path) -> None:
    before = {name: (checkout / name).read_text() for name in ("README.md", "docs/figures.md")}
    (line,) = write(checkout / "runs", checkout)
    assert line.startswith("fig8: ")
    page, readme = (checkout / "docs/figures.md").read_text(), (checkout / "README.md").read_text()
    assert outside(page, "fig8", "others") == outside(before["docs/figures.md"], "fig8", "others")
    assert outside(readme, "figures") == outside(before["README.md"], "figures")
    assert "| cache 0.3 | `bevy_over_fastest` | 1.01 to 1.38 | 1.08 | yes |" in page  # 13 over 12
    assert "`bevy_over_fastest_mean` 1.26 +- 0.05 *; **1.08**" in readme
    assert (checkout / "docs/fig8.png").stat().st_size > 1000
    list(write(checkout / "runs", checkout))
    assert (checkout / "docs/figures.md").read_text() == page


def test_every_number_that_names_a_figure_has_a_place(checkout: Path) -> None:
    places = {figure_of(row) for row in rows([checkout / "runs"])}
    assert places == {None, *NAMES}


def test_what_cannot_be_written_is_one_line(checkout: Path) -> None:
    with pytest.raises(UserError, match="has no finished study of a figure"):
        list(write(checkout / "docs", checkout))
    page = checkout / "docs/figures.md"
    text = page.read_text().replace("<!-- end of fig8 -->", "")
    page.write_text(text)
    with pytest.raises(UserError, match=r"needs the lines <!-- fig8: .* once each"):
        list(write(checkout / "runs", checkout))
    assert page.read_text() == text

"""``python -m sim experiment=...`` on a tiny model: all figures and their report, and a broken policy in one cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.__main__ import main as analysis
from analysis.figures import NAMES, OF_RUNS
from sim.__main__ import figure_2, main

TINY = (
    "model=olmoe_1b_7b",
    "model.n_layers=6",
    "model.n_experts=16",
    "model.top_k=2",
    "model.attention=[{kind:full,layers:6,heads:16,kv_heads:16,head_dim:128}]",
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_figure_from_one_command_and_the_page_from_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "experiment=all_figures", "scale=smoke"]) == 0
    printed = capsys.readouterr().out
    for name in OF_RUNS:
        folder = Path("runs") / f"{name}_smoke"
        for suffix in ("png", "svg", "csv"):
            assert (folder / f"{name}.{suffix}").stat().st_size > 50
        assert f"figure: {folder}/{name}.png" in printed
    assert (Path("runs") / "precision_smoke" / "fig2.svg").stat().st_size > 50
    assert analysis(["report", "scale=smoke"]) == 0
    assert Path("report.html").read_text().count("data:image/png") == len(NAMES)


def test_figure_2_leaves_out_what_is_for_runs_of_a_system() -> None:
    """Narrowed to a system or with another prefetch, all figures still have this one."""
    assert (
        figure_2([*TINY, "experiment=all_figures", "scale=smoke", "system=bevy", "prefetch=none", "seed=1"], None) == 0
    )
    assert (Path("runs") / "precision_smoke" / "precision.csv").is_file()


def test_a_broken_policy_is_a_marked_gap_and_a_failed_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object, job: object) -> tuple[int, ...]:
        raise RuntimeError("no order today")

    command = [*TINY, "experiment=fig12", "scale=smoke", "concurrency=4", "steps=4", "warmup=2", "workers=1"]
    with monkeypatch.context() as patch:
        patch.setattr("policies.schedule.Fifo.key", broken)
        assert main([*command, "system=bevy,bevy_fifo"]) == 1
    captured = capsys.readouterr()
    assert "missing: bevy_fifo-" in captured.out
    assert ": RuntimeError: no order today" in captured.err
    picture = Path("runs/fig12_smoke/fig12.svg")
    assert "no result" in picture.read_text()

    assert main([*command, "system=bevy,bevy_fifo", "--cells", "failed"]) == 0
    assert "of 2 cells 1 have failed before" in capsys.readouterr().err
    assert "no result" not in picture.read_text()

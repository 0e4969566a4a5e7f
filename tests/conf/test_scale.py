"""The paper's figures as experiments: their settings at both scales, and all of them in one sweep."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from analysis.figures import OF_RUNS
from conf import compose
from conf.cells import cell_name, check, resolved
from conf.scale import study_of
from policies.core.types import UserError

FOLDER = compose.FOLDER / "experiment"


def settings(*overrides: str) -> list[dict[str, Any]]:
    with compose.composing():
        return [resolved(point.config) for point in compose.expand(overrides)]


@cache
def lists(name: str, scale: str) -> tuple[Any, dict[str, str]]:
    """The first cell's config and the lists of an experiment, without composing every cell."""
    with compose.composing():
        config = hydra.compose("config", [f"experiment={name}", f"scale={scale}"], return_hydra_config=True)
    return config, dict(OmegaConf.to_container(config.hydra.sweeper.params, resolve=True))  # type: ignore[call-overload]


@pytest.mark.parametrize("name", OF_RUNS)
def test_the_papers_settings(name: str) -> None:
    config, _ = lists(name, "paper")
    assert (config.steps, config.warmup, config.study) == (512, 256, name)  # paper 5.1
    comment = (FOLDER / f"{name}.yaml").read_text().splitlines()[1:3]
    assert comment[0].startswith(f"# Figure {name[3:]}: ")
    assert comment[1].startswith("# Unlike the paper: ")


@pytest.mark.parametrize("name", OF_RUNS)
def test_the_small_scale_is_small(name: str) -> None:
    config, found = lists(name, "smoke")
    assert config.steps <= 24
    assert config.study == study_of(name, "smoke") == f"{name}_smoke"
    cells = 1
    for values in found.values():
        cells *= len(values.split(","))
    assert cells <= 16


def test_figure_8_has_all_cells_of_the_paper() -> None:
    _, found = lists("fig8", "paper")
    assert {key: values.count(",") + 1 for key, values in found.items()} == {
        "model": 2,
        "workload": 2,
        "device": 2,
        "concurrency": 5,
        "system": 4,
    }
    assert found["concurrency"] == "2,4,8,12,16"


def test_figure_9_goes_from_10_to_70_percent() -> None:
    config, found = lists("fig9", "paper")
    assert (config.workload.name, config.concurrency) == ("chat", 8)
    assert found["cache.fraction"] == "0.1,0.2,0.3,0.4,0.5,0.6,0.7"


def test_figures_4_and_11_are_in_one_setting() -> None:
    four, eleven = lists("fig4", "paper")[0], lists("fig11", "paper")[0]
    for key in ("concurrency", "model", "device", "workload", "steps"):
        assert four[key] == eleven[key]


def test_an_experiment_of_experiments_stands_for_each_of_them(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "both.yaml").write_text(
        "# @package _global_\nhydra:\n  sweeper:\n    params:\n      experiment: fig5,fig13\n"
    )
    with compose.composing(tmp_path) as more:
        points = list(compose.expand([*more, "experiment=both", "scale=smoke", "seed=4"]))
    found = [(p.config.study, p.config.system.name, p.config.concurrency, p.config.seed) for p in points]
    assert found == [
        ("fig5_smoke", "llama_cpp_lfu", 4, 4),
        ("fig13_smoke", "bevy", 2, 4),
        ("fig13_smoke", "bevy_prefetch", 2, 4),
        ("fig13_smoke", "bevy", 4, 4),
        ("fig13_smoke", "bevy_prefetch", 4, 4),
    ]
    assert not any("experiment=both" in point.overrides for point in points)


def test_all_figures_lists_every_figure() -> None:
    node: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / "all_figures.yaml"))
    assert tuple(node["hydra"]["sweeper"]["params"]["experiment"].split(",")) == OF_RUNS


def test_a_scale_decides_only_through_what_it_sets() -> None:
    (small,) = settings("experiment=fig5", "scale=smoke")
    (by_hand,) = settings("experiment=fig5", "seed=0", "steps=24", "warmup=8", "study=mine")
    assert cell_name(small) == cell_name(by_hand)


def test_a_third_scale_is_refused() -> None:
    (found,) = settings("experiment=fig5", "seed=0", "scale=huge")
    with pytest.raises(UserError, match="scale=huge: expected one of paper, smoke"):
        check(found)

"""Composition: every option and experiment, lists in their order, one-line errors."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest

from conf import compose
from conf.cells import check, resolved
from policies.core.types import UserError

GROUPS = ("model", "device", "workload", "schedule", "cache", "prefetch", "system")
OPTIONS = {group: [path.stem for path in sorted((compose.FOLDER / group).glob("*.yaml"))] for group in GROUPS}
EXPERIMENTS = [path.stem for path in sorted((compose.FOLDER / "experiment").glob("*.yaml"))]


def points(*overrides: str, config_dir: Path | None = None) -> list[compose.Point]:
    with compose.composing(config_dir) as more:
        return list(compose.expand([*more, *overrides]))


def systems(*overrides: str) -> list[str]:
    return [point.config.system.name for point in points(*overrides)]


@pytest.mark.parametrize("number", range(max(len(options) for options in OPTIONS.values())))
def test_every_option_composes_and_resolves(number: int) -> None:
    # Each option is there in one of the mixtures; all of them at once would take half a minute.
    chosen = {group: options[number % len(options)] for group, options in OPTIONS.items()}
    (point,) = points(*(f"{group}={name}" for group, name in chosen.items()))
    settings = resolved(point.config)
    check(settings)
    for group in ("system", "model", "device", "workload"):
        assert settings[group]["name"] == chosen[group]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    with compose.composing():
        check(resolved(next(compose.expand([f"experiment={name}"])).config))


def test_without_arguments_nine_systems() -> None:
    assert systems() == [
        "llama_cpp",
        "llama_cpp_lfu",
        "static_4_4",
        "static_2_2_2_2",
        "static_1_1_1_1_1_1_1_1",
        "bevy",
        "bevy_fifo",
        "bevy_global_srtf",
        "bevy_both",
    ]


def test_the_lists_of_a_sweep_by_setting() -> None:
    with compose.composing() as more:
        kept, varied = compose.lists([*more, "experiment=search", "steps=8", "cache=lru,lfu", "concurrency=range(2,5)"])
    assert kept == ["experiment=search", "steps=8"]
    assert list(varied)[:2] == ["cache", "concurrency"]
    assert varied["cache"] == ["lru", "lfu"]
    assert varied["concurrency"] == ["2", "3", "4"]
    assert varied["prefetch.policy.max_in_flight"] == ["2", "1", "4", "8"]
    assert varied["seed"] == ["0", "1"]


def test_command_line_replaces_the_experiments_list() -> None:
    assert systems("system=bevy,static_3_3,llama_cpp") == ["bevy", "static_3_3", "llama_cpp"]


@pytest.mark.parametrize(
    ("concurrency", "expected"),
    [
        (1, "static_1"),
        (2, "static_1_1,static_2"),
        (3, "static_2_1,static_1_1_1"),
        (6, "static_3_3,static_2_2_2,static_1_1_1_1_1_1"),
        (7, "static_4_3,static_2_2_2_1,static_1_1_1_1_1_1_1"),
    ],
)
def test_static_groupings(concurrency: int, expected: str) -> None:
    assert compose.static_groupings(concurrency) == expected


def test_any_static_system_has_sizes_lfu_and_its_name() -> None:
    (point,) = points("system=static_2_2_1_1", "concurrency=6")
    assert point.config.system.name == "static_2_2_1_1"
    assert list(point.config.schedule.partition.sizes) == [2, 2, 1, 1]
    assert point.config.cache.eviction._target_ == "policies.eviction.LFU"


def test_an_experiment_of_ones_own_expands_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    lists = "concurrency: 1,2\n      system: bevy,${static_groupings:${concurrency}}\n"
    header = "# @package _global_\ndefaults:\n  - override /system: static_3_3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(
        f"{header}seed: 7\nhydra:\n  sweeper:\n    params:\n      {lists}"
    )

    def found(*overrides: str) -> list[tuple[int, str, int]]:
        configs = [point.config for point in points("experiment=mine", *overrides, config_dir=tmp_path)]
        return [(config.concurrency, config.system.name, config.seed) for config in configs]

    assert found() == [(1, "bevy", 7), (1, "static_1", 7), (2, "bevy", 7), (2, "static_1_1", 7), (2, "static_2", 7)]
    assert found("concurrency=3", "seed=8") == [(3, "bevy", 8), (3, "static_2_1", 8), (3, "static_1_1_1", 8)]
    assert found("system=static_3_1", "concurrency=4") == [(4, "static_3_1", 7)]


def test_laying_values_over_a_composed_choice_is_what_hydra_does() -> None:
    given = ["system=bevy,llama_cpp", "concurrency=2,4", "cache.fraction=0.3,0.5", "workload.context_tokens=[1,2]"]
    with compose.composing():
        found = list(compose.expand(["experiment=fig8", "scale=smoke", *given]))
        assert len(found) == 2 * 2 * 2 * 2  # and two devices
        for point in found:
            whole = hydra.compose("config", list(point.overrides), return_hydra_config=True)
            assert resolved(point.config) == resolved(whole)
            assert point.config.hydra.overrides == whole.hydra.overrides


def test_a_strangers_policy_is_a_yaml_in_a_folder_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "mine.yaml").write_text("fraction: 0.5\nslots: null\neviction: {_target_: my.Policy}\n")
    (point,) = points("system=bevy", "cache=mine", config_dir=tmp_path)
    assert point.config.cache.eviction._target_ == "my.Policy"
    with pytest.raises(UserError, match=r"--config-dir .* is no folder"):
        points(config_dir=tmp_path / "absent")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("system=bevvy", r"no such system \(did you mean bevy\?\); choose one of .*\bbevy, .*static_<sizes>"),
        ("system=bevy,nope", "system=nope: there is no such system"),
        ("system=static_3_x", "there is no such system"),
        ("system=static_0_3", "static_0_3 is no static grouping"),
        ("experiment=nope", "no such experiment; choose one of all_figures, beyond, compare, fig10"),
        ("hydra/launcher=nope", "choose one of basic, cluster, joblib"),
        ("cache.fractoin=0.3", r"cache.fractoin: there is no such setting \(did you mean fraction\?\); cache has"),
        ("concurency=2,4", r"did you mean concurrency\?\); the config has cache, check"),
        ("bevy", "bevy: not of the form key=value"),
        ("cache={a: 3", "not of the form key=value"),
        ("=3", "must be a string"),
        ("system=[bevy,nope]", "Could not load 'system/nope'"),
        ("hydra/launcher=basic,joblib", "Hydra's own settings cannot be swept"),
        ("seed=interval(0,1)", "does not support sweep type"),
    ],
)
def test_errors_are_one_line_that_helps(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        points(override)
    assert "\n" not in str(caught.value)

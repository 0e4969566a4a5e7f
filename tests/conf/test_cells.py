"""Cells: what their names depend on, which settings no run can have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from conf import compose
from conf.cells import cell_name, check, recorded, resolved
from policies.core.types import UserError


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    with compose.composing():
        (point,) = compose.expand(["system=bevy"])
    return resolved(point.config)


def changed(base: dict[str, Any], **values: Any) -> dict[str, Any]:
    settings = copy.deepcopy(base)
    for key, value in values.items():
        path = key.split("__")
        node = settings
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value
    return settings


def test_name_is_readable_and_a_file_name(base: dict[str, Any]) -> None:
    slug, _, digits = cell_name(base).rpartition("-")
    assert slug == "bevy-gemma4_26b_a4b-m6-agentic-c8-0.3-s0"
    assert len(digits) == 12
    assert "-40slots-" in cell_name(changed(base, cache__slots=40))
    assert "/" not in cell_name(changed(base, system__name="a/b {c}"))
    assert len(cell_name(changed(base, system__name="x" * 500))) < 140


def test_name_ignores_where_and_how(base: dict[str, Any]) -> None:
    other = changed(base, runs="/elsewhere", workers=1, force=True, progress=False, study="other")
    assert cell_name(other) == cell_name(base)


@pytest.mark.parametrize("values", [{"seed": 1}, {"steps": 97}, {"cache__eviction__count": "decay"}, {"check": True}])
def test_name_depends_on_what_decides_the_result(base: dict[str, Any], values: dict[str, Any]) -> None:
    assert cell_name(changed(base, **values)) != cell_name(base)


def test_name_does_not_depend_on_the_order_of_keys(base: dict[str, Any]) -> None:
    assert cell_name(dict(reversed(base.items()))) == cell_name(base)


def test_name_follows_the_content_of_a_trace(base: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace"
    settings = changed(base, workload__path=str(path))
    with pytest.raises(UserError, match=r"workload.path=.* cannot be read \(No such file"):
        cell_name(settings)
    path.write_bytes(b"one")
    first = cell_name(settings)
    path.write_bytes(b"another")
    assert cell_name(settings) != first


def test_record_keeps_neither_place_nor_study(base: dict[str, Any]) -> None:
    kept = recorded(changed(base, runs="/elsewhere", workers=3))
    assert not {"runs", "workers", "study"} & kept.keys()
    assert kept == recorded(changed(base, study="other"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"concurrency": 0}, "concurrency=0: expected a whole number of at least 1"),
        ({"concurrency": 2.5}, "concurrency=2.5"),
        ({"concurrency": "two"}, "concurrency=two"),
        ({"concurrency": True}, "concurrency=True"),
        ({"steps": 0}, "steps=0"),
        ({"warmup": -1}, "warmup=-1: expected a whole number of at least 0"),
        ({"steps": 10, "warmup": 10}, "warmup=10 leaves nothing of steps=10"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": None}, "seed=None"),
        ({"cache__fraction": 0}, "cache.fraction=0"),
        ({"cache__fraction": 1.01}, "cache.fraction=1.01: expected a number above 0 and up to 1"),
        ({"cache__fraction": float("nan")}, "cache.fraction=nan"),
        ({"cache__slots": 0}, "cache.slots=0"),
        ({"workers": 0}, "workers=0"),
        ({"check": "maybe"}, "check=maybe: expected true or false"),
        ({"study": "../x"}, "study=../x: expected a folder name"),
        ({"cache": None}, "cache.fraction is missing"),
        ({"device__label": float("inf")}, "device.label=inf: expected a finite number"),
        ({"workload__context_tokens": [1, float("nan")]}, "workload.context_tokens.1=nan: expected a finite number"),
    ],
)
def test_impossible_settings(base: dict[str, Any], values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check(changed(base, **values))
    assert says in str(caught.value)


def test_a_value_that_must_be_given_and_one_that_points_nowhere() -> None:
    with pytest.raises(UserError, match="path has no value; give path="):
        resolved(OmegaConf.create({"path": "???"}))
    with pytest.raises(UserError, match="a: Interpolation key 'nope' not found"):
        resolved(OmegaConf.create({"a": "${nope}"}))

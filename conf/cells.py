"""A cell: one run of a sweep, known by what decides its result.

Owns the resolved settings, their checks, their hash and the cell's name.  Knows nothing of policies, models or
devices beyond their names, and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.compose import explain
from conf.paths import located
from conf.scale import SCALES
from policies.core.types import UserError

NOT_RESULTS = ("study", "runs", "workers", "force", "progress", "scale")
"""Settings that change where or how a cell runs, never what comes out of it."""

_LONGEST_SLUG = 120


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: its name, its run directory, the overrides that give it, its resolved settings."""

    name: str
    folder: Path
    overrides: tuple[str, ...]
    settings: Mapping[str, Any]


def resolved(config: DictConfig) -> dict[str, Any]:
    """All settings with interpolations replaced by their values, without Hydra's own.

    Raises UserError for a value that is missing or points to nothing.
    """
    own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        settings = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} has no value; give {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}


def recorded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run directory keeps: equal runs keep equal ones, whatever machine or study they are of."""
    return {key: value for key, value in settings.items() if key not in NOT_RESULTS}


def cell_name(settings: Mapping[str, Any]) -> str:
    """A readable slug and 12 digits of the hash of everything that decides the result.

    Files that the result depends on (a routing trace, what a predictor learns from) count by their content too, so
    that a changed file is another cell.
    """
    path = settings["workload"].get("path")
    content = _digest("workload.path", path) if path else None
    prefetch = settings.get("prefetch") or {}
    files = {f"prefetch.{node}.path": (prefetch.get(node) or {}).get("path") for node in ("learn", "predictor")}
    learnt = [_digest(key, file) for key, file in files.items() if file]
    text = json.dumps([recorded(settings), content, *learnt], sort_keys=True, separators=(",", ":"), allow_nan=False)
    cache = settings["cache"]
    size = f"{cache['slots']}slots" if cache["slots"] is not None else f"{cache['fraction']:g}"
    names = [str(settings[group]["name"]) for group in ("system", "model", "device", "workload")]
    slug = "-".join([*names, f"c{settings['concurrency']}", size, f"s{settings['seed']}"])
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", slug)[:_LONGEST_SLUG]
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def check(settings: Mapping[str, Any]) -> None:
    """Raise UserError for the first setting that no run can have."""
    _whole(settings, "concurrency", at_least=1)
    steps = _whole(settings, "steps", at_least=1)
    if (warmup := _whole(settings, "warmup", at_least=0)) >= steps:
        raise UserError(f"warmup={warmup} leaves nothing of steps={steps} to measure; raise steps or lower warmup")
    _whole(settings, "seed", at_least=0)
    fraction = _value(settings, "cache.fraction")
    if _value(settings, "cache.slots") is not None:
        _whole(settings, "cache.slots", at_least=1)
    elif isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise UserError(f"cache.fraction={fraction}: expected a number above 0 and up to 1, such as 0.3")
    if _value(settings, "workers") is not None:
        _whole(settings, "workers", at_least=1)
    for key in ("strict", "check", "force", "progress"):
        if not isinstance(_value(settings, key), bool):
            raise UserError(f"{key}={_value(settings, key)}: expected true or false")
    if _value(settings, "scale") not in SCALES:
        raise UserError(f"scale={_value(settings, 'scale')}: expected one of {', '.join(SCALES)}")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", str(_value(settings, "study"))):
        raise UserError(f"study={_value(settings, 'study')}: expected a folder name of letters, digits, '_', '.', '-'")
    for group in ("system", "model", "device", "workload"):
        _value(settings, f"{group}.name")
    _finite(settings, "")


def _value(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise UserError(f"{key} is missing from the config; do not delete it")
        value = value[part]
    return value


def _finite(node: Any, key: str) -> None:
    if isinstance(node, float) and not math.isfinite(node):
        raise UserError(f"{key}={node}: expected a finite number")
    if isinstance(node, Mapping | list):
        for part, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            _finite(value, f"{key}.{part}" if key else str(part))


def _whole(settings: Mapping[str, Any], key: str, at_least: int) -> int:
    value = _value(settings, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(f"{key}={value}: expected a whole number of at least {at_least}")
    return value


def _digest(key: str, file: object) -> str:
    path = located(str(file))
    try:
        stamp = path.stat()
        return _digest_of(path, stamp.st_mtime_ns, stamp.st_size)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read ({error.strerror}); give the path of a file") from error


@lru_cache
def _digest_of(path: Path, _mtime_ns: int, _size_bytes: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

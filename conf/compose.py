"""Composition: a command line and an experiment's lists become the configs of the cells.

Owns the search path (with ``system=static_<sizes>`` for any sizes), the order in which lists are expanded and
the one-line form of Hydra's errors.  Knows nothing of what a config means.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from conf.scale import scaled
from policies.build import static_system
from policies.core.types import UserError

FOLDER = Path(__file__).resolve().parent
VERSION_BASE = "1.3"


def static_groupings(concurrency: int) -> str:
    """The static systems worth comparing at a concurrency: halves, pairs and singles, each once.

    8 requests give ``static_4_4,static_2_2_2_2,static_1_1_1_1_1_1_1_1``.
    """
    if not isinstance(concurrency, int) or concurrency < 1:
        return "static_1"  # no such run exists, which the check of its settings says better than an error here
    requests = concurrency
    halves = [(requests + 1) // 2, requests // 2]
    pairs = [2] * (requests // 2) + [1] * (requests % 2)
    groupings = ("static_" + "_".join(str(size) for size in sizes if size) for sizes in (halves, pairs, [1] * requests))
    return ",".join(dict.fromkeys(groupings))


# A resolver lives in the process, so a worker that unpickles a task must get it with this import.
OmegaConf.register_new_resolver("static_groupings", static_groupings, replace=True)
OmegaConf.register_new_resolver("scaled", scaled, replace=True)


class StaticSystems(ConfigSource):
    """Answers for ``system/static_<sizes>`` of any sizes, as if each had a file."""

    @staticmethod
    def scheme() -> str:
        """The search path entry is ``static://``."""
        return "static"

    def available(self) -> bool:
        """Always there."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Adds options to the group ``system`` that are not listed one by one."""
        return False

    def is_config(self, config_path: str) -> bool:
        """True for ``system/static_3_3`` and the like."""
        return re.fullmatch(r"system/static(_\d+)+(\.yaml)?", config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """The bundle of one static grouping."""
        name = Path(config_path).name.removesuffix(".yaml")
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(static_system(name)),
            header={"package": "_global_"},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing: there is no end of sizes."""
        return []


class StaticSystemsPath(SearchPathPlugin):
    """Puts ``static://`` on the search path, after the files."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the source."""
        search_path.append(provider="static systems", path="static://")


def register_sources() -> None:
    """Make Hydra know ``static://``; to be called before it is started.  Twice does no harm."""
    for plugin in (StaticSystems, StaticSystemsPath):
        Plugins.instance().register(plugin)


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a sweep: the overrides that lead to it, and the whole config with Hydra's own node."""

    overrides: tuple[str, ...]
    config: DictConfig


@contextmanager
def composing(more: Path | None = None) -> Iterator[list[str]]:
    """Hydra over this folder, as ``@hydra.main`` would set it up.

    ``more``: a folder with further options; the overrides that make Hydra look there are what is yielded.
    """
    if more is not None and not more.is_dir():
        raise UserError(f"--config-dir {more} is no folder; give one that holds folders such as cache/ or system/")
    register_sources()
    with hydra.initialize_config_dir(str(FOLDER), job_name="run", version_base=VERSION_BASE):
        yield [] if more is None else [f"hydra.searchpath=['file://{more.resolve()}']"]


def expand(arguments: Sequence[str]) -> Iterator[Point]:
    """All points of a sweep, within ``composing()``.

    First the lists of the command line (the last one varies fastest), then those of the config's
    ``hydra.sweeper.params`` that the command line does not mention, in their order there.  Each list is resolved
    after the earlier ones have their values, so an experiment may derive one from another.  An experiment that lists
    ``experiment`` stands for those it lists.

    Raises UserError with one line for unknown options, unknown keys and overrides that do not parse.
    """
    compose = _Composer()
    with _one_line():
        given = OverridesParser.create().parse_overrides(list(arguments))
        for override in given:
            if override.is_hydra_override() and override.is_sweep_override():
                raise UserError(f"{override.input_line}: Hydra's own settings cannot be swept; give one value")
        for overrides in BasicSweeper.split_arguments(given, None)[0]:
            yield from _expand(overrides, compose)


def lists(arguments: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """What a sweep keeps, and the values of each setting that it varies, in the order of ``expand``.

    The lists of the config must not depend on each other.  Raises UserError as ``expand`` does.
    """
    with _one_line():
        given = OverridesParser.create().parse_overrides(list(arguments))
        kept = [str(override.input_line) for override in given if not override.is_sweep_override()]
        varied = [override for override in given if override.is_sweep_override()]
        params = OmegaConf.select(_Composer()(kept), "hydra.sweeper.params") or {}
        mentioned = {str(override.key_or_group) for override in given}
        texts = [f"{key}={params[key]}" for key in params if key not in mentioned or key == "experiment"]
        varied += OverridesParser.create().parse_overrides(texts)
        points = {override.key_or_group: BasicSweeper.split_arguments([override], None)[0] for override in varied}
        return kept, {key: [point.partition("=")[2] for (point,) in each] for key, each in points.items()}


def _expand(overrides: list[str], compose: _Composer) -> Iterator[Point]:
    config = compose(overrides)
    mentioned = {override.lstrip("+~").split("=", 1)[0] for override in overrides}
    lists = OmegaConf.select(config, "hydra.sweeper.params") or {}
    for key in lists:
        if key not in mentioned or key == "experiment":
            values = OverridesParser.create().parse_overrides([f"{key}={lists[key]}"])
            others = [
                override for override in overrides if key != "experiment" or not override.startswith("experiment=")
            ]
            for (override,) in BasicSweeper.split_arguments(values, None)[0]:
                yield from _expand([*others, override], compose)
            return
    yield Point(tuple(overrides), config)


class _Composer:
    """Composes each choice of options once, and lays values (``concurrency=4``, ``cache.fraction=0.5``) over a copy.

    Hydra does the same for one config at a time: first the options, then the values in their order.
    """

    def __init__(self) -> None:
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._plain: set[str] = set()  # settings that are neither a group nor a mapping

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The whole config of these overrides, with Hydra's own node."""
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        if not self._composed:
            first = self._compose(tuple(overrides))
            self._plain = {str(key) for key in first if not isinstance(first._get_node(key), DictConfig)}
            return copy.deepcopy(first)
        values: list[Override] = []
        if all(override.type is OverrideType.CHANGE for override in parsed):
            values = [override for override in parsed if self._is_value(override)]
        lines = [str(override.input_line) for override in values]
        config = copy.deepcopy(self._compose(tuple(line for line in overrides if line not in lines)))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        config.hydra.overrides.task = [line for line in overrides if not line.startswith("hydra")]
        return config

    def _is_value(self, override: Override) -> bool:
        key = override.key_or_group
        return key in self._plain or ("." in key and not override.is_hydra_override() and override.package is None)

    def _compose(self, overrides: tuple[str, ...]) -> DictConfig:
        if overrides not in self._composed:
            self._composed[overrides] = hydra.compose("config", list(overrides), return_hydra_config=True)
        return self._composed[overrides]


class Planned(ConfigLoaderImpl):
    """Gives a launcher's workers the settings of their jobs as they were resolved, so that none composes again.

    ``settings``: by the overrides of a job.
    """

    def __init__(self, search_path: ConfigSearchPath, settings: Mapping[tuple[str, ...], Mapping[str, Any]]) -> None:
        super().__init__(search_path)
        self._settings = {overrides: json.dumps(each) for overrides, each in settings.items()}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The config of a job, with Hydra's own node."""
        config: DictConfig = OmegaConf.create(json.loads(self._settings[tuple(sweep_overrides)]))
        config.hydra = copy.deepcopy(master_config.hydra)
        config.hydra.overrides.task = list(sweep_overrides)
        return config


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(explain(error)) from error


def explain(error: Exception) -> str:
    """What Hydra or OmegaConf complains about, as one line with the names that would work."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = ", ".join(error.options) + (", static_<sizes> such as static_3_3" if group == "system" else "")
        return f"{group}={name}: there is no such {group}{_guess(name, error.options)}; choose one of {options}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form key=value ({_flat(error.message.splitlines()[0])})"
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and isinstance(cause.parent_node, DictConfig):
        keys = sorted(str(key) for key in cause.parent_node if key != "hydra")
        where = str(cause.full_key).rpartition(".")[0] or "the config"
        guess = _guess(str(cause.key), keys)
        return f"{cause.full_key}: there is no such setting{guess}; {where} has {', '.join(keys)}"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return f"{cause.full_key}: {str(cause).splitlines()[0]}"
    return _flat((str(error) or str(cause)).partition("Config search path")[0])


def _guess(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _flat(text: str) -> str:
    return " ".join(text.split())

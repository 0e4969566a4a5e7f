"""From a composed configuration to policies: the only place that instantiates them.

Owns the size of the cache in slots and the content of the static-grouping systems.  Knows no device
and no trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from policies.core.core import DecisionCore
from policies.core.protocols import CoExecution, EvictionPolicy
from policies.core.types import CapacityError, ModelSpec, UserError
from policies.prefetch import Predictor
from policies.schedule import Sizes

_OPTIONS = Path(__file__).resolve().parents[1] / "conf"


def build_core(
    config: DictConfig | Mapping[str, Any],
    model: ModelSpec,
    fetch_slots: int,
    host_times: Mapping[str, float] | None = None,
) -> DecisionCore:
    """The decision core of one run, from ``schedule``, ``cache``, ``prefetch``, ``concurrency`` and ``strict``.

    ``fetch_slots``: reads that the device keeps in flight.  ``host_times``: the device's ``fetch_s``, ``expert_s``,
    ``move_s`` and ``token_share`` for ``schedule.host``; None where no CPU computes experts.
    Raises UserError (one line) for an unknown or misconfigured policy and CapacityError for a cache that is too small.
    """
    root = _root(config)
    slots = cache_slots(root, model)
    eviction = _make(root, "cache.eviction", "victim", slots)
    if not isinstance(eviction, EvictionPolicy):
        raise UserError(
            f"cache.eviction is a {type(eviction).__name__}, expected a subclass of "
            f"policies.core.protocols.EvictionPolicy; conf/cache has {_options('cache')}"
        )
    partition = _make(root, "schedule.partition", "units")
    concurrency, compute_slots = (
        OmegaConf.select(root, "concurrency"),
        OmegaConf.select(root, "schedule.compute_slots", default=1),
    )
    if isinstance(partition, Sizes) and concurrency is not None and sum(partition.sizes) != concurrency:
        raise UserError(
            f"static groups of {list(partition.sizes)} hold {sum(partition.sizes)} requests but concurrency is "
            f"{concurrency}; make the sizes add up to the concurrency"
        )
    if isinstance(compute_slots, bool) or not isinstance(compute_slots, int) or compute_slots < 1:
        raise UserError(
            f"schedule.compute_slots is {compute_slots}, expected a whole number of at least 1 batch in flight"
        )
    return DecisionCore(
        model,
        slots,
        eviction,
        partition=partition,
        batching=_batching(root, partition),
        compute_order=_make(root, "schedule.compute_order", "key"),
        fetch_order=_make(root, "schedule.fetch_order", "key"),
        prefetch=_make(root, "prefetch.policy", "next") if OmegaConf.select(root, "prefetch.policy") else None,
        host=_host(root, host_times),
        fetch_slots=fetch_slots,
        compute_slots=compute_slots,
        strict=bool(OmegaConf.select(root, "strict", default=False)),
    )


def build_predictor(config: DictConfig | Mapping[str, Any], model: ModelSpec) -> Predictor | None:
    """The predictor of one run, or None.  Raises UserError as ``build_core`` does."""
    root = _root(config)
    if not OmegaConf.select(root, "prefetch.predictor"):
        return None
    predictor: Predictor = _make(root, "prefetch.predictor", "predict")
    return predictor


def cache_slots(config: DictConfig | Mapping[str, Any], model: ModelSpec) -> int:
    """Slots of the expert cache: ``cache.slots``, or ``cache.fraction`` of all experts, rounded down.

    Raises UserError for values that are no size, CapacityError below one request's top-k.
    """
    root = _root(config)
    slots, fraction = OmegaConf.select(root, "cache.slots"), OmegaConf.select(root, "cache.fraction")
    smallest = f"use at least cache.slots={model.top_k} or cache.fraction={_round_up(model.top_k, model.n_total)}"
    if slots is not None:
        if isinstance(slots, bool) or not isinstance(slots, int) or not 0 < slots <= model.n_total:
            raise UserError(
                f"cache.slots is {slots}, expected a whole number from {model.top_k} (one request's experts) to "
                f"{model.n_total} (all experts of {model.name})"
            )
        asked = f"cache.slots={slots}"
    else:
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not number or not 0 < fraction <= 1:  # NaN fails both comparisons
            raise UserError(f"cache.fraction is {fraction}, expected a number above 0 and at most 1; {smallest}")
        slots = int(Fraction(repr(fraction)) * model.n_total)  # exact: 0.29 of 100 experts is 29, not 28.99...
        asked = f"cache.fraction={fraction} of {model.n_total} experts"
    if slots < model.top_k:
        raise CapacityError(
            f"{asked} gives {slots} cache slots and one request of {model.name} needs its top-{model.top_k}; {smallest}"
        )
    return slots


def static_system(name: str) -> dict[str, Any]:
    """The content of ``system/<name>`` for any name of the form ``static_4_4``, as a ``_global_`` package.

    Raises UserError for another name or a size below one.
    """
    if not re.fullmatch(r"static(_[1-9][0-9]*)+", name):
        raise UserError(f"system {name} is no static grouping; expected static_ and the sizes, as in static_3_3")
    sizes = [int(size) for size in name.split("_")[1:]]
    return {
        "defaults": [
            {"override /schedule": "static"},
            {"override /cache": "lfu"},
            {"override /prefetch": "none"},
            "_self_",
        ],
        "system": {"name": name, "label": "static " + ":".join(map(str, sizes))},
        "schedule": {"partition": {"sizes": sizes}},
    }


def _make(root: DictConfig, key: str, method: str, slots: int | None = None) -> Any:
    """Instantiate the node ``key``; a key ``capacity`` in it receives the slots of the cache."""
    group = key.split(".", maxsplit=1)[0]
    node = OmegaConf.select(root, key)
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError(f"{key} is {node!r}, expected a node with a _target_; conf/{group} has {_options(group)}")
    filled = {"capacity": slots} if slots is not None and "capacity" in node else {}
    try:
        policy = instantiate(node, _convert_="all", **filled)
    except (InstantiationException, OmegaConfBaseException) as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"{key}: cannot make a {node._target_}: {reason}; conf/{group} has {_options(group)}") from None
    if not hasattr(policy, method):
        raise UserError(
            f"{key}: a {node._target_} has no method {method!r}, so it cannot stand there; "
            f"conf/{group} has {_options(group)}"
        )
    return policy


def _batching(root: DictConfig, partition: Any) -> Any:
    """``schedule.batching``; if it is null the partition must batch too."""
    if OmegaConf.select(root, "schedule.batching") is None and hasattr(partition, "group"):
        return partition
    return _make(root, "schedule.batching", "group")


def _host(root: DictConfig, times: Mapping[str, float] | None) -> CoExecution | None:
    """``schedule.host``, if there is one, with the times of the device."""
    node = OmegaConf.select(root, "schedule.host")
    if node is None:
        return None
    if times is None:
        raise UserError(
            "schedule.host computes experts on the host's CPU, and no CPU is known here: the simulator does it with a "
            "device that has a cpu section (rtx4090, h200_ram)"
        )
    filled = {**times, **node}
    host: CoExecution = _make(OmegaConf.create({"schedule": {"host": filled}}), "schedule.host", "choose")
    return host


def _root(config: DictConfig | Mapping[str, Any]) -> DictConfig:
    return config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))


def _options(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (_OPTIONS / group).glob("*.yaml")))


def _round_up(part: int, whole: int) -> float:
    """The smallest fraction with four decimals that gives at least ``part`` of ``whole``."""
    return -(-part * 10_000 // whole) / 10_000

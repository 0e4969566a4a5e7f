"""A run pays for its predictor: GPU time for what it computes and reads, cache slots for what it keeps.

Owns the translation of a predictor's declared cost into a device's times and a run's settings.  Knows no predictor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.devices import DeviceConfig, small_products
from conf.job_times import JobTimes, SmallProducts
from conf.models import ModelConfig
from policies.build import cache_slots
from policies.core.types import ModelSpec, Phase, UserError
from policies.prefetch.cost import Cost, cost_of

CHARGES = ("compute", "none")


@dataclass(frozen=True, slots=True)
class ChargedTimes:
    """Job times plus the predictor's, at every batch that ends with a gate: all but the last layer and head."""

    times: JobTimes
    n_layers: int
    cost: Cost
    rates: SmallProducts

    @property
    def request_s(self) -> Callable[[int], float]:
        """Seconds a layer that one request adds, as without a predictor."""
        return self.times.request_s

    @property
    def extrapolated(self) -> bool:
        """As without a predictor."""
        return self.times.extrapolated

    def seconds(self, phase: Phase, layer: int, n_requests: int, n_experts: int, requests_s: float) -> float:
        """See ``JobTimes.seconds``."""
        alone_s = self.times.seconds(phase, layer, n_requests, n_experts, requests_s)
        if phase is Phase.HEAD or layer == self.n_layers - 1:
            return alone_s
        return alone_s + self.prediction_s(n_requests)

    def prediction_s(self, n_requests: int) -> float:
        """Time of one prediction for so many requests together."""
        cost = self.cost
        n_bytes = cost.bytes_per_batch + n_requests * cost.bytes_per_token
        return self.rates.seconds(cost.kernels, n_bytes, n_requests * cost.operations_per_token)


def charge(
    settings: Mapping[str, Any], device: DeviceConfig, model: ModelConfig, spec: ModelSpec, predictor: object
) -> tuple[Mapping[str, Any], DeviceConfig, dict[str, Any] | None]:
    """Settings and device of a run that pays for its ``predictor`` (as taught), and what the summary says of it.

    ``prefetch.charge``: ``compute``: its kernels take GPU time, one after the other, by ``gpu.small_products`` of the
    device, and its memory is taken from the expert cache, rounded up to whole experts; ``none``: neither.
    Raises UserError for another value, and if the predictor leaves no cache.
    """
    if predictor is None:
        return settings, device, None
    how = settings["prefetch"].get("charge", "compute")
    if how not in CHARGES:
        raise UserError(f"prefetch.charge is {how}, expected {' or '.join(CHARGES)}")
    cost = cost_of(predictor)
    described = {"charge": how, **dataclasses.asdict(cost)}
    if how == "none":
        return settings, device, described
    rates, sources = small_products(settings["device"])
    times = ChargedTimes(device.times, spec.n_layers, cost, rates)
    described |= {"one_request_s": times.prediction_s(1), "all_requests_s": times.prediction_s(settings["concurrency"])}
    described["sources"] = sources
    return _without_memory(settings, cost, model, spec), dataclasses.replace(device, times=times), described


def _without_memory(settings: Mapping[str, Any], cost: Cost, model: ModelConfig, spec: ModelSpec) -> Mapping[str, Any]:
    """The settings with fewer cache slots, if the predictor needs memory."""
    taken = math.ceil(cost.memory_bytes / model.expert_bytes)
    if not taken:
        return settings
    slots = cache_slots(settings, spec)
    if slots - taken < spec.top_k:
        raise UserError(
            f"the predictor keeps {cost.memory_bytes / 1e6:.0f} MB, as much as {taken} experts, and the cache has "
            f"{slots} slots; raise cache.fraction, make the predictor smaller or set prefetch.charge=none"
        )
    return {**settings, "cache": {**settings["cache"], "slots": slots - taken}}

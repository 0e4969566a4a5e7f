"""A run pays for its predictor: GPU time for what it reads, cache slots for what it keeps.

Owns the translation of a predictor's declared cost into a device's times and a run's settings.  Knows no predictor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.devices import DeviceConfig
from conf.job_times import JobTimes
from conf.models import ModelConfig
from policies.build import cache_slots
from policies.core.types import ModelSpec, Phase, UserError
from policies.prefetch.cost import Cost, cost_of

CHARGES = ("compute", "none")


@dataclass(frozen=True, slots=True)
class ChargedTimes:
    """Job times plus the predictor's reads, at every batch that ends with a gate: all but the last layer and head."""

    times: JobTimes
    n_layers: int
    batch_s: float
    token_s: float

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
        return alone_s + self.batch_s + n_requests * self.token_s


def charge(
    settings: Mapping[str, Any], device: DeviceConfig, model: ModelConfig, spec: ModelSpec, predictor: object
) -> tuple[Mapping[str, Any], DeviceConfig, dict[str, Any] | None]:
    """Settings and device of a run that pays for its ``predictor`` (as taught), and what the summary says of it.

    ``prefetch.charge``: ``compute``: the bytes that it reads take GPU time at the memory rate of the device's roofline,
    as a matrix-vector product does, and its memory is taken from the expert cache, rounded up to whole experts;
    ``none``: neither.  Raises UserError for another value, and if the predictor leaves no cache.
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
    rate = float(settings["device"]["gpu"]["roofline"]["memory_bytes_per_s"]["value"])
    batch_s, token_s = cost.bytes_per_batch / rate, cost.bytes_per_token / rate
    times = ChargedTimes(device.times, spec.n_layers, batch_s, token_s)
    described |= {"batch_s": batch_s, "token_s": token_s}
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

"""A device of ``conf/device`` that this machine stands in for: ``device=m6`` holds link and batches to its times.

Owns the translation of a profile into a paced link and the least time of a batch.  Knows neither how a thread waits nor
what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from conf.devices import DeviceConfig
from conf.models import ModelConfig
from conf.sharing import FairShare, one_at_a_time
from executor.model import Decoder
from executor.settings import MachineSettings
from policies.core.messages import Compute
from policies.core.types import UserError


def stand_in(settings: Mapping[str, Any], machine: MachineSettings) -> DeviceConfig | None:
    """The device that a run is paced to, or None on this machine as it is (``device=host``).

    Raises UserError for a profile that is not whole, or a link that is paced otherwise as well.
    """
    if settings["device"].get("link") is None:
        return None
    device = DeviceConfig.from_config(settings["device"], ModelConfig.from_config(settings["model"]))
    if machine.bytes_per_s is not None:
        raise UserError(f"device={device.name} brings its own link; leave link= and bytes_per_s= out")
    return device


def link_of(machine: MachineSettings, device: DeviceConfig | None) -> FairShare | None:
    """How the reads of a run share their paced link; None for a raw one."""
    if device is not None:
        return device.link
    return None if machine.bytes_per_s is None else one_at_a_time(machine.bytes_per_s)


def in_flight(machine: MachineSettings, device: DeviceConfig | None) -> int:
    """Reads that the core may have in flight."""
    if machine.fetch_slots is not None:
        return machine.fetch_slots
    return machine.readers if device is None else device.fetch_slots


def batch_seconds(device: DeviceConfig, decoder: Decoder) -> Callable[[Compute], float]:
    """Seconds of a batch there, its launch included, by the contexts that the decoder's requests have."""
    times, host_s = device.times, device.gpu.host_s

    def seconds(command: Compute) -> float:
        requests_s = sum(times.request_s(decoder.requests[request].position) for request in command.requests)
        shape = (command.phase, command.layer, len(command.requests), len(command.experts))
        return host_s + times.seconds(*shape, requests_s)

    return seconds


def describe(machine: MachineSettings, device: DeviceConfig | None) -> dict[str, str]:
    """What of a result is the machine's own time, and what is held to a rate or a profile: ``link`` and ``batches``."""
    link = link_of(machine, device)
    return {
        "link": "raw" if link is None else f"paced {link.bytes_per_s / 1e9:.2f} GB/s",
        "batches": "raw" if device is None else f"paced to {device.name} ({device.times_from})",
    }


def warnings(device: DeviceConfig | None) -> list[str]:
    """What of a profile is not paced."""
    if device is None:
        return []
    lines = device.warnings()
    if device.gpu.contention != 1.0:
        factor = device.gpu.contention
        lines.append(f"{device.label}: a batch beside reads takes {factor:g} times as long there, which is not paced")
    return lines

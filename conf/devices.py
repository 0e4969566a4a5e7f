"""Device profiles: from a ``conf/device/*.yaml`` mapping to a link and a GPU model.

Owns the reading and checking of device constants and the rule that chooses between fitted and scaled times.
Knows no event and no clock.

Every constant is ``{value: number, source: measured | fitted | assumed, note: text}``.
The rule: each of a profile's ``gpu.fits`` holds times that were measured or fitted for one model in one quantisation,
and that model uses them; every other model gets the roofline, times scaled by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from conf.job_times import Affine, Curve, JobTimes, SmallProducts, Table, roofline
from conf.models import ModelConfig
from conf.sharing import DriverSharing, FairShare, GpuSharing, HostSharing, fixed_slots, one_at_a_time
from policies.core.types import UserError

SOURCES = ("measured", "fitted", "assumed")
SHARINGS = ("fair", "one_at_a_time", "fixed_slots")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One device as it serves one model.

    ``fetch_slots``: reads that the core may have in flight.
    ``times_from``: which numbers the job times come from, for people.
    """

    name: str
    label: str
    link: FairShare
    gpu: GpuSharing
    times: JobTimes
    fetch_slots: int
    times_from: str
    sources: Mapping[str, str]
    cpu: HostSharing | None = None
    fetch_s: float = 0.0
    driver: DriverSharing = field(default_factory=DriverSharing)

    @property
    def host_times(self) -> dict[str, float] | None:
        """What a co-execution policy must know: one expert on the link and on the CPU; None without a CPU."""
        if self.cpu is None:
            return None
        cpu = self.cpu
        times = {"expert_s": cpu.expert_s, "move_s": cpu.move_s, "token_share": cpu.token_share}
        return {"fetch_s": self.fetch_s, **times}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: ModelConfig) -> DeviceConfig:
        """Read a device mapping for ``model``.

        Raises:
            UserError: a constant is missing, no number, NaN, negative or without a source; the message names it.
        """
        name = str(config.get("name", "?")) if isinstance(config, Mapping) else "?"
        root = _Section(config, f"device {name}", "", {})
        link = root.section("link")
        sharing, fetch_slots = _link(link)
        gpu = root.section("gpu")
        times, times_from = _times(gpu, model)
        host = GpuSharing(
            host_s=gpu.number("host_s"),
            streams=gpu.count("streams"),
            overlap_speedup=gpu.number("overlap_speedup", at_least=1.0),
            contention=gpu.number("contention", at_least=1.0),
        )
        return cls(
            name=name,
            label=root.text("label"),
            link=sharing,
            gpu=host,
            times=times,
            fetch_slots=fetch_slots,
            times_from=times_from,
            sources=root.sources,
            cpu=_cpu(root.section("cpu"), model) if root.has("cpu") else None,
            fetch_s=sharing.latency_s + model.expert_bytes / sharing.bytes_per_s,
            driver=_driver(root.section("driver")) if root.has("driver") else DriverSharing(),
        )

    def describe(self) -> dict[str, Any]:
        """What a run's summary says about the device: names, rates, and the source of each constant used."""
        return {
            "name": self.name,
            "label": self.label,
            "job_times": self.times_from,
            "link_bytes_per_s": self.link.bytes_per_s,
            "readers": self.link.readers,
            "fetch_slots": self.fetch_slots,
            "read_splits": self.link.read_splits,
            "contention": self.gpu.contention,
            "host_s": self.gpu.host_s,
            "driver": asdict(self.driver),
            "sources": dict(self.sources),
        }

    def warnings(self) -> list[str]:
        """What a reader of the results must know, after a run."""
        if self.times.extrapolated:
            return [f"{self.label}: some job times lie outside the measured table and are extrapolated"]
        return []


def small_products(config: Mapping[str, Any]) -> tuple[SmallProducts, dict[str, str]]:
    """What a device mapping says about a predictor's products, and the source of each constant.

    Weights are read at the roofline's dense rate.  A profile without ``gpu.small_products`` (a calibrated one) charges
    the reads alone.  Raises UserError as ``DeviceConfig.from_config`` does.
    """
    root = _Section(config, f"device {config.get('name', '?')}", "", {})
    gpu = root.section("gpu")
    part = gpu.section("roofline")
    rate = part.number("memory_bytes_per_s", above=0.0) * part.number("dense_efficiency", above=0.0)
    if not gpu.has("small_products"):
        return SmallProducts(rate, math.inf, 0.0), root.sources
    small = gpu.section("small_products")
    return SmallProducts(rate, small.number("operations_per_s", above=0.0), small.number("kernel_s")), root.sources


class _Section:
    """Part of a device mapping that knows its path, and notes the source of every constant taken from it."""

    def __init__(self, values: Any, where: str, path: str, sources: dict[str, str]) -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"{where}: {path or 'the profile'} must be a mapping, got {values!r}")
        self._values = values
        self._where = where
        self._path = path
        self.sources = sources

    def _key(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, problem: str) -> UserError:
        """An error that names the constant."""
        return UserError(f"{self._where}: {self._key(key)} {problem}")

    def has(self, key: str) -> bool:
        """Whether the profile gives ``key`` at all."""
        return self._values.get(key) is not None

    def sections(self) -> list[tuple[str, _Section]]:
        """All parts of this part by key, in the order of the profile."""
        return [(str(key), self.section(str(key))) for key in self._values]

    def section(self, key: str) -> _Section:
        """A part of this part."""
        if not self.has(key):
            raise self.fail(key, "is missing")
        return _Section(self._values[key], self._where, self._key(key), self.sources)

    def text(self, key: str, choices: tuple[str, ...] = ()) -> str:
        """A word, one of ``choices`` if any are given."""
        value = self._values.get(key)
        if not isinstance(value, str) or (choices and value not in choices):
            expected = f"one of {', '.join(choices)}" if choices else "a text"
            raise self.fail(key, f"is {value!r}, expected {expected}")
        return value

    def marked(self, key: str) -> Any:
        """The value of a ``{value, source, note}`` node; its source is noted."""
        if not self.has(key):
            raise self.fail(key, "is missing")
        node = self._values[key]
        if not isinstance(node, Mapping) or "value" not in node:
            raise self.fail(
                key,
                f"is {node!r}, expected {{value: number, source: {' | '.join(SOURCES)}, note: text}}; "
                f"to override one, set {self._key(key)}.value",
            )
        if node.get("source") not in SOURCES:
            raise self.fail(key, f"has source {node.get('source')!r}, expected one of {', '.join(SOURCES)}")
        self.sources[self._key(key)] = str(node["source"])
        return node["value"]

    def number(self, key: str, at_least: float = 0.0, above: float | None = None) -> float:
        """A finite number of at least ``at_least``, or above ``above``."""
        value = self.marked(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"is {value!r}, expected a finite number")
        if above is not None and value <= above:
            raise self.fail(key, f"is {value!r}, expected more than {above:g}")
        if above is None and value < at_least:
            raise self.fail(key, f"is {value!r}, expected at least {at_least:g}")
        return float(value)

    def count(self, key: str) -> int:
        """A whole number of at least 1."""
        value = self.marked(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, f"is {value!r}, expected a whole number of at least 1")
        return value

    def curve(self, key: str) -> Curve:
        """Points ``[[x, seconds], ...]`` with growing x."""
        points = self.marked(key)
        try:
            pairs = [(float(x), float(seconds)) for x, seconds in points]
        except (TypeError, ValueError):
            raise self.fail(key, f"is {points!r}, expected points [[x, seconds], ...]") from None
        if not pairs or any(not (math.isfinite(x) and math.isfinite(s)) or s < 0 for x, s in pairs):
            raise self.fail(key, f"is {points!r}, expected finite points that are not negative")
        if any(a[0] >= b[0] for a, b in pairwise(pairs)):
            raise self.fail(key, f"is {points!r}, expected points in growing order")
        return Curve(pairs)


def _link(section: _Section) -> tuple[FairShare, int]:
    """The sharing model, and how many reads the core may have in flight."""
    sharing = section.text("sharing", SHARINGS)
    rate = section.number("bytes_per_s", above=0.0)
    readers = section.count("readers")
    latency_s = section.number("latency_s")
    splits = section.count("read_splits")
    if splits > readers:
        raise section.fail("read_splits", f"is {splits}, expected at most the {readers} readers")
    if sharing == "one_at_a_time":
        if splits != 1:
            raise section.fail("read_splits", f"is {splits}, expected 1 where one read moves at a time")
        return one_at_a_time(rate, latency_s), readers
    if sharing == "fixed_slots":
        return fixed_slots(rate, readers, latency_s, splits), readers // splits
    cap = section.number("per_reader_bytes_per_s", above=0.0) if section.has("per_reader_bytes_per_s") else math.inf
    return FairShare(rate, readers, cap, latency_s, splits), readers // splits


def _cpu(section: _Section, model: ModelConfig) -> HostSharing:
    rate = section.number("bytes_per_s", above=0.0)
    return HostSharing(
        expert_s=section.number("call_s") + model.expert_bytes / rate,
        token_share=section.number("token_share"),
        move_s=section.number("move_s"),
    )


def _driver(section: _Section) -> DriverSharing:
    return DriverSharing(*(section.number(key) for key in ("batch_s", "job_s", "request_s", "prediction_s", "fetch_s")))


def _times(gpu: _Section, model: ModelConfig) -> tuple[JobTimes, str]:
    """The fit for this model and quantisation if the profile has one, else the roofline."""
    fits = gpu.section("fits") if gpu.has("fits") else None
    for key, fit in fits.sections() if fits else ():
        if (fit.text("model"), fit.text("quantisation")) == (model.name, model.quantisation):
            kind = fit.text("kind", ("affine", "table"))
            times = _affine(fit, model) if kind == "affine" else _table(fit, model)
            return times, f"{kind} {key}: measured or fitted for {model.label} in {model.quantisation}"
    part = gpu.section("roofline")
    times = roofline(
        model,
        memory_bytes_per_s=part.number("memory_bytes_per_s", above=0.0),
        dense_efficiency=part.number("dense_efficiency", above=0.0),
        expert_efficiency=part.number("expert_efficiency", above=0.0),
        launch_s=part.number("launch_s"),
        request_launch_s=part.number("request_launch_s"),
    )
    return times, f"roofline, scaled to the bytes of {model.label} in {model.quantisation}"


def _affine(fit: _Section, model: ModelConfig) -> Affine:
    request, token = fit.number("c_s"), fit.number("c_per_token_s")
    return Affine(
        n_layers=model.n_layers,
        layer_s=fit.number("a_s"),
        attention_share=model.attention_share,
        expert_s=fit.number("b_s"),
        request_s=_linear(request, token),
        head_s=fit.number("head_s"),
    )


def _table(fit: _Section, model: ModelConfig) -> Table:
    token, context_tokens = fit.number("per_token_s"), fit.count("context_tokens")
    return Table(
        n_layers=model.n_layers,
        requests=fit.curve("by_requests"),
        experts=fit.curve("by_experts"),
        attention_share=model.attention_share,
        request_s=_linear(-token * context_tokens, token),
        head_s=fit.number("head_s"),
    )


def _linear(constant: float, per_token: float) -> Callable[[int], float]:
    def request_s(context_tokens: int) -> float:
        return constant + per_token * context_tokens

    return request_s

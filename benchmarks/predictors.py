"""What predictors cost here, and how fast the study of prefetch precision goes.

    python -m benchmarks.predictors [steps=4] [study=512]

predictors    microseconds of CPU time for one prediction (one token at one layer), Qwen3.6's 40 layers x 256 experts,
              eight requests, stores as configured in conf/prefetch; and, from its declared cost, what a run
              on an M6 is charged: microseconds of the GPU at one layer for one request and for a batch of eight,
              milliseconds for a step of eight in one batch, and the memory taken from the cache
study         ``sim.precision.measure`` at Qwen3.6's size with its default predictors and sizes over ``study`` steps,
              half of them warm-up: seconds, and expert lookups/s (an expert that a layer's batch needs at a measured
              step, looked up in one cache by one predictor).  Target: under 6 minutes on two cores; 0 leaves it out

CPU time of this process (time.process_time), all threads of it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from conf.cells import resolved
from conf.compose import composing, expand
from conf.devices import DeviceConfig, small_products
from conf.models import ModelConfig
from policies.build import build_predictor
from policies.prefetch.cost import cost_of
from sim.charge import ChargedTimes
from sim.coverage import uses_of
from sim.precision import Study, measure
from traces.load import load_workload
from traces.routing import TokenObservation

NAMES = (
    *("next_gate", "previous_token", "popularity", "cooccurrence", "moe_infinity"),
    *("finemoe", "finemoe_asis", "learned_linear"),
)
STUDIED = ("next_gate", "finemoe", "learned_linear")


def settings_of(name: str, steps: int) -> dict[str, Any]:
    overrides = [
        *("model=qwen3_6_35b_a3b", "workload=chat", "system=llama_cpp_lfu", "concurrency=8"),
        *(f"prefetch={name}", f"steps={steps}", f"warmup={steps // 2}"),
    ]
    with composing():
        (point,) = expand(overrides)
    return resolved(point.config)


def predictor_cost(name: str, steps: int) -> None:
    settings = settings_of(name, steps)
    spec = ModelConfig.from_config(settings["model"]).spec
    predictor: Any = build_predictor(settings, spec)
    loaded = load_workload(settings, spec, predictor)
    observations = [
        TokenObservation(request.request, row, layer, request.experts[row], request)
        for row in range(steps)
        for layer in range(spec.n_layers)
        for request in loaded.trace.requests
    ]
    began_s = time.process_time()
    for observation in observations:
        predictor.predict(observation)
    each_s = (time.process_time() - began_s) / len(observations)
    cost, (rates, _) = cost_of(predictor), small_products(settings["device"])
    times = DeviceConfig.from_config(settings["device"], ModelConfig.from_config(settings["model"])).times
    charged = ChargedTimes(times, spec.n_layers, cost, rates)
    one_s, eight_s = charged.prediction_s(1), charged.prediction_s(8)
    print(
        f"{name:16s} {each_s * 1e6:10.1f} {one_s * 1e6:10.1f} {eight_s * 1e6:10.1f} "
        f"{spec.n_layers * eight_s * 1e3:10.2f} {cost.memory_bytes / 1e6:10.1f}"
    )


def needed_experts(settings: dict[str, Any], measured: int) -> int:
    """Experts that the layers' batches need over the last ``measured`` steps."""
    spec = ModelConfig.from_config(settings["model"]).spec
    requests = load_workload(settings, spec).trace.requests
    experts = np.stack([request.decode[-measured:] for request in requests], axis=1)
    return int((uses_of(experts.astype(np.int64), spec.n_experts) > 0).sum())


def study(steps: int) -> None:
    settings = {name: settings_of(name, steps) for name in STUDIED}
    options = Study()
    began_s, began_wall_s = time.process_time(), time.perf_counter()
    rows = list(measure(settings, options))
    cpu_s, wall_s = time.process_time() - began_s, time.perf_counter() - began_wall_s
    lookups = needed_experts(settings["next_gate"], steps - steps // 2) * len(rows)
    print(
        f"study of {steps} steps, {len(STUDIED)} predictors, {len(options.sizes)} sizes, {options.draws} draws: "
        f"{cpu_s:.0f} s of CPU, {wall_s:.0f} s of time, {lookups / cpu_s / 1e6:.2f} million lookups/s"
    )


def main() -> None:
    options = dict(argument.split("=", 1) for argument in sys.argv[1:])
    print(f"{'':16s} {'us of CPU':>10s} {'charged us a layer':^21s} {'ms a step':>10s} {'memory':>10s}")
    print(f"{'predictor':16s} {'each':>10s} {'1 request':>10s} {'8':>10s} {'of 8':>10s} {'MB':>10s}")
    for name in NAMES:
        predictor_cost(name, int(options.get("steps", 4)))
    sys.stdout.flush()
    if steps := int(options.get("study", 512)):
        study(steps)


if __name__ == "__main__":
    main()

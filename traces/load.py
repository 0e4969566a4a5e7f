"""From a run's configuration to its workload and routing: the only place that knows the keys of ``conf/workload``.

Checks that a trace fits the model.  Knows no policy; a predictor is handed in ready-made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from conf.paths import located
from policies.core.types import ModelSpec, UserError
from traces.calibration import require_columns, teach, workload_preset
from traces.format import Trace
from traces.routing import TracePredictor, TraceRouting
from traces.trace_file import TraceFile
from traces.workload import TraceWorkload

MODEL_OF_SHAPE = {
    (12, 32): "demo",
    (16, 64): "olmoe_1b_7b",
    (24, 32): "gpt_oss_20b",
    (26, 64): "deepseek_v2_lite",
    (30, 128): "gemma4_26b_a4b",
    (32, 8): "mixtral_8x7b",
    (36, 128): "gpt_oss_120b",
    (40, 256): "qwen3_6_35b_a3b",
    (45, 128): "glm_4_5_air",
    (48, 128): "qwen3_30b_a3b",
}
"""Which option of ``model=`` has these MoE layers and experts: for the advice in an error only."""


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    """All that a run needs to know of its requests.

    ``model``: the model as it is run; its top-k is the trace's where the recorder had cut it.
    ``trace``: where the routes come from, with the columns that the predictor needs.
    ``describe``: facts for the run's record; ``warnings``: what a reader of the results must know.
    """

    workload: TraceWorkload
    routing: TraceRouting
    digest: str
    describe: dict[str, Any]
    model: ModelSpec
    trace: Trace
    warnings: tuple[str, ...] = ()


def load_workload(
    config: Mapping[str, Any], model: ModelSpec, predictor: TracePredictor | None = None
) -> LoadedWorkload:
    """Make the workload that ``config.workload``, ``concurrency``, ``steps`` and ``seed`` ask for.

    Raises UserError (one line) for a trace that does not fit, and for requests or steps that it does not have.
    """
    node = dict(config["workload"])
    concurrency, steps, seed = int(config["concurrency"]), int(config["steps"]), int(config["seed"])
    columns = tuple(predictor.columns) if predictor is not None else ()
    require_columns(config, predictor)
    warnings: list[str] = []
    kind = node.get("kind") or ("generated" if "preset" in node else "trace")
    if kind == "trace":
        trace, model = _stored(node, model, columns, warnings)
    elif kind == "generated":
        trace = _generated(config, model, columns)
    else:
        raise UserError(f"workload.kind is {kind}, expected generated or trace")
    context = _context(node.get("context_tokens"))
    arrivals = _arrivals(node.get("arrivals"), trace)
    workload = TraceWorkload(
        trace,
        concurrency,
        steps,
        seed=seed,
        requests=node.get("requests") if kind == "trace" else None,
        selection=node.get("selection") or "order",
        start=node.get("start") or 0,
        refill=node.get("refill", True),
        arrivals_s=arrivals,
        context_tokens=context,
        affinity=node.get("affinity"),
    )
    if workload.full_steps < steps and arrivals is None:
        warnings.append(
            f"from step {workload.full_steps} on fewer than {concurrency} requests decode: the trace has no more"
        )
    if context is None and not any(request.prompt_tokens for request in trace.requests):
        warnings.append("context lengths unknown: each request's context begins empty; set workload.context_tokens")
    digest = trace.digest
    describe = {
        "kind": kind,
        "source": trace.source,
        "digest": digest,
        "requests": len(trace.requests),
        "decode_tokens": sum(request.n_decode for request in trace.requests),
        "top_k": model.top_k,
        "context_tokens": list(context) if isinstance(context, tuple) else context,
        "full_steps": workload.full_steps,
    }
    if predictor is not None and (learnt := teach(predictor, config, model, trace, workload.requests)):
        describe["learnt_from"] = learnt
    routing = TraceRouting(trace, workload, predictor)
    return LoadedWorkload(workload, routing, digest, describe, model, trace, tuple(warnings))


def _stored(
    node: Mapping[str, Any], model: ModelSpec, columns: Sequence[str], warnings: list[str]
) -> tuple[Trace, ModelSpec]:
    """The trace of ``workload.path`` and the model with the trace's top-k."""
    path = node.get("path")
    if not path:
        raise UserError("workload.path is not set; give workload.path=FILE, a trace made by python -m traces.convert")
    file = TraceFile(located(path))
    shape, wanted = (file.model.n_layers, file.model.n_experts), (model.n_layers, model.n_experts)
    if shape != wanted:
        fitting = MODEL_OF_SHAPE.get(shape)
        advice = f"use model={fitting}" if fitting else "use a model of the trace's shape"
        raise UserError(
            f"{path} is a trace of {file.model.name} with {shape[0]} MoE layers x {shape[1]} experts, but model "
            f"{model.name} has {wanted[0]} x {wanted[1]}; {advice}"
        )
    if file.model.top_k > model.top_k:
        raise UserError(
            f"{path} has top-{file.model.top_k} gates but model {model.name} has top-{model.top_k}; convert the source "
            f"again with top_k={model.top_k}, or set model.top_k={file.model.top_k}"
        )
    if file.model.top_k < model.top_k:
        warnings.append(
            f"the trace was recorded with top-{file.model.top_k}, {model.name} has top-{model.top_k}: run with the "
            f"trace's top-{file.model.top_k}"
        )
        model = replace(model, top_k=file.model.top_k)
    return file.read(columns=columns), model


def _generated(config: Mapping[str, Any], model: ModelSpec, columns: Sequence[str]) -> Trace:
    from traces.generate import generate  # noqa: PLC0415

    node = dict(config["workload"])
    concurrency, steps, seed = int(config["concurrency"]), int(config["steps"]), int(config["seed"])
    spread = float(node.get("length_spread") or 0.0)
    requests = node.get("requests")
    if requests is None:  # enough to fill every place for all steps
        requests = concurrency * (math.ceil(1 / (1 - spread)) if 0 <= spread < 1 else 1)
    wanted = tuple(column for column in columns if column != "weights")
    return generate(workload_preset(node, model), model, int(requests), steps, seed, wanted, spread)


def _context(value: Any) -> int | tuple[int, int] | None:
    """``context_tokens`` of the configuration: null, a number, or a list of two."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    try:
        low, high = (int(bound) for bound in value)
    except (TypeError, ValueError):
        raise UserError(f"workload.context_tokens is {value}, expected null, a number or a range [low, high]") from None
    return low, high


def _arrivals(value: Any, trace: Trace) -> list[float] | None:
    """``arrivals`` of the configuration: null, a list of seconds, or "trace" for the recorded times."""
    if value is None:
        return None
    if value == "trace":
        recorded = [request.arrival_s for request in trace.requests if request.arrival_s is not None]
        if len(recorded) < len(trace.requests):
            raise UserError(
                f"workload.arrivals=trace, but {trace.source} records no arrival times; give a list of seconds"
            )
        return recorded
    try:
        return [float(arrival) for arrival in value]
    except (TypeError, ValueError):
        raise UserError(f"workload.arrivals is {value}, expected null, a list of seconds or trace") from None

"""What predictors need of traces before a run: columns that are there, and other requests to learn from.

Owns the keys of ``prefetch.learn`` and the rule that nobody learns from the requests that are tested.  Knows a
predictor by its ``columns`` and the sockets of ``policies.prefetch.learning``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from conf.paths import located
from policies.core.types import ModelSpec, RequestId, UserError
from policies.prefetch.learning import Learner, Taught, refuse_overlap, windows
from traces.format import Array, RequestTrace, Trace, TraceError
from traces.predictions import COLUMNS as PREDICTIONS
from traces.presets import Preset, preset_for
from traces.trace_file import TraceFile

RECORD = "python -m traces.capture model=DIR dataset=text path=FILE columns={column} out=TRACE"
"""The command that records a column from a model."""
GENERATED = ("weights", "scores", *PREDICTIONS)
"""The columns of generated routing."""


class NeedsColumns(Protocol):
    """A predictor, as far as traces are concerned."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The first ``tokens`` decode tokens of a request (None: all), as a predictor learns from them."""

    request: RequestTrace
    tokens: int | None = None

    @property
    def experts(self) -> Array:
        """[tokens, layers, k]."""
        return self.request.decode[: self.tokens]

    def column(self, name: str) -> Array:
        """[tokens, ...]."""
        whole: Array = self.request.columns[name][self.request.first_decode :]
        return whole[: self.tokens]


def require_columns(config: Mapping[str, Any], predictor: NeedsColumns | None) -> None:
    """Raise TraceError if the workload cannot show what the predictor reads; reads a stored trace's header only."""
    node = config["workload"]
    if predictor is None or not predictor.columns:
        return
    name = type(predictor).__name__
    if node.get("path"):
        _require(name, predictor.columns, str(node["path"]))
    elif node.get("preset"):
        for column in predictor.columns:
            if column not in GENERATED:
                raise TraceError(
                    f"{name} needs the trace column {column}, which generated routing does not have; record a trace "
                    f"with {RECORD.format(column=column)} and give workload=trace workload.path=TRACE"
                )


def teach(
    predictor: NeedsColumns,
    config: Mapping[str, Any],
    model: ModelSpec,
    trace: Trace,
    tested: Sequence[RequestId],
) -> dict[str, Any] | None:
    """Let a predictor that learns see other requests than the ``tested`` ones of ``trace``; says what it saw.

    ``prefetch.learn``: ``path``: a trace of its own; without it, for a stored trace its requests that are not tested,
    and for generated routing further requests of the same router.  ``requests``: how many at most; ``steps``: how many
    tokens of each at most.  Raises UserError if there is nothing to learn from, or if a tested request is among it.
    """
    name = type(predictor).__name__
    requests = [request for request in trace.requests if request.request in set(tested)]
    shown = [(request.request, request.decode) for request in requests]
    if isinstance(predictor, Taught):
        refuse_overlap(name, predictor.learnt, shown, "train it on other requests")
        return {"learnt_windows": len(predictor.learnt)}
    if not isinstance(predictor, Learner):
        return None
    node = dict((config.get("prefetch") or {}).get("learn") or {})
    lessons = _lessons(node, _other_requests(predictor, config, node, model, trace, requests))
    learnt = np.concatenate([windows(lesson.experts) for lesson in lessons])
    refuse_overlap(name, learnt, shown, "give prefetch.learn.path=FILE, a trace of other requests")
    predictor.learn(lessons)
    return {"requests": len(lessons), "tokens": sum(len(lesson.experts) for lesson in lessons)}


def teach_for_live(predictor: NeedsColumns, config: Mapping[str, Any], model: ModelSpec) -> None:
    """Let a predictor that learns see the trace ``prefetch.learn.path``, before requests that nobody has recorded yet.

    Raises UserError if there is none, or if it does not fit.
    """
    if not isinstance(predictor, Learner):
        return
    node = dict((config.get("prefetch") or {}).get("learn") or {})
    if not node.get("path"):
        raise UserError(
            f"{type(predictor).__name__} learns from a trace before a live run; give prefetch.learn.path=FILE, "
            f"recorded by python -m traces.capture"
        )
    predictor.learn(_lessons(node, _requests_of_file(predictor, str(node["path"]), model)))


def _lessons(node: Mapping[str, Any], requests: Sequence[RequestTrace]) -> list[Lesson]:
    """As many requests and tokens of each as ``prefetch.learn`` asks for."""
    tokens = _count(node, "steps")
    return [Lesson(request, tokens) for request in requests[: _count(node, "requests")]]


def _other_requests(  # noqa: PLR0917 - what there is to choose from
    predictor: NeedsColumns,
    config: Mapping[str, Any],
    node: Mapping[str, Any],
    model: ModelSpec,
    trace: Trace,
    tested: Sequence[RequestTrace],
) -> Sequence[RequestTrace]:
    if node.get("path"):
        return _requests_of_file(predictor, str(node["path"]), model)
    if config["workload"].get("path"):
        ids = {request.request for request in tested}
        rest = [request for request in trace.requests if request.n_decode and request.request not in ids]
        if not rest:
            raise UserError(
                f"{type(predictor).__name__} learns from other requests than those tested, and all {len(tested)} of "
                f"{config['workload']['path']} are tested; set workload.requests below {len(tested)}, or "
                f"prefetch.learn.path=FILE"
            )
        return rest
    from traces.generate import generate  # noqa: PLC0415

    requests, steps = _count(node, "requests"), _count(node, "steps")
    if requests is None or steps is None:
        raise UserError(
            "prefetch.learn.requests and .steps need values where requests are generated, such as 32 and 128"
        )
    columns = tuple(column for column in predictor.columns if column != "weights")
    everyone = generate(
        workload_preset(config["workload"], model), model, len(tested) + requests, steps, int(config["seed"]), columns
    )
    return everyone.requests[len(tested) :]


def _requests_of_file(predictor: NeedsColumns, path: str, model: ModelSpec) -> list[RequestTrace]:
    _require(type(predictor).__name__, predictor.columns, path)
    other = TraceFile(located(path)).read(columns=predictor.columns)
    mine, theirs = ((spec.n_layers, spec.n_experts, spec.top_k) for spec in (model, other.model))
    if mine != theirs:
        raise UserError(
            f"prefetch.learn.path={path} is a trace of {other.model.name} with (layers, experts, top-k) {theirs}, "
            f"the run has {mine}; give a trace of the same model"
        )
    return [request for request in other.requests if request.n_decode]


def workload_preset(node: Mapping[str, Any], model: ModelSpec) -> Preset:
    """The statistics of a generated workload, with the ``prediction_quality`` that the configuration sets."""
    preset = preset_for(model.name, node["preset"])
    quality = node.get("prediction_quality")
    return preset if quality is None else replace(preset, prediction_quality=float(quality))


def _require(name: str, columns: Sequence[str], path: str) -> None:
    present = TraceFile(located(path)).columns
    for column in columns:
        if column not in present:
            raise TraceError(
                f"{path} has no column {column}, which {name} needs (it has {', '.join(present) or 'expert ids only'}"
                f"); record it with {RECORD.format(column=column)}"
            )


def _count(node: Mapping[str, Any], key: str) -> int | None:
    value = node.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"prefetch.learn.{key} is {value}, expected null or a whole number of at least 1")
    return value

"""Gates from a trace: a ``RoutingSource`` that reads each request's experts at the workload's position.

Owns the packing of expert ids and the observation that a predictor sees.  Knows a predictor only by ``columns`` and
``predict``; makes no decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from policies.core.messages import Gate, Prediction
from policies.core.types import RequestId
from policies.prefetch.predictor import ManyAtOnce
from traces.format import Array, RequestTrace, Trace, TraceError


class Positions(Protocol):
    """Where each active request stands: a workload."""

    @property
    def positions(self) -> Mapping[RequestId, int]:
        """Row in its trace of each active request's current token."""
        ...


STRETCH_TOKENS = 256
"""Recorded tokens that a predictor is asked about at one time, if it can answer for many."""

Lists = list[tuple[Prediction, ...]]
"""What is predicted of one token after each layer."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenObservation:
    """One token of one request at the moment when the gate of ``layer`` has chosen.

    ``position``: its row in the trace; ``experts``: [layers, k], indices within each layer.
    """

    request: RequestId
    position: int
    layer: int
    experts: Array
    trace: RequestTrace

    def column(self, name: str) -> Array:
        """This token's entry of an optional column of the trace."""
        return np.asarray(self.trace.columns[name][self.position])


@dataclass(frozen=True, slots=True, eq=False)
class TokenStretch:
    """Consecutive tokens of one request, from row ``position`` of its trace on."""

    request: RequestId
    position: int
    tokens: int
    trace: RequestTrace

    @property
    def experts(self) -> Array:
        """[tokens, layers, k]."""
        return self.trace.experts[self.position : self.position + self.tokens]

    def column(self, name: str) -> Array:
        """[tokens, ...]."""
        whole: Array = self.trace.columns[name]
        return whole[self.position : self.position + self.tokens]


class TracePredictor(Protocol):
    """What routing asks of a predictor."""

    columns: tuple[str, ...]

    def predict(self, observation: TokenObservation) -> tuple[Prediction, ...]:
        """Experts of later layers with scores, best first."""
        ...


class TraceRouting:
    """Gates of the trace's requests at the workload's positions, with predictions if there is a predictor."""

    def __init__(self, trace: Trace, workload: Positions, predictor: TracePredictor | None = None) -> None:
        if predictor is not None:
            for column in predictor.columns:
                if column not in trace.columns:
                    raise TraceError(
                        f"{type(predictor).__name__} needs the trace column {column}; {trace.source} has "
                        f"{', '.join(trace.columns) or 'expert ids only'}"
                    )
        self._workload = workload
        self._predictor = predictor
        self._many = predictor if isinstance(predictor, ManyAtOnce) else None
        self._requests = {request.request: request for request in trace.requests}
        self._offsets = (np.arange(trace.model.n_layers) * trace.model.n_experts)[:, None]
        self._packed: dict[RequestId, tuple[int, list[list[int]]]] = {}
        self._foretold: dict[RequestId, tuple[int, Lists, Iterator[Lists]]] = {}  # a row's, and those of the next rows

    def gates(self, step: int, requests: tuple[RequestId, ...], layer: int) -> tuple[Gate, ...]:
        """One gate for each request, in their order; experts in router rank order."""
        positions, packed = self._workload.positions, self._packed
        out = []
        for request in requests:
            position = positions[request]
            token = packed.get(request)
            if token is None or token[0] != position:
                token = packed[request] = self._pack(request, position)
            predicted = self._predict(self._predictor, request, position, layer) if self._predictor else ()
            out.append(Gate(tuple(token[1][layer]), predicted))
        return tuple(out)

    def _pack(self, request: RequestId, position: int) -> tuple[int, list[list[int]]]:
        """All layers of one token at once: the cost is shared by the layers, the memory stays that of one token."""
        experts: list[list[int]] = (self._requests[request].experts[position] + self._offsets).tolist()
        return position, experts

    def _predict(
        self, predictor: TracePredictor, request: RequestId, position: int, layer: int
    ) -> tuple[Prediction, ...]:
        if self._many is not None:
            return self._lists(self._many, request, position)[layer]
        trace = self._requests[request]
        return predictor.predict(TokenObservation(request, position, layer, trace.experts[position], trace))

    def _lists(self, predictor: ManyAtOnce, request: RequestId, position: int) -> Lists:
        known, lists, following = self._foretold.get(request, (-1, None, iter(())))
        if lists is None or known != position:
            lists = next(following, None) if known + 1 == position else None
            if lists is None:
                trace = self._requests[request]
                tokens = min(STRETCH_TOKENS, trace.n_tokens - position)
                following = predictor.predict_all(TokenStretch(request, position, tokens, trace))
                lists = next(following)
            self._foretold[request] = position, lists, following
        return lists

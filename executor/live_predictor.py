"""Predictors beside a running model: what its gates have said of a token so far, as an observation.

Owns the tokens that are under way, and which predictors a running model can serve.  Knows neither the decoder nor what
becomes of a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.build import build_predictor
from policies.core.messages import Prediction
from policies.core.types import ModelSpec, RequestId, UserError
from policies.prefetch import LearnedLinear, NextGate, OraclePredictor, Predictor
from traces.calibration import teach_for_live

SMALLEST = np.float32(1e-30)  # a probability that was rounded to zero still has a logarithm


@dataclass(slots=True)
class LiveToken:
    """An ``Observation`` that grows layer by layer; what lies beyond ``layer`` is zero.

    ``experts``: [layers, k].  ``log_probabilities``: [layers, experts], of the gates; it serves as the column
    ``scores``, from which it differs by a constant for each layer.
    """

    request: RequestId
    position: int
    layer: int
    experts: npt.NDArray[np.uint16]
    log_probabilities: npt.NDArray[np.float32]

    def column(self, name: str) -> npt.NDArray[Any]:
        """The gates' scores; there is no other column."""
        if name != "scores":
            raise KeyError(name)
        return self.log_probabilities


class LivePredictor:
    """Asks ``predictor``, which has learnt already, about the gates of a running model.

    Every request passes the layers in order, and layer 0 begins its next token; positions count from its first decoded
    token.  ``reads_scores``: whether ``predict`` needs the gates' scores.
    """

    def __init__(self, predictor: Predictor, model: ModelSpec) -> None:
        self.reads_scores = "scores" in predictor.columns
        self._predictor, self._model = predictor, model
        self._tokens: dict[RequestId, LiveToken] = {}

    def predict(
        self,
        layer: int,
        requests: Sequence[RequestId],
        chosen: Sequence[Sequence[int]],
        probabilities: Sequence[Sequence[float]] = (),
    ) -> list[tuple[Prediction, ...]]:
        """Predictions for each of ``requests`` when the gate of ``layer`` has chosen; may be empty.

        ``chosen``: experts within the layer, best first.  ``probabilities``: of all experts of the layer.
        """
        out = []
        for i, request in enumerate(requests):
            token = self._begin(request) if layer == 0 else self._tokens[request]
            token.layer = layer
            token.experts[layer] = chosen[i]
            if self.reads_scores:
                token.log_probabilities[layer] = np.log(np.maximum(np.asarray(probabilities[i], np.float32), SMALLEST))
            out.append(self._predictor.predict(token))
        return out

    def _begin(self, request: RequestId) -> LiveToken:
        """The next token, in arrays of its own: predictors keep those of the token before."""
        model, last = self._model, self._tokens.get(request)
        token = self._tokens[request] = LiveToken(
            request,
            0 if last is None else last.position + 1,
            0,
            np.zeros((model.n_layers, model.top_k), np.uint16),
            np.zeros((model.n_layers, model.n_experts if self.reads_scores else 0), np.float32),
        )
        return token


def live_predictor(settings: Mapping[str, Any], model: ModelSpec) -> LivePredictor | None:
    """The predictor of a live run's settings, taught from ``prefetch.learn.path``.

    None where there is none, and for the next layer's gate, which the decoder itself applies.  Raises UserError for a
    predictor that needs what a running model does not show, or has nothing to learn from.
    """
    predictor = build_predictor(settings, model)
    if predictor is None or (isinstance(predictor, NextGate) and predictor.distance == 1):
        return None
    name = type(predictor).__name__
    if isinstance(predictor, OraclePredictor):
        raise UserError(f"{name} needs the future, which a running model does not know; use mode=replay")
    if isinstance(predictor, LearnedLinear) or not set(predictor.columns) <= {"scores"}:
        raise UserError(
            f"{name} needs {', '.join(predictor.columns)} as a trace records it, and a running model shows the "
            f"probabilities of its gates only; use mode=replay"
        )
    teach_for_live(predictor, settings, model)
    return LivePredictor(predictor, model)

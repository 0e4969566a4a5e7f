"""What the previous token of the same request chose at that layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import RequestId
from policies.prefetch.listing import best, checked_count
from policies.prefetch.predictor import FloatArray, Observation

_Experts = npt.NDArray[Any]


class PreviousToken:
    """The k experts of the token before, its first choice first; nothing for a request's first token.

    Two indices into what the routing has said already: free.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, n_layers: int, n_experts: int, top_k: int, *, distance: int = 1) -> None:
        self.distance = checked_count("previous token", "distance", distance, n_layers)
        self._n_layers, self._n_experts, self._top_k = n_layers, n_experts, top_k
        self._tokens: dict[RequestId, tuple[int, _Experts, _Experts | None]] = {}

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The previous token's experts of layer l + distance."""
        target = observation.layer + self.distance
        if target >= self._n_layers:
            return ()
        scores = self.scores(observation, target)
        return best(scores, target * self._n_experts, int(np.count_nonzero(scores)))

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """From 1 for the first choice down to 1/k for the last; 0 for what was not chosen."""
        scores = np.zeros(self._n_experts, np.float32)
        previous = self._before(observation)
        if previous is not None:
            k = self._top_k
            scores[previous[target_layer]] = np.arange(k, 0, -1, dtype=np.float32) / k
        return scores

    def _before(self, observation: Observation) -> _Experts | None:
        """The experts [layers, k] of the token before, if it was seen."""
        last = self._tokens.get(observation.request)
        if last is None or last[0] != observation.position:
            previous = last[1] if last is not None and last[0] == observation.position - 1 else None
            last = self._tokens[observation.request] = (observation.position, observation.experts, previous)
        return last[2]

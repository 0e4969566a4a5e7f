"""A predictor that knows the future and errs as much as it is told to."""

from __future__ import annotations

import numpy as np

from policies.core.messages import Prediction
from policies.core.types import UserError
from policies.prefetch.predictor import FloatArray, Observation


class OraclePredictor:
    """Predicts the experts of the layer ``distance`` ahead with a given recall and precision.

    On average ``recall`` of the token's ``top_k`` future experts are listed, with so many wrong ones
    among them that ``precision`` of the list is right; right and wrong are equally likely at every
    rank.  A result depends on (seed, request, position, layer, target layer) alone, never on the order
    of calls.
    """

    columns: tuple[str, ...] = ()

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        *,
        distance: int = 1,
        recall: float = 1.0,
        precision: float = 1.0,
        seed: int = 0,
    ) -> None:
        if distance < 1:
            raise UserError(f"oracle predictor: distance is {distance}, expected at least 1 layer ahead")
        for name, value in (("recall", recall), ("precision", precision)):
            if not 0 < value <= 1:
                raise UserError(f"oracle predictor: {name} is {value}, expected more than 0 and at most 1")
        wrong = recall * top_k * (1 - precision) / precision
        if wrong > n_experts - top_k:
            raise UserError(
                f"oracle predictor: recall {recall} at precision {precision} needs {wrong:.1f} wrong experts a token "
                f"but a layer has only {n_experts - top_k}; raise the precision"
            )
        self._n_layers, self._n_experts, self._distance, self._seed = n_layers, n_experts, distance, seed
        self._n_right, self._n_wrong = recall * top_k, wrong

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The listed experts of the target layer, best first; none beyond the last layer."""
        target = observation.layer + self._distance
        if target >= self._n_layers:
            return ()
        scores, listed = self._draw(observation, target)
        order = np.argsort(-scores, kind="stable")[:listed]
        first = target * self._n_experts
        return tuple((first + int(index), float(scores[index])) for index in order)

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """Listed experts score in [0.5, 1), all others in [0, 0.5)."""
        return self._draw(observation, target_layer)[0]

    def _draw(self, observation: Observation, target: int) -> tuple[FloatArray, int]:
        """The scores [n_experts] and how many experts are listed."""
        key = (self._seed, observation.request, observation.position, observation.layer, target)
        generator = np.random.default_rng(key)
        lot, scores = generator.random((2, self._n_experts), dtype=np.float32)
        scores /= 2
        right = np.zeros(self._n_experts, dtype=bool)
        right[observation.experts[target]] = True
        listed = 0
        for members, wanted in ((right, self._n_right), (~right, self._n_wrong)):
            n = int(wanted) + (generator.random() < wanted % 1)  # rounded at random: exact on average
            candidates = np.flatnonzero(members)
            chosen = candidates[np.argsort(lot[candidates], kind="stable")[:n]]
            scores[chosen] += 0.5
            listed += len(chosen)
        return scores, listed

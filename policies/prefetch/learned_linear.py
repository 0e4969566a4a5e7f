"""A learnt predictor in closed form: ridge regression from what a layer shows to the experts of a later one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import UserError
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import best, checked_count
from policies.prefetch.predictor import FloatArray, Observation

Features = Literal["scores", "hidden"]


class LearnedLinear:
    """One linear map for each layer l, from its ``features`` to the experts of layer l + ``distance``.

    Least squares on the tokens of other requests, each expert chosen (1) or not (0), so that a prediction estimates the
    chance of each expert; ``ridge`` draws the weights to zero, in units of the mean variance of a feature.

    With ``features=scores`` (the gate's own logits, which are a linear image of the hidden state) it stands in for a
    learnt predictor such as ProMoE where no hidden states were recorded; its ``distance`` is ProMoE's.

    Cost: one matrix of features x experts a layer.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        *,
        features: Features = "scores",
        distance: int = 2,
        ridge: float = 0.1,
    ) -> None:
        if features not in get_args(Features):
            raise UserError(
                f"learned linear: features is {features!r}, expected one of {', '.join(get_args(Features))}"
            )
        if not ridge > 0:
            raise UserError(f"learned linear: ridge is {ridge}, expected a number above 0")
        self.columns: tuple[str, ...] = (features,)
        self.distance = checked_count("learned linear", "distance", distance, n_layers)
        self._n_layers, self._n_experts, self._top_k, self._ridge = n_layers, n_experts, top_k, ridge
        self._weights: list[FloatArray] = []  # by target layer: [features + 1, experts]

    @property
    def cost(self) -> Cost:
        """That of the maps as learnt."""
        products = max((weights.size for weights in self._weights), default=0)
        memory = sum(weights.nbytes for weights in self._weights)
        return Cost(kernels=2, operations_per_token=products, bytes_per_batch=products * 4, memory_bytes=memory)

    def learn(self, examples: Sequence[Example]) -> None:
        """Solve one regularised least-squares problem a layer."""
        shown = [example.column(self.columns[0]) for example in examples]
        experts = np.concatenate([example.experts for example in examples])  # [tokens, layers, k]
        self._weights = [np.zeros((1, self._n_experts), np.float32)] * min(self.distance, self._n_layers)
        for target in range(self.distance, self._n_layers):
            features = _with_one(np.concatenate([rows[:, target - self.distance] for rows in shown]))
            chosen = np.zeros((len(features), self._n_experts), np.float32)
            np.put_along_axis(chosen, experts[:, target].astype(np.int64), 1, axis=1)
            squares = features.T @ features
            draw = self._ridge * len(features) * features[:, :-1].var()
            squares[np.diag_indices(len(squares) - 1)] += max(draw, 1e-6)
            self._weights.append(np.linalg.solve(squares, features.T @ chosen).astype(np.float32))

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The best k of layer l + distance."""
        target = observation.layer + self.distance
        if target >= self._n_layers:
            return ()
        return best(self.scores(observation, target), target * self._n_experts, self._top_k)

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """Estimated chance of each expert."""
        row = observation.column(self.columns[0])[target_layer - self.distance]
        scores: FloatArray = _with_one(row[None])[0] @ self._weights[target_layer]
        return scores


def _with_one(rows: npt.NDArray[Any]) -> FloatArray:
    """Rows in float32 with a last feature that is always one."""
    return np.concatenate([rows.astype(np.float32), np.ones((len(rows), 1), np.float32)], axis=1)

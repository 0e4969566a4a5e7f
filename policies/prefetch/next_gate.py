"""The next layer's gate applied to this layer's gate input (Mixtral-Offloading, SpecMD)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from policies.core.messages import Prediction
from policies.core.types import UserError
from policies.prefetch.cost import Cost
from policies.prefetch.listing import BLOCK_TOKENS, best, best_of_layers, checked_count, softmax
from policies.prefetch.predictor import FloatArray, Observation, Stretch

ROUTER_BYTES = 4
"""A router weight is kept in f32."""


class NextGate:
    """The best ``overfetch`` x k experts by the softmax of the gate of layer l + ``distance`` on the input of gate l.

    That input is taken after the attention of layer l and its norm, before the output of MoE l is added
    (arXiv 2312.17238; the public repository of Mixtral-Offloading has no speculative loading: its report, AdapMoE,
    which is built on its code, and Bevy §5.1 describe this).  Mixtral-Offloading lists one or two experts for its top-2
    models (from memory of the report, unchecked); here k for any k (``overfetch`` 1).  Its staging
    buffers are an eviction policy, ``policies.eviction.staging``.  SpecMD lists 1.5 x k a token (Bevy §5.1).

    ``hidden``: size of the gate input, for the cost: one more matrix-vector product with a router, softmax and top k.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        *,
        hidden: int,
        distance: int = 1,
        overfetch: float = 1.0,
    ) -> None:
        self.distance = checked_count("next gate", "distance", distance, 3)
        if not overfetch > 0:
            raise UserError(f"next gate: overfetch is {overfetch}, expected a factor above 0 on the {top_k} of a token")
        self.columns: tuple[str, ...] = (f"next_scores_{distance}",)
        self._n_layers, self._n_experts = n_layers, n_experts
        self._listed = min(n_experts, math.ceil(overfetch * top_k))
        products = hidden * n_experts
        self.cost = Cost(kernels=3, operations_per_token=products, bytes_per_batch=products * ROUTER_BYTES)

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The listed experts of layer l + distance; none beyond the last layer."""
        target = observation.layer + self.distance
        if target >= self._n_layers:
            return ()
        return best(self.scores(observation, target), target * self._n_experts, self._listed)

    def predict_all(self, stretch: Stretch) -> Iterator[list[tuple[Prediction, ...]]]:
        """See ``ManyAtOnce``."""
        column = stretch.column(self.columns[0])[:, : -self.distance]
        for first in range(0, len(column), BLOCK_TOKENS):
            scores = softmax(column[first : first + BLOCK_TOKENS])
            for lists in best_of_layers(scores, self.distance * self._n_experts, self._listed):
                yield lists + [()] * self.distance

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """Softmax of the recorded scores of that gate."""
        return softmax(observation.column(self.columns[0])[target_layer - self.distance])

"""What other requests choose most at that layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.core.messages import Prediction
from policies.prefetch.learning import Example
from policies.prefetch.listing import best, checked_count
from policies.prefetch.predictor import FloatArray, Observation


class Popularity:
    """The k most frequent experts of layer l + ``distance`` in the requests learnt from, the same for every token.

    A ranking that is made once: free.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, n_layers: int, n_experts: int, top_k: int, *, distance: int = 1) -> None:
        self.distance = checked_count("popularity", "distance", distance, n_layers)
        self._n_layers, self._n_experts, self._top_k = n_layers, n_experts, top_k
        self._frequency = np.zeros((n_layers, n_experts), np.float32)
        self._lists: list[tuple[Prediction, ...]] = []

    def learn(self, examples: Sequence[Example]) -> None:
        """Count."""
        self._frequency = frequency(examples, self._n_layers, self._n_experts)
        self._lists = [best(row, t * self._n_experts, self._top_k) for t, row in enumerate(self._frequency)]

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The popular experts of layer l + distance."""
        target = observation.layer + self.distance
        return self._lists[target] if target < self._n_layers else ()

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """Share of tokens that choose each expert."""
        row: FloatArray = self._frequency[target_layer]
        return row


def frequency(examples: Sequence[Example], n_layers: int, n_experts: int) -> FloatArray:
    """Share of all tokens that choose each expert [layers, experts]."""
    offsets = (np.arange(n_layers) * n_experts)[:, None]
    counts = np.zeros(n_layers * n_experts, np.int64)
    tokens = 0
    for example in examples:
        counts += np.bincount((example.experts + offsets).ravel(), minlength=len(counts))
        tokens += len(example.experts)
    return (counts.reshape(n_layers, n_experts) / max(tokens, 1)).astype(np.float32)

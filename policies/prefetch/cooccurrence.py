"""Which experts of a later layer go with those of this one, counted on other requests (as Klotski does)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.core.messages import Prediction
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import best, checked_count
from policies.prefetch.popularity import frequency
from policies.prefetch.predictor import FloatArray, Observation

PRIOR_TOKENS = 0.5
"""Weight of an expert's overall frequency against what was seen together with one expert, in tokens."""


class Cooccurrence:
    """Experts are ranked by the geometric mean, over the k experts chosen now, of the chance to follow each.

    P(e' at l + ``distance`` | e at l) is the count of tokens that chose both over those that chose e, drawn towards the
    frequency of e' by ``PRIOR_TOKENS``.  The product of the k chances is naive Bayes up to the prior.

    Cost: the mean of k rows of a table of experts x experts, its best k, and the tables of all layers in memory.
    """

    columns: tuple[str, ...] = ()

    def __init__(self, n_layers: int, n_experts: int, top_k: int, *, distance: int = 1) -> None:
        self.distance = checked_count("co-occurrence", "distance", distance, n_layers)
        self._n_layers, self._n_experts, self._top_k = n_layers, n_experts, top_k
        pairs = max(0, n_layers - distance)
        self._log_chance = np.zeros((pairs, n_experts, n_experts), np.float32)
        self.cost = Cost(
            kernels=2,
            operations_per_token=top_k * n_experts,
            bytes_per_token=top_k * n_experts * 4,
            memory_bytes=self._log_chance.nbytes,
        )

    def learn(self, examples: Sequence[Example]) -> None:
        """Count pairs of experts of one token, for every pair of layers."""
        n = self._n_experts
        overall = frequency(examples, self._n_layers, n) + np.float32(1e-6)  # nothing is impossible
        experts = np.concatenate([example.experts for example in examples]).astype(np.int64)  # [tokens, layers, k]
        for layer, table in enumerate(self._log_chance):
            now, then = experts[:, layer], experts[:, layer + self.distance]
            pairs = now[:, :, None] * n + then[:, None, :]
            together = np.bincount(pairs.ravel(), minlength=n * n).reshape(n, n)
            chosen = np.bincount(now.ravel(), minlength=n)[:, None]
            chance = (together + PRIOR_TOKENS * overall[layer + self.distance]) / (chosen + PRIOR_TOKENS)
            table[:] = np.log(chance)

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The best k of layer l + distance."""
        target = observation.layer + self.distance
        if target >= self._n_layers:
            return ()
        return best(self.scores(observation, target), target * self._n_experts, self._top_k)

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """The geometric mean of the chances."""
        source = target_layer - self.distance
        rows = self._log_chance[source][observation.experts[source]]  # [k, experts]
        mean: FloatArray = np.exp(rows.mean(axis=0))
        return mean

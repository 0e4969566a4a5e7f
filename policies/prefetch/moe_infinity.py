"""MoE-Infinity (arXiv 2401.14361): requests are alike if they used experts alike so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import RequestId
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import best, checked_count
from policies.prefetch.predictor import FloatArray, Observation

EPSILON = 1e-8
"""Added to every predicted share, so that even an expert that the matched request never used has a place."""


@dataclass(slots=True)
class _Query:
    """One request's activation matrix so far."""

    position: int
    experts: npt.NDArray[Any]
    counts: FloatArray  # [layers, experts], of the tokens before ``position``
    later: FloatArray  # [layers, matrices]: sum of the row-wise cosines over the layers beyond l


class MoEInfinity:
    """The expert activation matrix of the learnt request that is most like this one, by the layers still to come.

    As commits 87eacf7 and 5e096b4 of the public repository do it (its head has prediction switched off): after the
    gate of layer l the stored matrices are compared with this request's by the mean cosine of the rows beyond l, which
    hold its earlier tokens; the best one's shares, decaying with distance by 1 - (x - l)/(L + 1), rank the experts of
    all layers beyond l.  While a request's first token runs all matrices tie and the first is taken.

    The collection holds one matrix for each learnt request, the first ``capacity`` of them; the paper chooses
    representatives by clustering when there are more, and the released code never adds one (unchecked: the paper's
    clustering).  Prefill tokens count in neither matrix here.  ``listed``: the best of a prediction that are passed on.

    Cost: all matrices are compared at every layer; products, their sums, the best matrix, its list.
    """

    columns: tuple[str, ...] = ()
    distance = 1

    def __init__(self, n_layers: int, n_experts: int, top_k: int, *, capacity: int = 1000, listed: int = 160) -> None:
        self._n_layers, self._n_experts = n_layers, n_experts
        self._capacity = checked_count("MoE-Infinity", "capacity", capacity, 1 << 20)
        self._listed = checked_count("MoE-Infinity", "listed", listed, 1 << 20)
        self._unit = np.zeros((0, n_layers, n_experts), np.float32)  # rows of length 1
        self._share = self._unit  # rows of sum 1
        self._lists: dict[tuple[int, int], tuple[Prediction, ...]] = {}  # by matrix and first layer
        self._queries: dict[RequestId, _Query] = {}

    @property
    def cost(self) -> Cost:
        """That of the collection as learnt."""
        n_bytes = self._unit.nbytes
        return Cost(kernels=4, operations_per_token=self._unit.size, bytes_per_batch=n_bytes, memory_bytes=n_bytes)

    def learn(self, examples: Sequence[Example]) -> None:
        """One matrix for each request."""
        counts = np.stack([self._counts(example.experts) for example in examples[: self._capacity]])
        self._unit = counts / np.maximum(np.linalg.norm(counts, axis=-1, keepdims=True), EPSILON)
        self._share = counts / np.maximum(counts.sum(axis=-1, keepdims=True), 1)

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The best experts of all layers beyond l."""
        first = observation.layer + 1
        if first >= self._n_layers:
            return ()
        match = self._match(observation)
        known = self._lists.get((match, first))
        if known is None:
            rows = self._share[match][first:] + np.float32(EPSILON)
            decay = 1 - np.arange(1, len(rows) + 1, dtype=np.float32) / (self._n_layers + 1)
            known = best((rows * decay[:, None]).ravel(), first * self._n_experts, self._listed)
            self._lists[match, first] = known
        return known

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """Shares of the matched request's row."""
        row: FloatArray = self._share[self._match(observation)][target_layer]
        return row

    def _match(self, observation: Observation) -> int:
        return int(self._query(observation).later[observation.layer].argmax())

    def _query(self, observation: Observation) -> _Query:
        query = self._queries.get(observation.request)
        if query is not None and query.position == observation.position:
            return query
        if query is None:
            counts = np.zeros((self._n_layers, self._n_experts), np.float32)
        else:
            counts = query.counts + self._counts(query.experts[None])
        norms = np.maximum(np.linalg.norm(counts, axis=-1, keepdims=True), EPSILON)
        cosines = np.einsum("nle,le->ln", self._unit, counts / norms)
        later = np.zeros_like(cosines)
        later[:-1] = cosines[:0:-1].cumsum(axis=0)[::-1]
        query = _Query(observation.position, observation.experts, counts, later)
        self._queries[observation.request] = query
        return query

    def _counts(self, experts: npt.NDArray[Any]) -> FloatArray:
        """How often each expert is chosen [layers, experts] by tokens [tokens, layers, k]."""
        size = self._n_layers * self._n_experts
        offsets = (np.arange(self._n_layers) * self._n_experts)[:, None]
        counts = np.bincount((experts + offsets).ravel(), minlength=size)
        return counts.reshape(self._n_layers, self._n_experts).astype(np.float32)

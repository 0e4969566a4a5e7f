"""FineMoE (arXiv 2502.05370): the stored token whose gates were most alike so far foretells the gates to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import RequestId, UserError
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import best, checked_count, softmax
from policies.prefetch.predictor import FloatArray, Observation

Rule = Literal["paper", "released"]

BAND_CONSTANT = 1e-6
"""The released code adds it to every expert of the band, and so queues them all."""


@dataclass(slots=True)
class _Trajectory:
    """One token's gates so far against all stored ones."""

    position: int
    layers: int  # how many layers the products cover
    products: FloatArray  # [maps]
    match: list[int]  # best map after each layer
    similarity: list[float]
    squared: float  # length of the token's own rows, squared


class FineMoE:
    """Trajectory search over a store of expert maps: the full softmax gate rows [layers, experts] of single tokens.

    After the gate of layer l the rows up to l are compared by cosine with the same rows of every map; the best map
    alone predicts.  With delta = 1 - its cosine, clipped to 0..1, a target layer lists the smallest set of likeliest
    experts whose probabilities reach delta, at least k (``released``: the largest set that does not exceed it).

    ``rule`` (repository IntelliSys-Lab/FineMoE-EuroSys26 where it says *released*):

    - ``paper``: the targets are layer l + ``distance`` and, at layer 0, those before it; scores are probability over
      distance (that weighting is from memory of the paper, unchecked).
    - ``released``: the targets are *all* layers from l + 1 + ``distance`` on, so that layers 1 to ``distance`` are
      never predicted; a constant is added to every expert of these layers, so that all of them follow the listed ones;
      scores decay linearly with the distance.  Its queue and its eviction are policies of their own: ``Latest`` and
      ``policies.eviction.FineMoEScore``.  Its protection of everything listed from eviction is not reproduced: only
      what a prefetch brought is held.

    The semantic search (cosine of input embeddings) that serves the first layers needs embeddings, which traces do not
    hold; the trajectory after the first gate stands in for it under ``paper``.  The store is built before the run from
    decode tokens of other requests, spread evenly, and never updated (the code's offline mode).  ``capacity``: maps;
    ``listed``: the best of a prediction that are passed on.

    Cost: with running products, each layer reads that layer's rows of all maps once a batch.
    """

    columns: tuple[str, ...] = ("scores",)

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        top_k: int,
        *,
        rule: Rule = "paper",
        distance: int = 3,
        capacity: int = 4096,
        listed: int = 64,
    ) -> None:
        if rule not in get_args(Rule):
            raise UserError(f"FineMoE: rule is {rule!r}, expected one of {', '.join(get_args(Rule))}")
        self.distance = checked_count("FineMoE", "distance", distance, n_layers)
        self._n_layers, self._n_experts, self._top_k = n_layers, n_experts, top_k
        self._released = rule == "released"
        self._capacity = checked_count("FineMoE", "capacity", capacity, 1 << 20)
        self._listed = checked_count("FineMoE", "listed", listed, 1 << 20)
        self._maps = np.zeros((n_layers, 0, n_experts), np.float32)  # probabilities, layer by layer
        self._lengths = np.zeros((n_layers, 0), np.float32)  # of each map's rows up to a layer
        self._trajectories: dict[RequestId, _Trajectory] = {}

    @property
    def cost(self) -> Cost:
        """That of the store as learnt."""
        layer = self._maps[0].size
        return Cost(operations_per_token=layer, bytes_per_batch=layer * 4, memory_bytes=self._maps.nbytes)

    def learn(self, examples: Sequence[Example]) -> None:
        """Fill the store."""
        tokens = sum(len(example.experts) for example in examples)
        chosen = np.linspace(0, tokens - 1, min(tokens, self._capacity)).astype(np.int64)
        rows, first = [], 0
        for example in examples:
            last = first + len(example.experts)
            mine = chosen[(chosen >= first) & (chosen < last)] - first
            rows.append(softmax(example.column("scores")[mine]))
            first = last
        self._maps = np.ascontiguousarray(np.concatenate(rows).transpose(1, 0, 2))
        self._lengths = np.sqrt(np.square(self._maps).sum(axis=-1).cumsum(axis=0))

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The listed experts of the target layers."""
        layer, distance = observation.layer, self.distance
        if self._released:
            targets = range(layer + 1 + distance, self._n_layers)
        elif layer == 0:
            targets = range(1, min(1 + distance, self._n_layers))
        else:
            targets = range(layer + distance, min(layer + distance + 1, self._n_layers))
        if not targets:
            return ()
        trajectory = self._follow(observation)
        match, delta = trajectory.match[layer], min(max(1 - trajectory.similarity[layer], 0.0), 1.0)
        rows = self._maps[targets.start : targets.stop, match]
        if self._released:
            scores = np.stack([self._kept(row, delta, "right") for row in rows]) + np.float32(BAND_CONSTANT)
            scores *= (1 - np.arange(len(rows), dtype=np.float32) / (self._n_layers + 1))[:, None]
            return best(scores.ravel(), targets.start * self._n_experts, self._listed)
        predictions: list[Prediction] = []
        for target, row in zip(targets, rows, strict=True):
            kept = self._kept(row, delta, "left") / np.float32(target - layer)
            predictions += best(kept, target * self._n_experts, min(int(np.count_nonzero(kept)), self._listed))
        return tuple(sorted(predictions, key=lambda item: -item[1]))

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """The matched map's probabilities."""
        match = self._follow(observation).match[observation.layer]
        row: FloatArray = self._maps[target_layer, match]
        return row

    def all_scores(self, request: Example) -> FloatArray:
        """``scores`` of every token from each layer l for layer l + distance [tokens, layers, experts], zero before it.

        The same search with one matrix product a layer.
        """
        rows = softmax(request.column("scores"))  # [tokens, layers, experts]
        out = np.zeros_like(rows)
        products = np.zeros((len(rows), self._maps.shape[1]), np.float32)
        for layer in range(self._n_layers - self.distance):
            products += rows[:, layer] @ self._maps[layer].T
            match = (products / self._lengths[layer]).argmax(axis=1)
            out[:, layer + self.distance] = self._maps[layer + self.distance, match]
        return out

    def _kept(self, row: FloatArray, delta: float, side: Literal["left", "right"]) -> FloatArray:
        """``row`` with all but the listed experts at zero."""
        order = np.argsort(-row, kind="stable")
        below = int(np.searchsorted(row[order].cumsum(), delta, side))
        count = max(self._top_k, below if side == "right" else below + 1)
        kept = np.zeros_like(row)
        kept[order[:count]] = row[order[:count]]
        return kept

    def _follow(self, observation: Observation) -> _Trajectory:
        """The token's trajectory up to the observed layer."""
        token = self._trajectories.get(observation.request)
        if token is None or token.position != observation.position:
            token = _Trajectory(observation.position, 0, np.zeros(self._maps.shape[1], np.float32), [], [], 0.0)
            self._trajectories[observation.request] = token
        if token.layers <= observation.layer:
            logits: npt.NDArray[Any] = observation.column("scores")[token.layers : observation.layer + 1]
            for layer, row in enumerate(softmax(logits), token.layers):
                token.products += self._maps[layer] @ row
                token.squared += float(row @ row)
                cosines = token.products / self._lengths[layer]
                token.match.append(int(cosines.argmax()))
                token.similarity.append(float(cosines[token.match[-1]]) / token.squared**0.5)
            token.layers = observation.layer + 1
        return token

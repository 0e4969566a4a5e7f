"""FineMoE (arXiv 2502.05370): the stored token whose gates were most alike so far foretells the gates to come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import RequestId, UserError
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import BLOCK_TOKENS, best_of_layers, checked_count, cut, leading, softmax
from policies.prefetch.predictor import FloatArray, Observation, Stretch

Rule = Literal["paper", "released"]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BAND_CONSTANT = 1e-6
"""The released code adds it to every expert of the band, and so queues them all."""


class _Search:
    """The gates of some tokens so far against all stored ones."""

    def __init__(self, tokens: int, maps: int) -> None:
        self._products = np.zeros((tokens, maps), np.float32)
        self._cosines = np.empty_like(self._products)  # times the length of the token's own rows
        self._squared = np.zeros(tokens)  # that length, squared

    def step(self, rows: FloatArray, maps: FloatArray, lengths: FloatArray) -> tuple[Ints, Floats]:
        """The best map after one more layer, and its cosine [tokens].

        ``rows`` [tokens, experts] and ``maps`` [maps, experts]: that layer's; ``lengths`` [maps]: of the rows up to it.
        """
        self._products += rows @ maps.T
        self._squared += np.square(rows).sum(axis=1)
        np.divide(self._products, lengths, out=self._cosines)
        match = self._cosines.argmax(axis=1)
        return match, np.take_along_axis(self._cosines, match[:, None], axis=1)[:, 0] / np.sqrt(self._squared)


@dataclass(slots=True)
class _Trajectory:
    """One token's gates so far."""

    position: int
    search: _Search
    matches: list[tuple[Ints, Floats]]  # after each layer


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

    Cost: with running products, each layer reads that layer's rows of all maps once a batch; products, cosines, the
    best map, its list.
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
        return Cost(kernels=4, operations_per_token=layer, bytes_per_batch=layer * 4, memory_bytes=self._maps.nbytes)

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
        targets = self._targets(observation.layer)
        return self._listed_experts(observation.layer, *self._match(observation))[0] if targets else ()

    def predict_all(self, stretch: Stretch) -> Iterator[list[tuple[Prediction, ...]]]:
        """See ``ManyAtOnce``: one matrix product a layer, which reads the store once for all tokens of the stretch."""
        layers = [layer for layer in range(self._n_layers) if self._targets(layer)]
        found = self._matches(softmax(stretch.column("scores")), layers)
        silent: list[tuple[Prediction, ...]] = [()] * (self._n_layers - len(layers))
        for first in range(0, len(stretch.experts), BLOCK_TOKENS):
            part = slice(first, first + BLOCK_TOKENS)
            by_layer = [
                self._listed_experts(layer, match[part], similarity[part])
                for layer, (match, similarity) in zip(layers, found, strict=True)
            ]
            for lists in zip(*by_layer, strict=True):
                yield [*lists, *silent]

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """The matched map's probabilities."""
        match, _ = self._match(observation)
        row: FloatArray = self._maps[target_layer, match[0]]
        return row

    def all_scores(self, request: Example) -> FloatArray:
        """``scores`` of every token from layer l for layer l + distance [tokens, layers, experts], zero before it."""
        rows = softmax(request.column("scores"))  # [tokens, layers, experts]
        out = np.zeros_like(rows)
        layers = range(self._n_layers - self.distance)
        for layer, (match, _) in zip(layers, self._matches(rows, layers), strict=True):
            out[:, layer + self.distance] = self._maps[layer + self.distance, match]
        return out

    def _matches(self, rows: FloatArray, layers: Sequence[int]) -> list[tuple[Ints, Floats]]:
        """The best map of each token after each of the first ``layers``; ``rows`` [tokens, layers, experts]."""
        search = _Search(len(rows), self._maps.shape[1])
        return [search.step(rows[:, layer], self._maps[layer], self._lengths[layer]) for layer in layers]

    def _targets(self, layer: int) -> range:
        """The layers that are predicted after the gate of ``layer``."""
        if self._released:
            return range(layer + 1 + self.distance, self._n_layers)
        first = layer + self.distance if layer else 1
        return range(first, min(layer + self.distance + 1, self._n_layers))

    def _listed_experts(self, layer: int, match: Ints, similarity: Floats) -> list[tuple[Prediction, ...]]:
        """The listed experts of all target layers for each token, by its best map and the cosine [tokens]."""
        targets = self._targets(layer)
        rows = self._maps[targets.start : targets.stop, match].transpose(1, 0, 2)  # [tokens, targets, experts]
        order = leading(rows, self._n_experts)
        sums = np.take_along_axis(rows, order, axis=-1).cumsum(axis=-1)
        delta = np.clip(1 - similarity, 0, 1)[:, None, None]
        below = (sums <= delta if self._released else sums < delta).sum(axis=-1, keepdims=True)
        count = np.maximum(self._top_k, below if self._released else below + 1)
        if not self._released:
            count = np.minimum(count, self._listed)
            if len(targets) == 1:
                scores = np.take_along_axis(rows, order, axis=-1)[:, 0] / np.float32(targets.start - layer)
                listed = (np.arange(self._n_experts) < count[:, 0]) & (scores > 0)
                if not ((scores[:, 1:] == scores[:, :-1]) & listed[:, 1:]).any():  # else the order is that of the ids
                    ids = order[:, 0] + targets.start * self._n_experts
                    return cut(ids[listed], scores[listed], listed.sum(axis=-1).tolist())
        kept = np.zeros_like(rows)
        np.put_along_axis(kept, order, np.arange(self._n_experts) < count, axis=-1)
        kept *= rows
        steps = np.arange(len(targets), dtype=np.float32)[:, None]
        if self._released:
            kept += np.float32(BAND_CONSTANT)
            kept *= 1 - steps / (self._n_layers + 1)
        else:
            kept /= steps + (targets.start - layer)
        scores = kept.reshape(len(kept), 1, -1)
        most = self._listed if self._released else int(count.sum(axis=1).max())
        some = np.count_nonzero(scores, axis=-1)[:, 0].tolist()
        lists = best_of_layers(scores, targets.start * self._n_experts, most)
        return [row[:count] for (row,), count in zip(lists, some, strict=True)]

    def _match(self, observation: Observation) -> tuple[Ints, Floats]:
        """The best map of one token, and its cosine, after the gate of the observed layer [1]."""
        token = self._trajectories.get(observation.request)
        if token is None or token.position != observation.position:
            token = _Trajectory(observation.position, _Search(1, self._maps.shape[1]), [])
            self._trajectories[observation.request] = token
        if (known := len(token.matches)) <= observation.layer:
            logits: npt.NDArray[Any] = observation.column("scores")[known : observation.layer + 1]
            for layer, row in enumerate(softmax(logits), known):
                token.matches.append(token.search.step(row[None], self._maps[layer], self._lengths[layer]))
        return token.matches[observation.layer]

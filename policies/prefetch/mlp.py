"""A small multilayer perceptron in NumPy, with the training that ProMoE's needs.

Owns arrays and their gradients.  Knows no experts, layers of a model or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from policies.prefetch.predictor import FloatArray

Loss = Literal["smooth_l1", "l1"]

BETA1, BETA2, TINY = 0.9, 0.999, 1e-8  # Adam's


@dataclass(frozen=True, slots=True)
class Mlp:
    """ReLU between layers, none after the last.  ``weights[i]`` [in, out], ``biases[i]`` [out]."""

    weights: tuple[FloatArray, ...]
    biases: tuple[FloatArray, ...]

    @classmethod
    def random(cls, sizes: Sequence[int], rng: np.random.Generator) -> Mlp:
        """He initialisation, zero biases."""
        pairs = list(pairwise(sizes))
        weights = [rng.standard_normal(pair, dtype=np.float32) * np.float32((2 / pair[0]) ** 0.5) for pair in pairs]
        return cls(tuple(weights), tuple(np.zeros(out, np.float32) for _, out in pairs))

    def taking(self, mean: FloatArray, scale: FloatArray) -> Mlp:
        """The network that does with x what this one does with (x - mean) / scale."""
        first = self.weights[0] / scale[:, None]
        return Mlp((first, *self.weights[1:]), (self.biases[0] - mean @ first, *self.biases[1:]))

    def __call__(self, rows: FloatArray) -> FloatArray:
        """Outputs [..., out] of inputs [..., in]."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            rows = np.maximum(rows @ weight + bias, 0)
        out: FloatArray = rows @ self.weights[-1] + self.biases[-1]
        return out


class Trainer:
    """Adam on mini-batches with dropout; the network changes in place."""

    def __init__(
        self,
        network: Mlp,
        rng: np.random.Generator,
        *,
        rate: float = 1e-3,
        dropout: float,
        loss: Loss = "smooth_l1",
    ) -> None:
        self._network, self._rng, self._rate, self._kept, self._l1 = network, rng, rate, 1 - dropout, loss == "l1"
        self._parameters = [*network.weights, *network.biases]
        self._means = [np.zeros_like(p) for p in self._parameters]
        self._squares = [np.zeros_like(p) for p in self._parameters]
        self._updates = 0

    def epoch(self, rows: FloatArray, labels: FloatArray, batch: int) -> None:
        """One pass over all rows in random order."""
        order = self._rng.permutation(len(rows))
        for first in range(0, len(rows), batch):
            chosen = order[first : first + batch]
            self._step(rows[chosen], labels[chosen])

    def loss(self, rows: FloatArray, labels: FloatArray) -> float:
        """Mean loss of an output, without dropout."""
        error = np.abs(self._network(rows) - labels)
        return float((error if self._l1 else np.where(error < 1, 0.5 * error * error, error - 0.5)).mean())

    def _step(self, rows: FloatArray, labels: FloatArray) -> None:
        network = self._network
        inputs, masks = [rows], []
        for weight, bias in zip(network.weights[:-1], network.biases[:-1], strict=True):
            values = inputs[-1] @ weight + bias
            mask = (values > 0) * (self._rng.random(values.shape, dtype=np.float32) < self._kept)
            masks.append(mask.astype(np.float32) / np.float32(self._kept))
            inputs.append(values * masks[-1])
        error = inputs[-1] @ network.weights[-1] + network.biases[-1] - labels
        slope = (np.sign(error) if self._l1 else np.clip(error, -1, 1)) / np.float32(len(rows))
        weights, biases = [], []
        for layer in reversed(range(len(network.weights))):
            weights.append(inputs[layer].T @ slope)
            biases.append(slope.sum(axis=0))
            if layer:
                slope = slope @ network.weights[layer].T * masks[layer - 1]
        self._adam([*reversed(weights), *reversed(biases)])

    def _adam(self, gradients: Sequence[FloatArray]) -> None:
        self._updates += 1
        correction = (1 - BETA2**self._updates) ** 0.5 / (1 - BETA1**self._updates)
        for parameter, gradient, mean, square in zip(
            self._parameters, gradients, self._means, self._squares, strict=True
        ):
            mean[...] += (1 - BETA1) * (gradient - mean)
            square[...] += (1 - BETA2) * (gradient * gradient - square)
            parameter[...] -= np.float32(self._rate * correction) * mean / (np.sqrt(square) + TINY)

"""ProMoE (arXiv 2410.22134): a small network for each target layer, trained on hidden states."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import RequestId, UserError
from policies.prefetch.cost import Cost
from policies.prefetch.learning import Example
from policies.prefetch.listing import best
from policies.prefetch.mlp import Mlp
from policies.prefetch.predictor import FloatArray, Observation

TRAIN = "python -m traces.train_promoe trace=FILE out=PREDICTOR"
"""The command that writes the file of networks."""
OPENING_LAYERS = 3
"""The last hidden state of the previous token predicts layers 0 to 2; the input of layer l predicts layer l + 2."""
LOOK_AHEAD = OPENING_LAYERS - 1


@dataclass(frozen=True, slots=True)
class Networks:
    """What the training wrote: a network for each target layer, and the ``windows`` of the requests it saw."""

    networks: tuple[Mlp, ...]
    learnt: npt.NDArray[np.uint64]

    def save(self, path: Path) -> None:
        """Write an .npz file, all at once."""
        arrays: dict[str, npt.NDArray[Any]] = {"learnt": self.learnt, "n_layers": np.array(len(self.networks))}
        for layer, network in enumerate(self.networks):
            for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
                arrays[f"weight_{layer}_{i}"], arrays[f"bias_{layer}_{i}"] = weight, bias
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Networks:
        """Read what ``save`` wrote; raises UserError for anything else."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                networks = []
                for layer in range(int(arrays["n_layers"])):
                    depth = sum(name.startswith(f"weight_{layer}_") for name in arrays.files)
                    weights = tuple(arrays[f"weight_{layer}_{i}"] for i in range(depth))
                    networks.append(Mlp(weights, tuple(arrays[f"bias_{layer}_{i}"] for i in range(depth))))
                return cls(tuple(networks), arrays["learnt"])
        except FileNotFoundError:
            raise UserError(f"prefetch.predictor.path: no such file: {path}; make it with {TRAIN}") from None
        except (OSError, ValueError, KeyError, BadZipFile, EOFError):
            raise UserError(f"prefetch.predictor.path={path} holds no networks; make it with {TRAIN}") from None


class ProMoE:
    """The k likeliest experts of layer l + 2 by a network on the hidden state that enters decoder layer l.

    Layers 0 to 2 are predicted from the last hidden state of the token before; at gate 0, where predictions can first
    be acted on, those of layers 1 and 2 are passed on.  The source is a public fork (huwf5/promoe) that holds early
    files of the upstream repository, which could not be read: two hidden layers of width 1024 by its training defaults,
    fp32 (depth approximate).

    ``path``: what the training wrote.  Cost: one network a layer, read once a batch, and its best k.
    """

    columns: tuple[str, ...] = ("hidden",)
    distance = LOOK_AHEAD

    def __init__(self, n_layers: int, n_experts: int, top_k: int, *, path: str | None = None) -> None:
        if path is None:
            raise UserError(
                f"ProMoE needs networks trained on hidden states: {TRAIN}, then prefetch.predictor.path=PREDICTOR"
            )
        trained = Networks.load(Path(path))
        shape = len(trained.networks), len(trained.networks[0].biases[-1])
        if shape != (n_layers, n_experts):
            raise UserError(
                f"{path} was trained for {shape[0]} layers x {shape[1]} experts, the model has {n_layers} x "
                f"{n_experts}; train on a trace of this model"
            )
        self._n_layers, self._n_experts, self._top_k = n_layers, n_experts, top_k
        self._networks, self.learnt = trained.networks, trained.learnt
        self._states: dict[RequestId, tuple[int, FloatArray, FloatArray | None]] = {}
        sizes = [sum(w.size for w in network.weights) for network in self._networks]
        self.cost = Cost(
            kernels=max(len(network.weights) for network in self._networks) + 1,
            operations_per_token=max(sizes),
            bytes_per_batch=max(sizes) * 4,
            memory_bytes=sum(sizes) * 4,
        )

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The likeliest k of the target layers."""
        layer = observation.layer
        targets = range(1, OPENING_LAYERS) if layer == 0 else range(layer + LOOK_AHEAD, layer + OPENING_LAYERS)
        out: list[Prediction] = []
        for target in targets:
            if target < self._n_layers:
                out += best(self.scores(observation, target), target * self._n_experts, self._top_k)
        return tuple(sorted(out, key=lambda item: -item[1]))

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """The network's outputs; zeros for the first layers of a request's first token."""
        hidden, before = self._hidden(observation)
        if target_layer < OPENING_LAYERS:
            if before is None:
                return np.zeros(self._n_experts, np.float32)
            return self._networks[target_layer](before)
        return self._networks[target_layer](hidden[target_layer - LOOK_AHEAD])

    def all_scores(self, request: Example) -> FloatArray:
        """``scores`` of every token for every layer [tokens, layers, experts]."""
        out = np.zeros((len(request.experts), self._n_layers, self._n_experts), np.float32)
        for target, rows in enumerate(features(request)):
            out[len(out) - len(rows) :, target] = self._networks[target](rows)
        return out

    def _hidden(self, observation: Observation) -> tuple[FloatArray, FloatArray | None]:
        """The token's states [layers + 1, hidden] and the last state of the token before."""
        last = self._states.get(observation.request)
        if last is None or last[0] != observation.position:
            before = last[1][-1] if last is not None and last[0] == observation.position - 1 else None
            hidden = observation.column("hidden").astype(np.float32)
            last = self._states[observation.request] = (observation.position, hidden, before)
        return last[1], last[2]


def features(request: Example) -> Sequence[FloatArray]:
    """What each target layer is predicted from, [tokens, hidden]; without the first token for the first layers."""
    hidden = request.column("hidden").astype(np.float32)  # [tokens, layers + 1, hidden]
    n_layers = hidden.shape[1] - 1
    return [
        hidden[:-1, -1] if target < OPENING_LAYERS else hidden[:, target - LOOK_AHEAD] for target in range(n_layers)
    ]

"""The socket for predictors: what a predictor sees and what it must return.

Predictors run beside the source of routing, outside the decision core; their output reaches the
core as ``Gate.predicted``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction

FloatArray = npt.NDArray[np.float32]


class Observation(Protocol):
    """What is known when the gate of ``layer`` has chosen, for one token of one request."""

    @property
    def request(self) -> int:
        """The request."""
        ...

    @property
    def position(self) -> int:
        """The token's index within its request."""
        ...

    @property
    def layer(self) -> int:
        """The MoE layer whose gate has just chosen."""
        ...

    @property
    def experts(self) -> npt.NDArray[Any]:
        """The token's chosen experts [n_layers, k], layer-local; those beyond ``layer`` are the future."""
        ...

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the trace at this token."""
        ...


class Stretch(Protocol):
    """Consecutive tokens of one request whose gates are all recorded."""

    @property
    def request(self) -> int:
        """The request."""
        ...

    @property
    def position(self) -> int:
        """The first token's index within its request."""
        ...

    @property
    def experts(self) -> npt.NDArray[Any]:
        """Chosen experts [tokens, layers, k], layer-local."""
        ...

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of the trace [tokens, ...]."""
        ...


@runtime_checkable
class ManyAtOnce(Protocol):
    """A predictor that also answers for many recorded tokens at one time, because that is faster.

    It is shown more than it may use: its answers are those of ``predict`` token by token.
    """

    def predict_all(self, stretch: Stretch) -> Iterator[list[tuple[Prediction, ...]]]:
        """What ``predict`` says of each token after each layer [layers], token by token."""
        ...


class Predictor(Protocol):
    """Which experts a later layer of the same token will choose.

    ``columns``: the trace columns it reads; a missing one is an error at start.
    """

    columns: tuple[str, ...]

    def predict(self, observation: Observation) -> tuple[Prediction, ...]:
        """The experts worth a prefetch with their scores, best first."""
        ...

    def scores(self, observation: Observation, target_layer: int) -> FloatArray:
        """One score for each expert of ``target_layer`` [n_experts], the larger the likelier."""
        ...

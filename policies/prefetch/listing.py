"""From scores to the short list that a prediction is."""

from __future__ import annotations

import numpy as np

from policies.core.messages import Prediction
from policies.core.types import ExpertId, UserError
from policies.prefetch.predictor import FloatArray


def best(scores: FloatArray, first: ExpertId, count: int) -> tuple[Prediction, ...]:
    """The ``count`` best of ``scores``, best first, equal ones by index; ``first``: the id of index 0."""
    if 4 * count < len(scores):  # sort only what can be among the best
        among = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
        order = among[np.argsort(-scores[among], kind="stable")[:count]]
    else:
        order = np.argsort(-scores, kind="stable")[:count]
    return tuple(zip((order + first).tolist(), scores[order].tolist(), strict=True))


def softmax(logits: FloatArray) -> FloatArray:
    """Probabilities over the last axis."""
    shifted = logits.astype(np.float32)
    shifted -= shifted.max(axis=-1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=-1, keepdims=True)
    return shifted


def checked_count(predictor: str, name: str, value: int, most: int) -> int:
    """A whole number from 1 to ``most``, or UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UserError(f"{predictor}: {name} is {value}, expected a whole number from 1 to {most}")
    return value

"""From scores to the short list that a prediction is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from policies.core.messages import Prediction
from policies.core.types import ExpertId, UserError
from policies.prefetch.predictor import FloatArray

BLOCK_TOKENS = 32
"""Tokens whose lists are made at one time: those of more tokens would only lie in memory."""

SMALL = 512
"""Up to so many scores are sorted whole, which is faster than to find the best first."""


def leading(scores: FloatArray, count: int) -> npt.NDArray[np.int64]:
    """Indices of the ``count`` best of the last axis, best first, equal ones by index.

    Score and index make one integer, so that no tie is left to the sort: the bits of a float32 grow with its size, and
    those of negative ones are turned round.
    """
    n = scores.shape[-1]
    bits = (scores + np.float32(0)).view(np.int32)  # -0 becomes 0
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) << 32
    keys |= np.arange(n - 1, -1, -1)
    if n > SMALL:
        keys = np.partition(keys, n - count, axis=-1)[..., n - count :]
    keys.sort(axis=-1)
    order: npt.NDArray[np.int64] = n - 1 - (keys[..., : -count - 1 : -1] & 0xFFFFFFFF)
    return order


def best(scores: FloatArray, first: ExpertId, count: int) -> tuple[Prediction, ...]:
    """The ``count`` best of ``scores``, best first, equal ones by index; ``first``: the id of index 0."""
    order = leading(scores, min(count, len(scores)))
    return tuple(zip((order + first).tolist(), scores[order].tolist(), strict=True))


def best_of_layers(scores: FloatArray, first: ExpertId, count: int) -> list[list[tuple[Prediction, ...]]]:
    """``best`` of each token and layer [tokens, layers, experts]; ``first``: the id of index 0 of the first layer."""
    n_layers, n_experts = scores.shape[1:]
    order = leading(scores, min(count, n_experts))
    ids = order + (first + n_experts * np.arange(n_layers))[:, None]
    values = np.take_along_axis(scores, order, axis=-1)
    width = values.shape[-1]
    lists = cut(ids.ravel(), values.ravel(), [width] * (values.size // width))
    return [lists[token : token + n_layers] for token in range(0, len(lists), n_layers)]


def cut(ids: npt.NDArray[np.int64], values: FloatArray, lengths: Iterable[int]) -> list[tuple[Prediction, ...]]:
    """Predictions that lie one after another, as lists of these lengths."""
    pairs = list(zip(ids.tolist(), values.tolist(), strict=True))
    ends = [*accumulate(lengths, initial=0)]
    return [tuple(pairs[begin:end]) for begin, end in pairwise(ends)]


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

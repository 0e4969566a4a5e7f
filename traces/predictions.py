"""Owns imperfect predictions of later gates: the columns ``next_scores_1`` to ``next_scores_3``.

Knows true gate scores and a quality.  Knows neither requests, files nor the policies that will use the columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.core.types import UserError

MAX_DISTANCE = 3
COLUMNS = {f"next_scores_{distance}": distance for distance in range(1, MAX_DISTANCE + 1)}
"""Column name -> how many layers ahead it looks."""


def next_gate_scores(
    scores: NDArray[np.float32], distance: int, quality: float, top_k: int, rng: np.random.Generator
) -> NDArray[np.float16]:
    """What a predictor of the given quality says at layer ``l`` about the gate of layer ``l + distance``.

    The true scores, standardised over the experts of a gate, are mixed with independent noise so that prediction and
    truth correlate by ``quality``: 1 recalls every expert, 0 recalls top_k / experts of them by chance.

    Args:
        scores: true gate scores [tokens, layers, experts].
        distance: layers ahead, 1 to ``MAX_DISTANCE``.
        quality: correlation of prediction and truth, 0 to 1.
        top_k: experts that a gate chooses.
        rng: source of the noise.

    Returns:
        [tokens, layers, experts] float16.  The last ``distance`` layers have no such later layer and hold zeros.

    Raises:
        UserError: a distance or quality out of range.
    """
    if not 1 <= distance <= MAX_DISTANCE:
        raise UserError(f"prediction distance is {distance}, expected 1 to {MAX_DISTANCE}")
    if not 0.0 <= quality <= 1.0:
        raise UserError(f"prediction quality is {quality}, expected 0 to 1 (the correlation with the true gate scores)")
    tokens, layers, experts = scores.shape
    predicted = np.zeros((tokens, layers, experts), np.float16)
    if layers <= distance:
        return predicted
    mixed = scores[:, distance:] - scores[:, distance:].mean(axis=-1, keepdims=True)
    mixed *= np.float32(quality) / np.maximum(mixed.std(axis=-1, keepdims=True), np.float32(1e-6))
    mixed += np.float32((1.0 - quality**2) ** 0.5) * rng.standard_normal(mixed.shape, dtype=np.float32)
    if top_k < experts:
        # float16 is finest near zero: put zero between the last chosen and the first rejected expert, so that rounding
        # does not change who is chosen.  Only differences of gate scores mean anything.
        border = np.partition(mixed, (experts - top_k - 1, experts - top_k), axis=-1)
        mixed -= border[..., experts - top_k - 1 : experts - top_k + 1].mean(axis=-1, keepdims=True)
    predicted[:, : layers - distance] = mixed
    return predicted

"""Owns imperfect predictions of later gates: the columns ``next_scores_1`` to ``next_scores_3``.

Knows true gate scores and a quality.  Knows neither requests, files nor the policies that will use the columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.types import UserError
from traces.processes import remember

MAX_DISTANCE = 3
COLUMNS = {f"next_scores_{distance}": distance for distance in range(1, MAX_DISTANCE + 1)}
"""Column name -> how many layers ahead it looks."""

EXPERT_SHARE, REQUEST_SHARE, FAST_SHARE, FAST_MEMORY = 0.056, 0.05, 0.35, 0.6
"""How errors last: shares of their variance that are constant for an expert, constant for an expert in a request, and
an AR(1) process over a request's tokens with this memory; the rest is new with each token.

Measured on the demo model's next gate, 16 requests of 512 tokens of each workload (chat; agentic): constant for an
expert .061; .052, for an expert in a request .041; .065, covariance at lag 1 beside the former .260; .286, at lag 2
.139; .169, at lag 4 .084; .114, at lag 16 .051; .060 (the model here: .26, .18, .10, .05).
"""


RARE_SPREAD = 0.23
"""Errors grow by exp(RARE_SPREAD) for each standard deviation by which an expert is less popular than others.

Measured on the same traces: the scores of the gate and its prediction correlate by .77 to .79 for the rarer two fifths
of experts and by .89 for the more popular two fifths; errors relative to the scores differ by a factor of 1.57.
"""


@dataclass(frozen=True, slots=True)
class SharedErrors:
    """What the errors of all requests have in common, [layers, experts].

    ``bias``: standard normal.  ``scale``: how large an expert's errors are, root mean square 1 in each layer.
    """

    bias: NDArray[np.float32]
    scale: NDArray[np.float32]

    @classmethod
    def draw(cls, popularity: NDArray[np.float32], rng: np.random.Generator) -> SharedErrors:
        """``popularity``: how popular each expert is, in any unit [layers, experts]."""
        centred = popularity - popularity.mean(axis=-1, keepdims=True)
        spread = np.maximum(centred.std(axis=-1, keepdims=True), np.float32(1e-6))
        scale = np.exp(np.float32(-RARE_SPREAD) * centred / spread)
        scale /= np.sqrt(np.square(scale).mean(axis=-1, keepdims=True))
        return cls(rng.standard_normal(popularity.shape, dtype=np.float32), scale)


def next_gate_scores(  # noqa: PLR0917 - the truth, how good, and what draws the errors
    scores: NDArray[np.float32],
    distance: int,
    quality: float,
    top_k: int,
    rng: np.random.Generator,
    shared: SharedErrors,
) -> NDArray[np.float16]:
    """What a predictor of the given quality says at layer ``l`` about the gate of layer ``l + distance``.

    The true scores, standardised over the experts of a gate, are mixed with errors so that prediction and truth
    correlate by ``quality``: 1 recalls every expert, 0 recalls top_k / experts of them by chance.  Errors do not depend
    on the truth; they last, as those of a real gate do: an expert that is foretold too often is so for long.

    Args:
        scores: true gate scores [tokens, layers, experts].
        distance: layers ahead, 1 to ``MAX_DISTANCE``.
        quality: correlation of prediction and truth, 0 to 1.
        top_k: experts that a gate chooses.
        rng: source of the errors of one request.
        shared: the part that all requests share.

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
    mixed += np.float32((1.0 - quality**2) ** 0.5) * _errors(
        len(mixed), shared.bias[distance:], shared.scale[distance:], rng
    )
    if top_k < experts:
        # float16 is finest near zero: put zero between the last chosen and the first rejected expert, so that rounding
        # does not change who is chosen.  Only differences of gate scores mean anything.
        border = np.partition(mixed, (experts - top_k - 1, experts - top_k), axis=-1)
        mixed -= border[..., experts - top_k - 1 : experts - top_k + 1].mean(axis=-1, keepdims=True)
    predicted[:, : layers - distance] = mixed
    return predicted


def _errors(
    tokens: int, bias: NDArray[np.float32], scale: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Errors of unit variance [tokens, layers, experts]; the first tokens' do not depend on how many there are."""
    constant = np.float32(EXPERT_SHARE**0.5) * bias
    constant += np.float32(REQUEST_SHARE**0.5) * rng.standard_normal(bias.shape, dtype=np.float32)
    draws = rng.standard_normal((tokens, 2, *bias.shape), dtype=np.float32)
    fast, errors = draws[:, 0], draws[:, 1]
    errors *= np.float32((1 - EXPERT_SHARE - REQUEST_SHARE - FAST_SHARE) ** 0.5)
    errors += constant
    errors += np.float32(FAST_SHARE**0.5) * remember(fast, FAST_MEMORY)
    errors *= scale
    return errors

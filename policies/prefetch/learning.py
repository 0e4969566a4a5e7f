"""What a predictor learns from before a run: requests other than those it is tested on.

Owns the socket for predictors that learn and the check that nobody learns from what is tested.  Does not know where
requests come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.core.types import UserError

Array = npt.NDArray[Any]

WINDOW_TOKENS = 8
SHARED_SHARE, SHARED_WINDOWS = 0.5, 16
"""How much of a request may be known: a few windows are the fixed words of a template."""


class Example(Protocol):
    """The decode tokens of one request, in order."""

    @property
    def experts(self) -> Array:
        """Chosen experts [tokens, layers, k], layer-local, in router rank order."""
        ...

    def column(self, name: str) -> Array:
        """A column of the trace [tokens, ...]."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A predictor that must see other requests first; it may ask them for the ``columns`` that it names."""

    def learn(self, examples: Sequence[Example]) -> None:
        """Called once, before the first prediction."""
        ...


@runtime_checkable
class Taught(Protocol):
    """A predictor that was trained in a command of its own."""

    @property
    def learnt(self) -> npt.NDArray[np.uint64]:
        """The ``windows`` of all requests that it was trained on."""
        ...


def windows(experts: Array) -> npt.NDArray[np.uint64]:
    """A key for each run of ``WINDOW_TOKENS`` tokens of a request [tokens - WINDOW_TOKENS + 1].

    Equal runs have equal keys, in whatever request or file and at whatever position; others differ for all practical
    purposes.  A shorter request has no window.
    """
    tokens = len(experts)
    if tokens < WINDOW_TOKENS:
        return np.zeros(0, np.uint64)
    flat = experts.reshape(tokens, -1).astype(np.uint64)
    odd = np.random.default_rng(0).integers(1 << 62, size=WINDOW_TOKENS * flat.shape[1], dtype=np.uint64) * 2 + 1
    factors = odd.reshape(WINDOW_TOKENS, -1)
    keys = np.zeros(tokens - WINDOW_TOKENS + 1, np.uint64)
    with np.errstate(over="ignore"):  # the product is meant to wrap around
        for offset, row in enumerate(factors):
            keys += (flat[offset : offset + len(keys)] * row).sum(axis=1, dtype=np.uint64)
    return keys


def refuse_overlap(name: str, learnt: npt.NDArray[np.uint64], tested: Iterable[tuple[int, Array]], advice: str) -> None:
    """Raise UserError if half of any tested request was learnt from, or more than ``SHARED_WINDOWS`` of its windows.

    ``learnt``: the ``windows`` of all requests learnt from.  ``tested``: ids and experts of the tested requests.
    """
    for request, experts in tested:
        keys = windows(experts)
        if np.isin(keys, learnt).sum() > min(SHARED_SHARE * len(keys), SHARED_WINDOWS):
            raise UserError(f"{name} has learnt from request {request}, which is tested here; {advice}")

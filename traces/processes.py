"""Owns random processes over the tokens of a request.  Knows neither routing nor predictions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def remember(draws: NDArray[np.float32], memory: float) -> NDArray[np.float32]:
    """AR(1) process of unit variance [tokens, ...] from independent draws of the same shape."""
    out = draws.copy()
    kept, fresh = np.float32(memory), np.float32((1 - memory**2) ** 0.5)
    for t in range(1, len(out)):
        out[t] = kept * out[t - 1] + fresh * draws[t]
    return out

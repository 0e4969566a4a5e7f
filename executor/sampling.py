"""From logits to the next token: greedy, or drawn with a seed.

A draw depends on (seed, request, how many tokens that request has drawn) and on its own logits, so
neither the schedule nor the other requests show in it.  Does not know the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from policies.core.types import RequestId, UserError


class Sampler(Protocol):
    """Chooses one token for each row of logits."""

    def choose(self, requests: Sequence[RequestId], logits: Tensor) -> list[int]:
        """The next token of every request; ``logits`` [n, V] in their order."""
        ...


class Greedy:
    """The most likely token; of equals the lowest id."""

    def choose(self, requests: Sequence[RequestId], logits: Tensor) -> list[int]:
        """Row by row."""
        return logits.argmax(-1).tolist()


class Seeded:
    """Temperature, then the ``top_k`` likeliest, then the smallest set that holds ``top_p``; one draw from it.

    ``top_k`` 0 and ``top_p`` 1 keep everything.  Raises UserError for values that mean nothing.
    """

    def __init__(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        if not temperature > 0:
            raise UserError(
                f"temperature is {temperature}, expected above 0; for the likeliest token use greedy sampling"
            )
        if top_k < 0 or not 0 < top_p <= 1:
            raise UserError(f"top_k is {top_k} and top_p {top_p}, expected top_k >= 0 and 0 < top_p <= 1")
        self.temperature, self.top_k, self.top_p, self.seed = temperature, top_k, top_p, seed
        self._drawn: dict[RequestId, int] = {}

    def choose(self, requests: Sequence[RequestId], logits: Tensor) -> list[int]:
        """Row by row, each from its own random stream."""
        return [self._draw(request, row) for request, row in zip(requests, logits, strict=True)]

    def _draw(self, request: RequestId, logits: Tensor) -> int:
        ranked, tokens = (logits.double() / self.temperature).sort(descending=True, stable=True)
        if self.top_k:
            ranked, tokens = ranked[: self.top_k], tokens[: self.top_k]
        p = ranked.softmax(-1)
        kept = int((p.cumsum(-1) - p < self.top_p).sum())  # a token stays while those before it hold less than top_p
        mass = p[:kept].cumsum(-1)
        count = self._drawn.get(request, 0)
        self._drawn[request] = count + 1
        u = np.random.default_rng((self.seed, request, count)).random() * float(mass[-1])
        at = int(torch.searchsorted(mass, torch.tensor(u, dtype=mass.dtype, device=mass.device), right=True))
        return int(tokens[min(at, kept - 1)])

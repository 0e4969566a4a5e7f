"""Admission by affinity: which waiting request joins, by the experts that it shares with those that decode.

Owns the likeness of requests and the cap on being passed over.  Knows what requests have used so far, and no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from policies.core.types import RequestId, UserError
from traces.format import Trace

RECENT = 16
"""Tokens of a request that say which experts it uses."""


class Affinity:
    """The waiting request most like those that decode, unless the first one has been passed over ``patience`` times.

    Two requests are as alike as the cosine of their counts of experts in their last ``RECENT`` tokens, summed over
    layers.  Of a waiting request these are the tokens before its first step (``first``: row of that): its recorded
    prompt, and what it decoded before the workload begins.  A request without any is like none.

    Raises UserError if no request has such a token.
    """

    def __init__(self, trace: Trace, first: Mapping[RequestId, int], patience: int) -> None:
        if patience < 1:
            raise UserError(f"workload.affinity is {patience}, expected null or at least 1")
        self._patience = patience
        self._experts = {request.request: request.experts for request in trace.requests}
        self._n_experts = trace.model.n_experts
        if not any(first.values()):
            raise UserError(
                f"workload.affinity needs to know what requests used before their first steps, but no prompts are "
                f"recorded ({trace.source}); set workload.start={RECENT} or workload.affinity=null"
            )
        self._waiting = {request: self._profile(request, row) for request, row in first.items()}
        self._passed: dict[RequestId, int] = {}

    def choose(self, waiting: Sequence[RequestId], positions: Mapping[RequestId, int]) -> int:
        """The place in ``waiting``, the longest waiting first, of the one that joins those at rows ``positions``."""
        if not positions or self._passed.get(waiting[0], 0) >= self._patience:
            return 0
        others = sum(self._profile(request, row) for request, row in positions.items())
        likeness = [float((self._waiting[request] * others).sum()) for request in waiting]
        best = likeness.index(max(likeness))
        for request in waiting[:best]:
            self._passed[request] = self._passed.get(request, 0) + 1
        return best

    def _profile(self, request: RequestId, row: int) -> NDArray[np.float64]:
        """Uses of each expert in the tokens before ``row``, of length 1 in each layer; float [layers, experts]."""
        used = self._experts[request][max(0, row - RECENT) : row]
        layers = np.arange(used.shape[1])[None, :, None]
        counts = np.zeros((used.shape[1], self._n_experts))
        seen = used < self._n_experts  # others: not recorded
        np.add.at(counts, (np.broadcast_to(layers, used.shape)[seen], used[seen]), 1.0)
        length: NDArray[np.float64] = np.sqrt((counts**2).sum(axis=1, keepdims=True))
        return counts / np.maximum(length, 1.0)

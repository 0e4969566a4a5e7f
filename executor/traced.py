"""Requests of a trace on a real decoder: who joins gets a slot and an empty past, who leaves gives it back.

For replay and for timing: the workload says which requests decode at each step, not what they say.
Owns the bookkeeping between a workload and the decoder's slots.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from executor.backend import TorchBackend
from policies.core.messages import StepBegin
from policies.core.protocols import Workload
from policies.core.types import RequestId


class TracedRequests:
    """A Workload that keeps the decoder's slots in step with another one.

    ``context(request)``: tokens before the first one that is decoded, asked when the request joins;
    they are zeros, which cost what real ones cost.  ``token(request)``: the token to feed next
    (teacher forcing); without it each request is fed what it decoded.
    """

    def __init__(
        self,
        inner: Workload,
        backend: TorchBackend,
        context: Callable[[RequestId], int],
        token: Callable[[RequestId], int] | None = None,
    ) -> None:
        self._inner, self._backend, self._context, self._token = inner, backend, context, token

    def begin(self, now_s: float) -> StepBegin | float | None:
        """The inner workload's answer, once its requests have their slots."""
        begin = self._inner.begin(now_s)
        if isinstance(begin, StepBegin):
            self._seat(begin.requests)
        return begin

    def _seat(self, requests: tuple[RequestId, ...]) -> None:
        decoder, tokens = self._backend.decoder, self._backend.tokens
        for request in [r for r in decoder.requests if r not in requests]:
            decoder.close(request)
            tokens.pop(request, None)
        for request in requests:
            if request in decoder.requests:
                decoder.feed(request, self._token(request) if self._token else tokens[request])
            else:
                first = self._token(request) if self._token else 0
                self._backend.call(partial(decoder.open, request, first, self._context(request)))

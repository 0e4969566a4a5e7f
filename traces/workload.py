"""Which requests of a trace decode at each step: how many at once, from where, and who joins when one leaves.

Owns the position of every active request in its trace and the length of its context.  Knows no routing and no time
but the ``now_s`` that the driver tells it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from policies.core.messages import StepBegin
from policies.core.types import RequestId, UserError
from traces.admission import Affinity
from traces.format import Trace

Selection = Literal["order", "random"]


class TraceWorkload:
    """At most ``concurrency`` requests decode together, one token each a step, for at most ``steps`` steps.

    A request leaves when its trace is exhausted; the next waiting one joins between steps (with ``refill``), but not
    before it has arrived.  ``positions``: row in its trace of each active request's token of the current step.
    The attribute ``requests`` holds the ids of all that take part.

    ``requests``: how many requests of the trace take part (None: all); ``selection``: the first ones in their order,
    or drawn and shuffled by ``seed``.  ``start``: decode token at which each request begins; "random" draws one for
    each request from the first half of its tokens.  ``arrivals_s``: when each request arrives, in the order of
    selection (None: all are there from the start).  ``context_tokens``: context of each request at its first decode
    token, one number or a range ``(low, high)`` to draw from (None: the request's own prompt, if the trace knows it).
    ``affinity``: the waiting request that is most like those that decode joins, and none is passed over more often than
    this (``traces.admission``); None: they join in their order.
    """

    def __init__(
        self,
        trace: Trace,
        concurrency: int,
        steps: int,
        *,
        seed: int = 0,
        requests: int | None = None,
        selection: Selection = "order",
        start: int | Literal["random"] = 0,
        refill: bool = True,
        arrivals_s: Sequence[float] | None = None,
        context_tokens: int | tuple[int, int] | None = None,
        affinity: int | None = None,
    ) -> None:
        _at_least_one(concurrency=concurrency, steps=steps, requests=requests)
        chosen = _select(trace, requests, selection, seed)
        if concurrency > len(chosen):
            raise UserError(
                f"concurrency is {concurrency} but the workload has only {_requests(len(chosen))} ({trace.source}); "
                f"lower concurrency or give a trace with more requests"
            )
        self.concurrency, self.steps, self.requests = concurrency, steps, tuple(chosen)
        self.positions: dict[RequestId, int] = {}
        traced = {request.request: request for request in trace.requests}
        self._first = {r: traced[r].first_decode + begin for r, begin in _starts(trace, chosen, start, seed).items()}
        self._decode = {r: traced[r].first_decode for r in chosen}
        self._end = {r: traced[r].n_tokens for r in chosen}
        self._base = _contexts(trace, context_tokens, seed)
        self._refill = refill
        self._affinity = None if affinity is None else Affinity(trace, self._first, affinity)
        self._step = 0
        arrivals = _arrivals(arrivals_s, len(chosen))
        queue = sorted(zip(arrivals, range(len(chosen)), chosen, strict=True))
        self._waiting = deque((arrival, request) for arrival, _, request in queue)
        self.full_steps, feeds = self._feed([request for _, request in self._waiting])
        if steps > feeds and not any(arrivals):
            raise UserError(
                f"steps is {steps} but {concurrency} at once of {_requests(len(chosen))} ({trace.source}) feed only "
                f"{feeds} steps; lower steps or give a longer trace"
            )

    def begin(self, now_s: float) -> StepBegin | float | None:
        """The next step; the time of the next arrival if nobody is there; None at the end."""
        if self._step == self.steps:
            return None
        active = {r: at + 1 for r, at in self.positions.items() if at + 1 < self._end[r]}
        while len(active) < self.concurrency and self._waiting and self._waiting[0][0] <= now_s and self._may_join():
            request = self._next(now_s, active)
            active[request] = self._first[request]
        self.positions = active
        if not active:
            return self._waiting[0][0] if self._waiting and self._may_join() else None
        self._step += 1
        return StepBegin(self._step - 1, tuple(active))

    def context_tokens(self, request: RequestId) -> int:
        """Tokens in the context of an active request, without the one that it decodes now."""
        return self._base[request] + self.positions[request] - self._decode[request]

    def _next(self, now_s: float, active: Mapping[RequestId, int]) -> RequestId:
        """Take a waiting request out of the queue; the first has arrived."""
        place = 0
        if self._affinity is not None:
            arrived = [request for arrival, request in self._waiting if arrival <= now_s]
            place = self._affinity.choose(arrived, active)
        _, request = self._waiting[place]
        del self._waiting[place]
        return request

    def _may_join(self) -> bool:
        """Without refill the places are given once, to the first ``concurrency`` requests."""
        return self._refill or len(self._waiting) > len(self._end) - self.concurrency

    def _feed(self, order: list[RequestId]) -> tuple[int, int]:
        """Steps with ``concurrency`` requests active, and steps with any, if nobody has to be waited for."""
        ends = [self._end[r] - self._first[r] for r in order[: self.concurrency]]
        if self._refill:
            for request in order[self.concurrency :]:
                soonest = ends.index(min(ends))
                ends[soonest] += self._end[request] - self._first[request]
        return min(ends), max(ends)


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _at_least_one(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}, expected at least 1")


def _select(trace: Trace, requests: int | None, selection: str, seed: int) -> list[RequestId]:
    able = [request.request for request in trace.requests if request.n_decode]
    if not able:
        raise UserError(f"the trace of {trace.model.name} ({trace.source}) has no decode tokens; nothing to run")
    if requests is not None and requests > len(able):
        raise UserError(
            f"workload.requests is {requests} but the trace has only {len(able)} requests with decode tokens "
            f"({trace.source}); lower it or leave it null"
        )
    if selection not in get_args(Selection):
        raise UserError(f"workload.selection is {selection}, expected {' or '.join(get_args(Selection))}")
    if selection == "random":
        able = np.random.default_rng([seed, 0]).permutation(able).tolist()
    return able[:requests]


def _starts(trace: Trace, chosen: list[RequestId], start: int | str, seed: int) -> dict[RequestId, int]:
    """Decode token at which each chosen request begins."""
    length = {request.request: request.n_decode for request in trace.requests}
    if start == "random":
        draws = np.random.default_rng([seed, 1]).random(len(trace.requests))
        place = {request.request: draw for request, draw in zip(trace.requests, draws.tolist(), strict=True)}
        return {r: int(place[r] * length[r] / 2) for r in chosen}
    shortest = min(length[r] for r in chosen)
    if isinstance(start, str) or not 0 <= start < shortest:
        raise UserError(
            f"workload.start is {start}, expected random or a decode token from 0 to {shortest - 1} "
            f"(the shortest request has {shortest})"
        )
    return dict.fromkeys(chosen, start)


def _contexts(trace: Trace, base: int | tuple[int, int] | None, seed: int) -> dict[RequestId, int]:
    """Context of each request of the trace at its first decode token."""
    if base is None:
        return {r.request: r.first_decode if r.prompt_tokens is None else r.prompt_tokens for r in trace.requests}
    low, high = (base, base) if isinstance(base, int) else base
    if not 0 <= low <= high:
        raise UserError(f"workload.context_tokens is {base}, expected a number from 0 or a range [low, high]")
    draws = np.random.default_rng([seed, 2]).integers(low, high, size=len(trace.requests), endpoint=True)
    return {request.request: draw for request, draw in zip(trace.requests, draws.tolist(), strict=True)}


def _arrivals(arrivals_s: Sequence[float] | None, requests: int) -> list[float]:
    if arrivals_s is None:
        return [0.0] * requests
    if len(arrivals_s) != requests:
        raise UserError(f"workload.arrivals has {len(arrivals_s)} times for {requests} requests; give one for each")
    for arrival in arrivals_s:
        if not math.isfinite(arrival) or arrival < 0:
            raise UserError(f"workload.arrivals has the time {arrival}, expected seconds from 0")
    return [float(arrival) for arrival in arrivals_s]

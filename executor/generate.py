"""Text generation: prompts in, tokens out, through the decision core.

Requests that finish leave between two steps and waiting ones join: prefill, then decode with the
others.  Owns who is active and when a request ends.  Does not know which job runs when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from executor.backend import Reader, Slots, TorchBackend
from executor.model import Decoder
from executor.prefill import Prefill
from executor.reader import Completions
from executor.sampling import Greedy, Sampler
from policies.core.core import DecisionCore
from policies.core.driver import drive
from policies.core.journal import Journal
from policies.core.messages import StepBegin
from policies.core.types import ExpertId, RequestId, UserError

OnToken = Callable[[RequestId, int], None]
"""Hears every token as soon as its step has ended."""


@dataclass(slots=True)
class Completion:
    """What became of one request; times in seconds since generation began.

    ``ended``: "stop" (a stop token, which is the last of ``tokens``), "length" or "cancelled".
    ``token_s``: when each token was known.
    """

    request: RequestId
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    admitted_s: float = 0.0
    prefilled_s: float = 0.0
    ended: str = ""

    @property
    def first_token_s(self) -> float:
        """Time to first token: waiting, prefill and the first step."""
        return self.token_s[0]

    @property
    def inter_token_s(self) -> list[float]:
        """Latencies between neighbouring tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]


class Generation:
    """A Workload of prompts; request i is the i-th prompt."""

    def __init__(
        self,
        backend: TorchBackend,
        prefill: Prefill,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop: Collection[int] = (),
        on_token: OnToken | None = None,
    ) -> None:
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        self.completions = [Completion(i, len(prompt)) for i, prompt in enumerate(prompts)]
        self._backend, self._decoder, self._prefill = backend, backend.decoder, prefill
        self._prompts, self._max_new_tokens = prompts, max_new_tokens
        self._stop, self._on_token = frozenset(stop), on_token
        self._waiting = deque(range(len(prompts)))
        self._active: list[RequestId] = []
        self._cancelled: set[RequestId] = set()
        self._step = -1

    def cancel(self, request: RequestId) -> None:
        """Let ``request`` leave at the end of the running step.  Any thread may call it."""
        self._cancelled.add(request)

    def begin(self, now_s: float) -> StepBegin | None:
        """Hand out the last step's tokens, let requests leave and join, and begin the next step."""
        self._active = [request for request in self._active if self._goes_on(request, now_s)]
        self._admit()
        if not self._active:
            return None
        self._step += 1
        return StepBegin(self._step, tuple(self._active))

    def _goes_on(self, request: RequestId, now_s: float) -> bool:
        """Take the token that ``request`` decoded; False if it has left."""
        completion, token = self.completions[request], self._backend.tokens[request]
        completion.tokens.append(token)
        completion.token_s.append(now_s)
        if self._on_token is not None:
            self._on_token(request, token)
        room = len(completion.tokens) < self._max_new_tokens
        room = room and completion.prompt_tokens + len(completion.tokens) < self._decoder.max_tokens
        if token in self._stop:
            completion.ended = "stop"
        elif not room:
            completion.ended = "length"
        elif request in self._cancelled:
            completion.ended = "cancelled"
        else:
            self._decoder.feed(request, token)
            return True
        self._decoder.close(request)
        return False

    def _admit(self) -> None:
        """Prefill as many waiting requests as there is room for, together."""
        room = self._decoder.max_requests - len(self._active)
        new: list[RequestId] = []
        while self._waiting and len(new) < room:
            request = self._waiting.popleft()
            if request in self._cancelled:
                self.completions[request].ended = "cancelled"
                continue
            self.completions[request].admitted_s = self._backend.now()
            new.append(request)
        self._prefill.open({request: self._prompts[request] for request in new})
        for request in new:
            self.completions[request].prefilled_s = self._backend.now()
        self._active += new


def resident_in(core: DecisionCore) -> Callable[[ExpertId], int | None]:
    """A look into the core's cache: the slot of an expert that has landed, or None."""

    def slot(expert: ExpertId) -> int | None:
        entry = core.cache.entries.get(expert)
        return entry.slot if entry is not None and entry.resident else None

    return slot


def generate(
    core: DecisionCore,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    slots: Slots,
    reader: Reader,
    done: Completions,
    scratch: Sequence[int],
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampler: Sampler | None = None,
    on_token: OnToken | None = None,
    journal: Journal | None = None,
) -> list[Completion]:
    """Decode every prompt, as many at a time as ``decoder`` has request slots.

    ``reader`` posts on ``done``.  ``scratch``: slots beyond the core's, for prefill.  Raises UserError
    for a prompt that cannot be decoded, and whatever went wrong on another thread.
    """
    with TorchBackend(decoder, slots, reader, done, sampler=sampler or Greedy()) as backend:
        prefill = Prefill(backend, slots, scratch, resident_in(core))
        work = Generation(backend, prefill, prompts, max_new_tokens=max_new_tokens, stop=stop, on_token=on_token)
        drive(core, work, backend, journal=journal)
    return work.completions

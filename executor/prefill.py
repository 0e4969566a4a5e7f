"""Prefill: a prompt through the model layer by layer, its experts in waves through a few scratch slots.

All tokens of a prompt but the last go through here; the last one is the request's first decode
step, so every token that a request *generates* comes from the decode path.  Prompts that are opened
together share the reads of each layer, but every product is of one prompt alone, so its bits depend
on nothing else.

The decision core has no part in it, and its cache stays what it was: a prompt uses experts that are
resident where they lie, and reads the others into scratch slots that the core does not own.  Prefill
runs between steps, when nothing can evict.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from executor.backend import Slots, TorchBackend
from executor.experts import ExpertWeights, expert_mlp
from executor.families.common import PromptTurn
from executor.model import Decoder, GateRows
from policies.core.types import ExpertId, RequestId, UserError

SAY_LAYERS = 8
"""How often ``say`` hears how far a prefill has come."""


class PromptPass:
    """One prompt on its way through the layers; every method runs where the model lives."""

    def __init__(self, decoder: Decoder, slot: int, tokens: Sequence[int]) -> None:
        self._decoder, self._turn, self._slot = decoder, PromptTurn(decoder.states, slot), slot
        ids = torch.tensor([list(tokens)], device=decoder.device)
        positions = torch.arange(len(tokens), device=decoder.device)[None]
        hidden = decoder.model.model.embed_tokens(ids)
        self._rotary = decoder.family.rotary(decoder.model, hidden, positions)
        self._residual: Tensor = hidden[0]
        self._x = self._chosen = self._mix = self._routed = self._order = torch.empty(0)
        self._spans: dict[int, tuple[int, int]] = {}

    def attend(self, layer: int) -> list[int]:
        """Attention and gate of ``layer``; the numbers of the experts that its tokens chose, ascending."""
        block = self._decoder.layers[layer]
        residual = block.attend(self._residual[None], self._rotary, self._turn)[0]
        self._residual, self._x = residual, block.expert_input(residual)
        scores = block.scores(residual, self._x)
        self._chosen = scores.topk(self._decoder.spec.top_k, dim=-1).indices
        self._mix = block.weights(scores, self._chosen)
        if self._decoder.listener is not None:
            rows = GateRows(self._chosen, self._mix, scores, residual, self._x)
            self._decoder.listener(layer, [self._slot] * len(residual), rows)
        self._routed = torch.zeros_like(residual, dtype=torch.float32)
        # Sorted once, an expert's tokens are a slice: no expert has to be searched for on the device.
        flat = self._chosen.reshape(-1)
        self._order = flat.argsort(stable=True)
        counts: list[int] = torch.bincount(flat, minlength=self._decoder.spec.n_experts).tolist()
        ends = itertools.accumulate(counts)
        self._spans = {number: (end - n, end) for number, (n, end) in enumerate(zip(counts, ends, strict=True)) if n}
        return list(self._spans)

    def add(self, number: int, weights: ExpertWeights) -> None:
        """One expert over all tokens that chose it, if any; in ascending number, which fixes the sum's order."""
        if number not in self._spans:
            return
        chosen = self._order[slice(*self._spans[number])]
        rows = chosen // self._decoder.spec.top_k
        y = expert_mlp(self._x[rows], weights, self._decoder.activation)
        self._routed.index_add_(0, rows, y.float() * self._mix.reshape(-1)[chosen, None])

    def merge(self, layer: int) -> None:
        """The MoE's result goes into the residual stream."""
        self._residual = self._decoder.layers[layer].merge(self._residual, self._x, self._routed)


class Prefill:
    """Opens requests: their prompt's keys, values and states, and the token to decode first.

    ``scratch``: slots for reads, none of them the core's.  ``resident``: the slot of an expert that
    lies in the core's cache now, or None.
    """

    def __init__(
        self,
        backend: TorchBackend,
        slots: Slots,
        scratch: Sequence[int],
        resident: Callable[[ExpertId], int | None],
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        if not scratch:
            raise UserError("prefill has no scratch slot to read experts into; give it at least 1")
        self._backend, self._slots, self._scratch, self._resident = backend, slots, list(scratch), resident
        self._say = say
        self.experts_read = 0

    def open(self, prompts: Mapping[RequestId, Sequence[int]]) -> None:
        """Prefill each request's prompt and leave it ready for its first decode step.

        Raises UserError for an empty prompt or one that is longer than the decoder has room for.
        """
        decoder, call = self._backend.decoder, self._backend.call
        for request, prompt in prompts.items():
            self._check(request, prompt)
        passes = []
        for request, prompt in prompts.items():
            slot = call(partial(decoder.open, request, prompt[-1]))
            if len(prompt) > 1:
                passes.append(call(partial(PromptPass, decoder, slot, prompt[:-1])))
        for layer in range(decoder.spec.n_layers) if passes else ():
            if layer % SAY_LAYERS == 0:
                self._say(f"prefill of {len(passes)} prompts: layer {layer} of {decoder.spec.n_layers}")
            chosen = call(partial(_attend, passes, layer))
            self._experts(layer, passes, chosen)
            call(partial(_merge, passes, layer))
        for request, prompt in prompts.items():
            decoder.requests[request].position = len(prompt) - 1

    def _check(self, request: RequestId, prompt: Sequence[int]) -> None:
        decoder = self._backend.decoder
        vocabulary = decoder.model.config.vocab_size
        if not prompt or len(prompt) >= decoder.max_tokens:
            raise UserError(
                f"request {request}: a prompt of {len(prompt)} tokens, expected 1 to {decoder.max_tokens - 1}; "
                "raise max_tokens"
            )
        if not all(0 <= token < vocabulary for token in prompt):
            raise UserError(
                f"request {request}: a token id is outside the vocabulary of {vocabulary}; use the model's tokenizer"
            )

    def _experts(self, layer: int, passes: Sequence[PromptPass], numbers: Sequence[int]) -> None:
        """Read ahead as far as scratch slots reach, and compute in ascending order as experts land."""
        base = layer * self._backend.decoder.spec.n_experts
        place = {number: self._resident(base + number) for number in numbers}
        absent = iter([number for number in numbers if place[number] is None])
        free, borrowed = list(self._scratch), dict[int, int]()

        def read_ahead() -> None:
            while free and (number := next(absent, None)) is not None:
                borrowed[number] = free.pop()
                self._backend.read({base + number: borrowed[number]})
                self.experts_read += 1

        read_ahead()
        for number in numbers:
            slot = place[number]
            if slot is None:
                slot = borrowed[number]
                self._backend.landed(base + number)
            self._backend.call(partial(self._add, passes, number, slot))
            if number in borrowed:
                free.append(borrowed.pop(number))
            read_ahead()

    def _add(self, passes: Sequence[PromptPass], number: int, slot: int) -> None:
        """On the compute thread, where a slot's weights may have to be converted."""
        weights = self._slots.weights(slot)
        for work in passes:
            work.add(number, weights)


def _attend(passes: Sequence[PromptPass], layer: int) -> list[int]:
    """The experts that any of the prompts chose, ascending."""
    return sorted({number for work in passes for number in work.attend(layer)})


def _merge(passes: Sequence[PromptPass], layer: int) -> None:
    for work in passes:
        work.merge(layer)


def scratch_slots(capacity: int, readers: int) -> range:
    """The slots after the core's ``capacity``: one for each reader."""
    return range(capacity, capacity + readers)

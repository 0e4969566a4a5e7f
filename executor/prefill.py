"""Prefill: a prompt through the model layer by layer, its experts in waves through a few scratch slots.

All tokens of the prompt but the last go through here; the last one is the request's first decode
step, so every token that a request *generates* comes from the decode path.  Prompts go one at a time,
so their bits depend on nothing else.

The decision core has no part in it, and its cache stays what it was: a prompt uses experts that are
resident where they lie, and reads the others into scratch slots that the core does not own.  Prefill
runs between steps, when nothing can evict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from executor.backend import Slots, TorchBackend
from executor.experts import ExpertWeights, expert_mlp
from executor.families.common import PromptTurn
from executor.model import Decoder
from policies.core.types import ExpertId, RequestId, UserError


class PromptPass:
    """One prompt on its way through the layers; every method runs where the model lives."""

    def __init__(self, decoder: Decoder, slot: int, tokens: Sequence[int]) -> None:
        self._decoder, self._turn = decoder, PromptTurn(decoder.states, slot)
        ids = torch.tensor([list(tokens)], device=decoder.device)
        positions = torch.arange(len(tokens), device=decoder.device)[None]
        hidden = decoder.model.model.embed_tokens(ids)
        self._rotary = decoder.family.rotary(decoder.model, hidden, positions)
        self._residual: Tensor = hidden[0]
        self._x = self._chosen = self._mix = self._routed = torch.empty(0)

    def attend(self, layer: int) -> list[int]:
        """Attention and gate of ``layer``; the numbers of the experts that its tokens chose, ascending."""
        block = self._decoder.layers[layer]
        residual = block.attend(self._residual[None], self._rotary, self._turn)[0]
        self._residual, self._x = residual, block.expert_input(residual)
        scores = block.scores(residual, self._x)
        self._chosen = scores.topk(self._decoder.spec.top_k, dim=-1).indices
        self._mix = block.weights(scores, self._chosen)
        self._routed = torch.zeros_like(residual, dtype=torch.float32)
        numbers: list[int] = torch.unique(self._chosen).tolist()  # ascending
        return numbers

    def add(self, number: int, weights: ExpertWeights) -> None:
        """One expert over all tokens that chose it; called in ascending number, which fixes the sum's order."""
        rows, ranks = torch.where(self._chosen == number)
        y = expert_mlp(self._x[rows], weights, self._decoder.activation)
        self._routed.index_add_(0, rows, y.float() * self._mix[rows, ranks, None])

    def merge(self, layer: int) -> None:
        """The MoE's result goes into the residual stream."""
        self._residual = self._decoder.layers[layer].merge(self._residual, self._x, self._routed)


class Prefill:
    """Opens requests: their prompt's keys, values and states, and the token to decode first.

    ``scratch``: slots for reads, none of them the core's.  ``resident``: the slot of an expert that
    lies in the core's cache now, or None.
    """

    def __init__(
        self, backend: TorchBackend, slots: Slots, scratch: Sequence[int], resident: Callable[[ExpertId], int | None]
    ) -> None:
        if not scratch:
            raise UserError("prefill has no scratch slot to read experts into; give it at least 1")
        self._backend, self._slots, self._scratch, self._resident = backend, slots, list(scratch), resident
        self.experts_read = 0

    def open(self, request: RequestId, prompt: Sequence[int]) -> None:
        """Prefill ``prompt`` and leave ``request`` ready for its first decode step.

        Raises UserError for an empty prompt or one that is longer than the decoder has room for.
        """
        decoder, call = self._backend.decoder, self._backend.call
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
        slot = call(partial(decoder.open, request, prompt[-1]))
        if len(prompt) == 1:
            return
        work = call(partial(PromptPass, decoder, slot, prompt[:-1]))
        for layer in range(decoder.spec.n_layers):
            self._experts(layer, work, call(partial(work.attend, layer)))
            call(partial(work.merge, layer))
        decoder.requests[request].position = len(prompt) - 1

    def _experts(self, layer: int, work: PromptPass, numbers: list[int]) -> None:
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
            self._backend.call(partial(self._add, work, number, slot))
            if number in borrowed:
                free.append(borrowed.pop(number))
            read_ahead()

    def _add(self, work: PromptPass, number: int, slot: int) -> None:
        """On the compute thread, where a slot's weights may have to be converted."""
        work.add(number, self._slots.weights(slot))


def scratch_slots(capacity: int, readers: int) -> range:
    """The slots after the core's ``capacity``: one for each reader."""
    return range(capacity, capacity + readers)

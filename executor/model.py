"""The decoder, cut where the scheduler cuts it: entry, one job a layer, head.

    entry   embed each request's current token; attention and gate of layer 0
    job l   MoE of layer l for a group of requests; then attention and gate of layer l + 1
    head    final norm and LM head

Requests of a group stand at the same layer but have pasts of their own lengths; different groups may
stand at different layers.  What a request carries between two calls lies in one row of a few tensors:
residual stream, expert input, mixing weights.  The last row of each is padding.  Every product obeys
the row rule, so the groups do not show in the logits.

Owns the requests' rows and states.  Does not know which experts are where, who is scheduled next,
or how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from executor.cache import LayerState
from executor.experts import WeightsOf, add_experts, users_of_experts
from executor.families import family_of
from executor.families.common import DecodeTurn, Module
from executor.rows import check_products, tile_rows, tiles
from policies.core.messages import Prediction
from policies.core.types import RequestId, UserError

Given = Sequence[Sequence[int]] | None
"""Experts that replay imposes, one list for each request; None: the model's own gate decides."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the gates of one layer said, in the order of the requests.

    ``chosen``: expert numbers within the layer, best first.  ``predicted``: experts (ids of the whole
    model) that the next layer's gate would choose on this layer's input, best first.  ``foreign``:
    how many of the chosen ones the model itself would not have chosen; 0 unless they were given.
    ``scores``: the gate's probability of every expert of its layer; empty unless the decoder shows them.
    """

    chosen: list[list[int]]
    predicted: list[tuple[Prediction, ...]]
    foreign: int = 0
    scores: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GateRows:
    """One call of a gate; rows beyond the tokens that it was called for are padding.

    ``chosen``: [rows, k], best first.  ``weights``: [rows, k], of the chosen.  ``scores``: [rows, E], probabilities.
    ``residual``, ``expert_input``: [rows, H], what the gate read it from.
    """

    chosen: Tensor
    weights: Tensor
    scores: Tensor
    residual: Tensor
    expert_input: Tensor


GateListener = Callable[[int, Sequence[int], GateRows], None]
"""Hears the gates of prompts and decode tokens, on the compute thread: layer, slot of each token's request, rows."""


@dataclass(slots=True)
class _Request:
    """A request's place: its row, the token to feed next and that token's position."""

    slot: int
    token: int
    position: int
    chosen: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """One tile of a group: its requests, their slots filled up with the padding row, and without it."""

    first: int
    members: list[_Request]
    padded: Tensor
    index: Tensor

    def turn(self, states: Sequence[LayerState]) -> DecodeTurn:
        slots, positions = [m.slot for m in self.members], [m.position for m in self.members]
        return DecodeTurn(states, slots, positions, self.index, self.padded)


class Decoder:
    """A model without its experts, decoding up to ``max_requests`` requests of up to ``max_tokens`` tokens.

    ``model``: from ``families.build_shared``.  ``predict``: how many experts of the next layer each
    gate output predicts (0: none).  Two may be set at any time: ``shows_scores``, whether routing brings all scores
    of a gate to the host, and ``listener``, who hears every gate.  The caller enters ``torch.inference_mode`` and,
    on CUDA, the stream.
    """

    def __init__(
        self, model: Module, max_requests: int, max_tokens: int, tile: int | None = None, predict: int = 0
    ) -> None:
        config: Any = model.config
        self.model, self.family = model, family_of(config)
        self.spec, self.hidden = self.family.spec(config), config.hidden_size
        self.intermediate, self.activation = self.family.intermediate(config), self.family.activation(config)
        embedding: Tensor = model.model.embed_tokens.weight
        self.device, self.dtype = embedding.device, embedding.dtype
        self.tile = tile_rows(self.device) if tile is None else tile
        self.max_requests, self.max_tokens, self.predict = max_requests, max_tokens, predict
        self.shows_scores = False
        self.listener: GateListener | None = None
        self.layers = [self.family.layer(m, config, i) for i, m in enumerate(model.model.layers)]
        self.states = [layer.new_state(max_requests, max_tokens, self.dtype, self.device) for layer in self.layers]
        self.requests: dict[RequestId, _Request] = {}
        self._free = list(range(max_requests - 1, -1, -1))
        self._pad = max_requests
        rows = max_requests + 1
        self._residual = torch.zeros(rows, self.hidden, dtype=self.dtype, device=self.device)
        self._x = torch.zeros_like(self._residual)
        self._mix = torch.zeros(rows, self.spec.n_experts, dtype=torch.float32, device=self.device)
        self._routed = torch.zeros(rows, self.hidden, dtype=torch.float32, device=self.device)
        like = torch.zeros(1, 1, dtype=self.dtype, device=self.device)
        first = self.family.rotary(model, like, torch.zeros(1, 1, dtype=torch.long, device=self.device))
        self._rotary = {k: (cos[0].repeat(rows, 1), sin[0].repeat(rows, 1)) for k, (cos, sin) in first.items()}
        self._index = lru_cache(maxsize=4096)(self._make_index)

    # ------------------------------------------------------------------ requests

    def open(self, request: RequestId, token: int, position: int = 0) -> int:
        """Give ``request`` a slot; it will feed ``token`` at ``position`` next.  Returns the slot.

        A position above 0 without a prefill means an empty past of that length: right for timing.
        """
        if not self._free:
            raise UserError(f"request {request}: all {self._pad} request slots are taken; raise concurrency")
        slot = self._free.pop()
        self.requests[request] = _Request(slot, token, position)
        for state in self.states:
            state.reset(slot, position)
        return slot

    def close(self, request: RequestId) -> None:
        """``request`` has left; its slot is free."""
        self._free.append(self.requests.pop(request).slot)

    def feed(self, request: RequestId, token: int) -> None:
        """The token that ``request`` decodes in the next step.  Raises UserError at the last position."""
        state = self.requests[request]
        if state.position + 1 >= self.max_tokens:
            raise UserError(f"request {request} has reached max_tokens {self.max_tokens}; raise it")
        state.token, state.position = token, state.position + 1

    # ------------------------------------------------------------------ a step in pieces

    def entry(self, requests: Sequence[RequestId], given: Given = None) -> Routing:
        """Embedding, attention and gate of layer 0.  ``given``: experts to use instead of the gate's."""
        members = [self.requests[r] for r in requests]
        for part in self._parts(members):
            n = len(part.members)
            fill = [0] * (self.tile - n)
            fed = self._to_device([[m.token for m in part.members] + fill, [m.position for m in part.members] + fill])
            hidden = self.model.model.embed_tokens(fed[0])
            self._residual.index_copy_(0, part.index, hidden[:n])
            for kind, pair in self.family.rotary(self.model, hidden, fed[1][:, None]).items():
                for rows, values in zip(self._rotary[kind], pair, strict=True):
                    rows.index_copy_(0, part.index, values[:n, 0])
        return self._attend(0, members, given)

    def job(
        self, layer: int, requests: Sequence[RequestId], weights_of: WeightsOf, given: Given = None
    ) -> Routing | None:
        """MoE of ``layer``, then attention and gate of the next one; None after the last layer."""
        members = [self.requests[r] for r in requests]
        users = users_of_experts([m.slot for m in members], [m.chosen for m in members])
        parts = self._parts(members)
        for part in parts:
            self._routed.index_fill_(0, part.padded, 0.0)
        add_experts(
            self._routed,
            self._x,
            self._mix,
            users,
            weights_of=weights_of,
            activation=self.activation,
            tile=self.tile,
        )
        for part in parts:
            rows = (t.index_select(0, part.padded) for t in (self._residual, self._x, self._routed))
            merged = self.layers[layer].merge(*rows)
            self._residual.index_copy_(0, part.index, merged[: len(part.members)])
        if layer + 1 < len(self.layers):
            return self._attend(layer + 1, members, given)
        self.settle()
        return None

    def head(self, requests: Sequence[RequestId]) -> Tensor:
        """Logits of every request's next token, [n, V]."""
        logits = [
            self.family.logits(self.model, self._residual.index_select(0, part.padded))[: len(part.members)]
            for part in self._parts([self.requests[r] for r in requests])
        ]
        return torch.cat(logits)

    # ------------------------------------------------------------------ attention and gate

    def _attend(self, layer: int, members: list[_Request], given: Given) -> Routing:
        block = self.layers[layer]
        cos, sin = self._rotary[block.rotary_key]
        answers = []
        for part in self._parts(members):
            here = (cos.index_select(0, part.padded)[:, None], sin.index_select(0, part.padded)[:, None])
            rotary = {block.rotary_key: here}
            residual = self._residual.index_select(0, part.padded)
            residual = block.attend(residual[:, None], rotary, part.turn(self.states))[:, 0]
            answers.append(self._gate(layer, residual, part, given))
        rows = self._to_host(torch.cat(answers))
        return self._routing(layer, members, rows, given)

    def _gate(self, layer: int, residual: Tensor, part: _Part, given: Given) -> Tensor:
        """Gate one tile and keep its rows; returns what the host must know, [n, k (+ 2 x predict) (+ E)]."""
        block, k, n = self.layers[layer], self.spec.top_k, len(part.members)
        x = block.expert_input(residual)
        scores = block.scores(residual, x)
        own = chosen = scores.topk(k, dim=-1).indices
        if given is not None:
            filler = [list(range(k))] * (self.tile - n)
            chosen = self._to_device([*given[part.first : part.first + n], *filler])
        weights = block.weights(scores, chosen)
        mix = torch.zeros_like(scores).scatter_(1, chosen, weights)
        for kept, rows in ((self._residual, residual), (self._x, x), (self._mix, mix)):
            kept.index_copy_(0, part.index, rows[:n])
        if self.listener is not None:
            self.listener(layer, [m.slot for m in part.members], GateRows(chosen, weights, scores, residual, x))
        answer = [own]
        if self._predicts(layer):
            ahead = self.layers[layer + 1].scores(residual, x).topk(self.predict, dim=-1)
            answer += [ahead.indices, ahead.values]
        if self.shows_scores:
            answer.append(scores)
        return torch.cat([t[:n].double() for t in answer], dim=1) if len(answer) > 1 else own[:n]

    def _routing(self, layer: int, members: list[_Request], rows: list[list[float]], given: Given) -> Routing:
        k, n_ahead = self.spec.top_k, self.predict
        own = [[int(e) for e in row[:k]] for row in rows]
        chosen = own if given is None else [list(g) for g in given]
        for member, experts in zip(members, chosen, strict=True):
            member.chosen = experts
        predicted: list[tuple[Prediction, ...]] = [()] * len(rows)
        if self._predicts(layer):
            base = (layer + 1) * self.spec.n_experts
            predicted = [
                tuple((base + int(e), s) for e, s in zip(row[k : k + n_ahead], row[k + n_ahead :], strict=True))
                for row in rows
            ]
        foreign = 0 if given is None else sum(len({*c} - {*o}) for c, o in zip(chosen, own, strict=True))
        scores = [row[-self.spec.n_experts :] for row in rows] if self.shows_scores else ()
        return Routing(chosen, predicted, foreign, scores)

    def _predicts(self, layer: int) -> bool:
        return self.predict > 0 and layer + 1 < len(self.layers)

    # ------------------------------------------------------------------ rows and copies

    def _parts(self, members: list[_Request]) -> list[_Part]:
        tensors = self._index(tuple(m.slot for m in members))
        starts = range(0, len(members), self.tile)
        return [_Part(i, members[i : i + self.tile], *t) for i, t in zip(starts, tensors, strict=True)]

    def _make_index(self, slots: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        cut = tiles(slots, self.tile, self._pad)
        counts = [min(self.tile, len(slots) - i) for i in range(0, len(slots), self.tile)]
        return [(p, p[:n]) for p, n in zip(self._to_device(cut).unbind(), counts, strict=True)]

    def _to_device(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values).to(self.device, non_blocking=True)

    def _to_host(self, values: Tensor) -> list[Any]:
        """The batch's one answer: an asynchronous copy and an event, never a device-wide wait."""
        if self.device.type != "cuda":
            return values.tolist()
        answer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        answer.copy_(values, non_blocking=True)
        self.settle()
        return answer.tolist()

    def settle(self) -> None:
        """Wait until this thread's stream has done what it was given; then slots may be read over."""
        if self.device.type == "cuda":
            done = torch.cuda.Event(blocking=False)
            done.record()
            done.synchronize()

    # ------------------------------------------------------------------ the row rule

    def products(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight [N, K] of every matrix product of the decode path."""
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                yield name, weight
        for name, shape in (
            ("expert gate_up", (2 * self.intermediate, self.hidden)),
            ("expert down", (self.hidden, self.intermediate)),
        ):
            yield name, torch.randn(shape, device=self.device).to(self.dtype)

    def check_rows(self) -> int:
        """Test the row rule on this model's real shapes; returns the number of products tested.

        Raises RowRuleError.
        """
        return check_products(self.products(), self.tile)

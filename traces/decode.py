"""Batched decoding of a transformers model with its own KV cache, giving each request's routing as it goes.

Owns the loop, padding and sampling.  Knows no data set and no file: rows go to a function.  Requests of one batch are
padded on the left; what a router says about padding, or about a request that has ended, is never given on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from traces.format import DECODE, NEXT_NORM_SCORES, NEXT_SCORES, PREFILL, Array
from traces.hooks import Gates, RouterHooks

FLUSH_STEPS = 16
"""Decode steps whose rows wait on the device before they are given on together."""

Give = Callable[[int, Mapping[str, Array]], None]
"""Hears a request's number and its next rows by column, ``experts`` among them."""


@dataclass(slots=True)
class Request:
    """One request: ``steps`` decode tokens at most; ``stops``: tokens that end it earlier.

    ``fed``: decode tokens so far; ``ended``: it is done.
    """

    number: int
    prompt: Sequence[int]
    steps: int
    stops: Collection[int] = ()
    seed: int = 0
    temperature: float = 0.0
    fed: int = 0
    ended: bool = False
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, self.number])

    def choose(self, logits: Array) -> int:
        """The next token: the likeliest, or drawn by the request's own generator (Gumbel's trick)."""
        if not self.temperature:
            return int(logits.argmax())
        noise = -np.log(self.rng.exponential(size=logits.shape))
        return int((logits.astype(np.float64) / self.temperature + noise).argmax())


def decode(
    model: Any, hooks: RouterHooks, requests: Sequence[Request], give: Give, *, columns: Collection[str], prefill: bool
) -> Iterator[int]:
    """Decode a batch to its end; yields after each step how many requests it advanced.

    ``columns``: optional columns to give, of ``traces.format``; ``prefill``: give rows of the prompts' tokens too.
    """
    device = model.device
    longest = max(len(request.prompt) for request in requests)
    fed = torch.zeros(len(requests), longest, dtype=torch.long)
    seen = torch.zeros(len(requests), longest + max(request.steps for request in requests), dtype=torch.long)
    for row, request in enumerate(requests):
        fed[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
        seen[row, longest - len(request.prompt) :] = 1
    fed, seen = fed.to(device), seen.to(device)
    positions = (seen.cumsum(1) - 1).clamp(min=0)

    forward = _Forward(model)
    hooks.active = prefill
    logits = forward(fed, seen[:, :longest], positions[:, :longest])
    if prefill:
        rows = _columns(hooks.take(), columns, fed.flatten(), PREFILL)
        for row, request in enumerate(requests):
            begin, end = (row + 1) * longest - len(request.prompt), (row + 1) * longest
            give(request.number, {name: _numpy(values[begin:end], name) for name, values in rows.items()})
    hooks.active = True

    waiting: list[tuple[list[bool], dict[str, Tensor]]] = []
    at = longest
    while True:
        tokens = [0 if r.ended else r.choose(row) for r, row in zip(requests, logits, strict=True)]
        for request, token in zip(requests, tokens, strict=True):
            request.ended |= request.fed == request.steps or (token in request.stops and request.fed > 0)
        alive = [not request.ended for request in requests]
        if not any(alive):
            break
        fed = torch.tensor(tokens, device=device)[:, None]
        logits = forward(fed, seen[:, : at + 1], positions[:, at : at + 1])
        waiting.append((alive, _columns(hooks.take(), columns, fed[:, 0], DECODE if prefill else None)))
        at += 1
        for request in requests:
            request.fed += not request.ended
        if len(waiting) == FLUSH_STEPS:
            _flush(requests, waiting, give)
        yield sum(alive)
    _flush(requests, waiting, give)


class _Forward:
    """The model's forward with its cache, whatever the family calls it; logits of the last token on the host."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(model.forward).parameters
        self._model = model
        self._name = "cache" if "cache" in names else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1

    def __call__(self, tokens: Tensor, seen: Tensor, positions: Tensor) -> Array:
        """[requests, new tokens] -> logits [requests, vocabulary], float32."""
        out = self._model(input_ids=tokens, attention_mask=seen, position_ids=positions, **self._options)
        self._options[self._name] = getattr(out, "cache", None) or out.past_key_values
        logits: Array = out.logits[:, -1].float().cpu().numpy()
        return logits


def _columns(gates: Gates, columns: Collection[str], tokens: Tensor, phase: int | None) -> dict[str, Tensor]:
    """Rows of one forward by column, on the device."""
    rows: dict[str, Tensor] = {"experts": gates.ids}
    if phase is not None:
        rows["phase"] = torch.full_like(tokens, phase)
    found = {"token_id": tokens, "weights": gates.weights, "scores": gates.scores, "hidden": gates.hidden}
    found |= dict(zip(NEXT_SCORES, gates.ahead, strict=False))
    found |= dict(zip(NEXT_NORM_SCORES, gates.ahead_in_norm, strict=False))
    for name in columns:
        values = found[name]
        assert values is not None, f"the hooks were not asked for {name}"
        rows[name] = values
    return rows


def _flush(requests: Sequence[Request], waiting: list[tuple[list[bool], dict[str, Tensor]]], give: Give) -> None:
    if not waiting:
        return
    names = waiting[0][1]
    stacked = {name: _numpy(torch.stack([rows[name] for _, rows in waiting]), name) for name in names}
    alive = np.array([alive for alive, _ in waiting])
    for row, request in enumerate(requests):
        if alive[:, row].any():
            give(request.number, {name: values[alive[:, row], row] for name, values in stacked.items()})
    waiting.clear()


def _numpy(values: Tensor, name: str) -> Array:
    """On the host, in the type of the trace's column."""
    if name in ("experts", "phase", "token_id"):
        kind = {"experts": np.uint16, "phase": np.uint8, "token_id": np.int32}[name]
        whole: Array = values.to(torch.int32).cpu().numpy().astype(kind)
        return whole
    half: Array = values.to(torch.float16).cpu().numpy()
    return half

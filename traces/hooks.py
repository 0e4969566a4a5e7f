"""What a model's routers say while it runs: one forward hook on every router module, found by structure.

Owns the search for MoE layers and the values taken from one forward.  Knows no family by name, no request and no file.
A router is a child ``gate`` or ``router`` of a module with a child ``experts``; it returns a first output [T, E],
mixing weights [T, k] and expert ids [T, k].  T counts batch x tokens, request by request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from policies.core.types import UserError

ROUTERS = ("gate", "router")
NORM = "post_attention_layernorm"
"""The norm whose output routers read, in every family whose router has no norm of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer:
    """``index``: of the decoder layer, dense ones counted; ``block``: that decoder layer."""

    index: int
    name: str
    router: nn.Module
    block: nn.Module


def find_moe_layers(model: nn.Module) -> list[MoeLayer]:
    """The MoE layers of a model in order.  Raises UserError if there are none."""
    found = []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        children = dict(module.named_children())
        place = re.search(r"^(.*\blayers\.(\d+))(?:\.|$)", path)
        name = next((name for name in ROUTERS if name in children), None)
        if place and name and "experts" in children:
            found.append(MoeLayer(int(place[2]), f"{path}.{name}", children[name], modules[place[1]]))
    if not found:
        raise UserError(
            f"{type(model).__name__} has no MoE layer (a module with the children experts and {' or '.join(ROUTERS)}); "
            f"give a Mixture-of-Experts model of transformers 5"
        )
    return sorted(found, key=lambda layer: layer.index)


def norms_differ(layers: Sequence[MoeLayer]) -> bool:
    """Whether a later layer's norm gives its router something else to read than this layer's does.

    Not where routers have a norm of their own, and so read the residual itself (Gemma 4).
    """
    own = any(hasattr(layer.router, "norm") for layer in layers)
    return not own and all(hasattr(layer.block, NORM) for layer in layers)


@dataclass(slots=True, eq=False)
class Gates:
    """Values of one forward; every tensor is [T, layers, ...] on the model's device.  ``ids``: best first.

    ``ahead[d - 1]``: scores of gate l + d on what gate l read, zeros in the last d layers.  ``ahead_in_norm``: the same
    on the residual behind it, in the norm of layer l + d.
    ``hidden``: [T, layers + 1, H], what enters each MoE layer and what leaves the last.
    """

    ids: Tensor
    weights: Tensor
    scores: Tensor
    ahead: list[Tensor]
    ahead_in_norm: list[Tensor]
    hidden: Tensor | None


class RouterHooks:
    """Hooks on a model for as long as the context is open; ``take`` gives the values of the last forward.

    ``distance``: how many later gates to try on each gate's input; ``norm_distance``: how many on the residual behind
    it in the later layer's own norm, which must be 0 where ``norms_differ`` is False.
    """

    def __init__(self, model: nn.Module, *, distance: int = 0, norm_distance: int = 0, hidden: bool = False) -> None:
        self.layers = find_moe_layers(model)
        self.active = True
        self._distance, self._norm_distance, self._hidden = distance, norm_distance, hidden
        self._handles: list[Any] = []
        self._calls: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._ahead: dict[tuple[int, int], Tensor] = {}
        self._ahead_in_norm: dict[tuple[int, int], Tensor] = {}
        self._residual: dict[int, Tensor] = {}
        self._boundary: dict[int, Tensor] = {}

    def __enter__(self) -> RouterHooks:
        for at, layer in enumerate(self.layers):
            self._handles.append(layer.router.register_forward_hook(self._on_router(at), with_kwargs=True))
            if self._norm_distance:
                norm = getattr(layer.block, NORM)
                self._handles.append(norm.register_forward_pre_hook(self._on_norm(at)))
            if self._hidden:
                self._handles.append(layer.block.register_forward_pre_hook(self._on_entry(at), with_kwargs=True))
        if self._hidden:
            self._handles.append(self.layers[-1].block.register_forward_hook(self._on_exit))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def take(self) -> Gates:
        """The values of the forward that has just ended.  Raises UserError if a router was not called once."""
        calls = [self._calls.get(at) for at in range(len(self.layers))]
        missing = [layer.name for layer, call in zip(self.layers, calls, strict=True) if call is None]
        if missing:
            raise UserError(
                f"the router {missing[0]} was not called: a kernel replaces its block or the model is compiled; "
                f"load the model without kernels and without torch.compile"
            )
        made = [call for call in calls if call is not None]
        ids, weights, scores = (torch.stack([call[i] for call in made], 1) for i in range(3))
        order = torch.argsort(scores.gather(-1, ids), dim=-1, descending=True, stable=True)  # some routers do not sort
        ids, weights = ids.gather(-1, order), weights.gather(-1, order)
        zeros = torch.zeros_like(made[0][2])

        def stacked(found: dict[tuple[int, int], Tensor], most: int) -> list[Tensor]:
            places = range(len(made))
            return [torch.stack([found.get((at, d), zeros) for at in places], 1) for d in range(1, most + 1)]

        ahead = stacked(self._ahead, self._distance)
        ahead_in_norm = stacked(self._ahead_in_norm, self._norm_distance)
        hidden = None
        if self._hidden:
            hidden = torch.stack([self._boundary[at] for at in range(len(made) + 1)], 1)
        gates = Gates(ids, weights, scores, ahead, ahead_in_norm, hidden)
        self.clear()
        return gates

    def clear(self) -> None:
        """Forget the last forward."""
        for store in (self._calls, self._ahead, self._ahead_in_norm, self._residual, self._boundary):
            store.clear()

    def _on_router(self, at: int) -> Any:
        def hook(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
            if self.active:
                self._called(at, args[0] if args else kwargs["hidden_states"], output)

        return hook

    def _called(self, at: int, read: Tensor, output: Any) -> None:
        layer = self.layers[at]
        if not (isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point()):
            raise UserError(
                f"the router {layer.name} ({type(layer.router).__name__}) does not return (scores, weights, ids), so "
                f"its choice cannot be recorded; give a model of another family"
            )
        if at in self._calls:
            raise UserError(f"the router {layer.name} was called twice in one forward; give a model that calls it once")
        first, weights, ids = output
        self._calls[at] = (ids.detach(), weights.detach(), ranking(layer.router, first.detach()))
        for distance, later in enumerate(self.layers[at + 1 :], 1):
            if distance <= self._distance:
                self._ahead[at, distance] = _tried(later.router, read)
            if distance <= self._norm_distance:
                seen = getattr(later.block, NORM).forward(self._residual[at])
                self._ahead_in_norm[at, distance] = _tried(later.router, seen.reshape(read.shape))

    def _on_norm(self, at: int) -> Any:
        def hook(module: nn.Module, args: Sequence[Any]) -> None:
            if self.active:
                self._residual[at] = args[0]

        return hook

    def _on_entry(self, at: int) -> Any:
        def hook(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
            if self.active:
                self._boundary[at] = _rows(args[0] if args else kwargs["hidden_states"])

        return hook

    def _on_exit(self, module: nn.Module, args: Sequence[Any], output: Any) -> None:
        if self.active:
            self._boundary[len(self.layers)] = _rows(output[0] if isinstance(output, tuple) else output)


def _tried(router: nn.Module, read: Tensor) -> Tensor:
    """What a router would say; past its hook, for this is no call of the model."""
    return ranking(router, router.forward(read.detach())[0].detach())


def _rows(hidden: Tensor) -> Tensor:
    return hidden.detach().reshape(-1, hidden.shape[-1])


def ranking(router: nn.Module, first: Tensor) -> Tensor:
    """Scores in whose order the router ranks experts, [T, E]: its first output, or sigmoid plus bias where it has one.

    The bias (DeepSeek-V3, GLM) takes part in the choice and not in the mixing weights.
    """
    bias = getattr(router, "e_score_correction_bias", None)
    scores = first.reshape(-1, first.shape[-1])
    return scores if bias is None else scores.float().sigmoid() + bias


def kind_of_scores(router: nn.Module, gates: Gates) -> str:
    """What the column of scores holds: logits, probabilities, or sigmoid plus bias."""
    if getattr(router, "e_score_correction_bias", None) is not None:
        return "sigmoid plus bias"
    first = gates.scores[:, 0].float()
    ones = torch.allclose(first.sum(-1), torch.ones(len(first), device=first.device), atol=1e-2)
    return "probabilities" if ones and bool((first >= 0).all()) else "logits"

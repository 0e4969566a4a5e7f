"""The experts of one group of requests, by the row rule.

Each expert runs over tiles of its own rows, and a row's contributions are added in ascending expert
number in float32, so neither the group nor the order in which experts arrived shows in the result.
Does not know layers, caches or where the weights lie.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from executor.rows import tiles


class ExpertWeights(NamedTuple):
    """One gated MLP; ``gate_up`` has the gate's rows first.  Both are [out, in] and contiguous."""

    gate_up: Tensor  # [2 * I, H]
    down: Tensor  # [H, I]


Activation = Callable[[Tensor], Tensor]

WeightsOf = Callable[[int], ExpertWeights]
"""An expert's weights by its number within the layer; asked once for each expert of a group, in ascending order."""


def expert_mlp(x: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """``down(activation(gate(x)) * up(x))``, [rows, H] -> [rows, H]."""
    gate, up = functional.linear(x, weights.gate_up).chunk(2, dim=-1)
    return functional.linear(activation(gate) * up, weights.down)


def users_of_experts(rows: Sequence[int], chosen: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Expert number -> the rows that chose it, in ascending expert number."""
    users: dict[int, list[int]] = {}
    for row, experts in zip(rows, chosen, strict=True):
        for expert in experts:
            users.setdefault(expert, []).append(row)
    return dict(sorted(users.items()))


def add_experts(
    out: Tensor,
    x: Tensor,
    mix: Tensor,
    users: Mapping[int, Sequence[int]],
    *,
    weights_of: WeightsOf,
    activation: Activation,
    tile: int,
) -> None:
    """Add every expert's weighted output to the rows that chose it.

    ``out``: [R + 1, H] float32.  ``x``: [R + 1, H] expert inputs.  ``mix``: [R + 1, E] float32 mixing
    weights, zero where an expert was not chosen.  The last row of each is the padding: zero input,
    zero weights.  ``users``: expert number -> rows, ascending.  Passes on KeyError from ``weights_of``
    for an expert that is not there.
    """
    pad = x.shape[0] - 1
    cut = [tiles(rows, tile, pad) for rows in users.values()]
    index = iter(torch.tensor([part for parts in cut for part in parts]).to(x.device, non_blocking=True).unbind())
    for expert, parts in zip(users, cut, strict=True):
        weights = weights_of(expert)
        for rows in itertools.islice(index, len(parts)):
            y = expert_mlp(x.index_select(0, rows), weights, activation)
            share = mix.select(1, expert).index_select(0, rows)
            # The rows of a tile are distinct but for the padding, which adds zeros: no race decides a bit.
            out.index_add_(0, rows, y.float().mul_(share[:, None]))

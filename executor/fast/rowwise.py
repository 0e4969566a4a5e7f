"""What happens to single rows between the products, on plain torch: residual stream, norms, gated activations.

These functions say what ``executor.fast.rowwise_triton`` must compute; they run anywhere and are not fast.  All
arithmetic is float32, rounded once where a result is stored.  ``rows[t]`` is the request row of token t, or -1 for
padding, for which nothing is read or written.  Every token is computed by itself, by the same operations whatever the
group, so a token's bits do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from executor.kernels.values import Activation, plane_order


@dataclass(frozen=True, slots=True)
class Update:
    """What is added to the residual stream: ``merged(routed + gate * dense) * scale``, each part optional.

    ``routed``: [T, H] float32; ``dense``: [T, H]; ``gate``: [T], before the sigmoid, any stride.  Norms: [H] float32.
    """

    routed: Tensor | None = None
    routed_norm: Tensor | None = None
    dense: Tensor | None = None
    dense_norm: Tensor | None = None
    gate: Tensor | None = None
    merged_norm: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """Where the residual stream begins: ``table[tokens[t]] * scale``."""

    table: Tensor
    tokens: Tensor
    scale: float


class Normed(NamedTuple):
    """Where a normed row goes, ``out`` [T, H], and the norm's factors [H]; ``planes``: in the order of Q4_0 kernels."""

    out: Tensor
    weight: Tensor
    planes: bool = False


def update_rows(
    residual: Tensor, rows: Tensor, eps: float, source: Update | Embedding | None, outs: tuple[Normed, ...] = ()
) -> None:
    """Bring ``residual`` [R, H] float32 up to date at ``rows``, then write its norms, at most two, to ``outs``."""
    for t, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        if isinstance(source, Embedding):
            residual[row] = source.table[source.tokens[t]].float() * source.scale
        elif source is not None:
            residual[row] = _updated(residual[row], source, t, eps)
        for out, weight, planes in outs:
            normed = _normed(residual[row], eps) * weight
            out[t] = normed[plane_order(len(normed)).to(normed.device)] if planes else normed


def _updated(residual: Tensor, update: Update, t: int, eps: float) -> Tensor:
    parts = []
    for values, weight in ((update.routed, update.routed_norm), (update.dense, update.dense_norm)):
        if values is not None:
            part = values[t].float()
            parts.append(part if weight is None else _normed(part, eps) * weight)
    if update.gate is not None:
        parts[-1] = parts[-1] * torch.sigmoid(update.gate[t].float())
    added = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    if update.merged_norm is not None:
        added = _normed(added, eps) * update.merged_norm
    return (residual + added) * update.scale


def _normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def gate_and_up(gate_up: Tensor, width: int, activation: Activation, out: Tensor) -> None:
    """``out`` [T, width] = activation(gate) * up, of ``gate_up`` [T, >= 2 * width]."""
    gate, up = gate_up[:, :width].float(), gate_up[:, width : 2 * width].float()
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    out.copy_(active * up)

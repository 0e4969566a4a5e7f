"""``executor.fast.rowwise`` in Triton: the same functions, for a GPU and for graphs (no allocation, no wait).

One program a token.  Needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor.fast.rowwise import Embedding, Normed, Update
from executor.kernels.launch import launch
from executor.kernels.maths import activated, as_half, let_next_begin, wait_for_previous
from executor.kernels.planes import plane_position
from executor.kernels.values import Activation

_GATE_BLOCK = 512


@triton.jit
def _normed(x, H: tl.constexpr, eps):
    return x * tl.rsqrt(tl.sum(x * x) / H + eps)


@triton.jit
def _store_normed(out, normed, weight, column, inside, H: tl.constexpr, PLANES: tl.constexpr):
    value = normed * tl.load(weight + column, mask=inside, other=0.0)
    if PLANES:
        tl.store(out + plane_position(column, H), as_half(value), mask=inside)
    else:
        tl.store(out + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _part(source, norm, column, inside, eps, H: tl.constexpr, NORM: tl.constexpr):
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        value = _normed(value, H, eps) * tl.load(norm + column, mask=inside, other=0.0)
    return value


@triton.jit
def _update(
    residual,
    rows,
    table,
    tokens,
    table_scale,
    routed,
    routed_norm,
    dense,
    dense_norm,
    gate,
    gate_stride,
    merged_norm,
    scale,
    out_0,
    norm_0,
    out_1,
    norm_1,
    eps,
    EMBED: tl.constexpr,
    ROUTED: tl.constexpr,
    ROUTED_NORM: tl.constexpr,
    DENSE: tl.constexpr,
    DENSE_NORM: tl.constexpr,
    GATE: tl.constexpr,
    MERGED_NORM: tl.constexpr,
    OUTS: tl.constexpr,
    PLANES_0: tl.constexpr,
    PLANES_1: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    t = tl.program_id(0)
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.load(rows + t)
    if row >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < H
        stream = residual + row.to(tl.int64) * H + column
        if EMBED:
            embedded = table + tl.load(tokens + t).to(tl.int64) * H + column
            value = tl.load(embedded, mask=inside, other=0.0).to(tl.float32) * table_scale
        else:
            value = tl.load(stream, mask=inside, other=0.0)
        if ROUTED or DENSE:
            added = tl.zeros([BLOCK], tl.float32)
            if ROUTED:
                added += _part(routed + t * H, routed_norm, column, inside, eps, H, ROUTED_NORM)
            if DENSE:
                part = _part(dense + t * H, dense_norm, column, inside, eps, H, DENSE_NORM)
                if GATE:
                    part = part * tl.sigmoid(tl.load(gate + t * gate_stride).to(tl.float32))
                added += part
            if MERGED_NORM:
                added = _normed(added, H, eps) * tl.load(merged_norm + column, mask=inside, other=0.0)
            value = (value + added) * scale
        if EMBED or ROUTED or DENSE:
            tl.store(stream, value, mask=inside)
        if OUTS > 0:
            normed = _normed(value, H, eps)
            _store_normed(out_0 + t * H, normed, norm_0, column, inside, H, PLANES_0)
            if OUTS > 1:
                _store_normed(out_1 + t * H, normed, norm_1, column, inside, H, PLANES_1)


def update_rows(
    residual: Tensor,
    rows: Tensor,
    eps: float,
    source: Update | Embedding | None,
    outs: tuple[Normed, ...] = (),
    *,
    early: bool = False,
) -> None:
    """See ``executor.fast.rowwise``."""
    u = source if isinstance(source, Update) else Update()
    e = source if isinstance(source, Embedding) else None
    out_0, out_1 = (*outs, *[Normed(residual, residual)] * (2 - len(outs)))
    hidden = residual.shape[1]

    def given(tensor: Tensor | None) -> Tensor:  # in the place of what is not there: the kernel does not follow it
        return residual if tensor is None else tensor

    launch(
        _update,
        (rows.shape[0],),
        residual,
        rows,
        given(None if e is None else e.table),
        rows if e is None else e.tokens,
        1.0 if e is None else e.scale,
        given(u.routed),
        given(u.routed_norm),
        given(u.dense),
        given(u.dense_norm),
        given(u.gate),
        0 if u.gate is None else u.gate.stride(0),
        given(u.merged_norm),
        u.scale,
        out_0.out,
        out_0.weight,
        out_1.out,
        out_1.weight,
        eps,
        e is not None,
        u.routed is not None,
        u.routed_norm is not None,
        u.dense is not None,
        u.dense_norm is not None,
        u.gate is not None,
        u.merged_norm is not None,
        len(outs),
        out_0.planes,
        out_1.planes,
        hidden,
        triton.next_power_of_2(hidden),
        early,
        warps=8,
        early=early,
    )


@triton.jit
def _gate_and_up(
    gate_up, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr
):
    t = tl.program_id(0)
    wait_for_previous(EARLY)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + t * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + t * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + t * WIDTH + column, (activated(gate, GELU) * up).to(out.dtype.element_ty), mask=inside)


def gate_and_up(gate_up: Tensor, width: int, activation: Activation, out: Tensor, *, early: bool = False) -> None:
    """See ``executor.fast.rowwise``."""
    grid = (gate_up.shape[0], -(-width // _GATE_BLOCK))
    gelu = activation == "gelu_tanh"
    launch(_gate_and_up, grid, gate_up, out, gate_up.stride(0), width, _GATE_BLOCK, gelu, early, early=early)

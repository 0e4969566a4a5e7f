"""Experts in bf16 or float32 on vector units, in float32 arithmetic, pair by pair.

At up to 16 tokens the weights' bytes decide.  What is read again for another pair comes from the L2 cache; reading once
for two pairs of one expert was slower (docs/kernels.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import activated, let_next_begin, wait_for_previous
from executor.kernels.values import ExpertsScratch, ExpertsShape


@triton.jit
def _gate_up(
    x,
    arena,
    slots,
    inner,
    x_stride,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (pairs, I / ROWS)."""
    let_next_begin(True)
    pair = tl.program_id(0)
    slot = tl.load(slots + pair)
    wait_for_previous(EARLY)
    if slot >= 0:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        here = (row < I)[:, None]
        source = x + (pair // K) * x_stride
        base = arena + slot.to(tl.int64) * STRIDE + row[:, None] * H + column[None, :]
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.static_range(0, H, COLUMNS):
            ok = i + column < H
            if i + COLUMNS <= H and I % ROWS == 0:
                g = tl.load(base + i).to(tl.float32)
                u = tl.load(base + I * H + i).to(tl.float32)
            else:
                g = tl.load(base + i, mask=here & ok[None, :], other=0.0).to(tl.float32)
                u = tl.load(base + I * H + i, mask=here & ok[None, :], other=0.0).to(tl.float32)
            value = tl.load(source + i + column, mask=ok, other=0.0).to(tl.float32)[None, :]
            gate += g * value
            up += u * value
        tl.store(inner + pair * I + row, activated(tl.sum(gate, 1), GELU) * tl.sum(up, 1), mask=row < I)


@triton.jit
def _down(
    inner,
    arena,
    slots,
    rows,
    mix,
    out,
    mix_stride,
    out_stride,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tokens, H / ROWS): all experts of a token one after the other, so that the sum has a fixed order."""
    let_next_begin(True)
    token = tl.program_id(0)
    request = tl.load(rows + token)
    wait_for_previous(True)
    if request >= 0:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        here = (row < H)[:, None]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for j in tl.static_range(K):
            pair = token * K + j
            slot = tl.load(slots + pair)
            width = tl.where(slot >= 0, I, 0)  # of a pair that counts nothing, nothing is read
            start = tl.maximum(slot, 0).to(tl.int64) * STRIDE + 2 * I * H
            base = arena + start + row[:, None] * I + column[None, :]
            weight = tl.load(mix + request.to(tl.int64) * mix_stride + j)
            for i in tl.static_range(0, I, COLUMNS):
                ok = i + column < width
                value = tl.load(inner + pair * I + i + column, mask=ok, other=0.0)[None, :] * weight
                total += tl.load(base + i, mask=here & ok[None, :], other=0.0).to(tl.float32) * value
        tl.store(out + token * out_stride + row, tl.sum(total, 1), mask=row < H)


@dataclass(frozen=True, slots=True)
class FloatTuning:
    """Rows and warps do not change a row's bits; columns do, so that they are one for all group sizes."""

    up_rows: int
    up_columns: int
    up_warps: int
    down_rows: int
    down_columns: int
    down_warps: int


def tuning_of(shape: ExpertsShape) -> FloatTuning:
    """What was fastest on an H200 for Qwen3.6's and Gemma4's sizes (docs/kernels.md)."""
    hidden, inner = (triton.next_power_of_2(k) for k in (shape.geometry.hidden, shape.geometry.intermediate))
    if hidden > 2048:
        return FloatTuning(4, 512, 4, 8, min(64, inner), 4)
    return FloatTuning(2, min(512, hidden), 4, 8, min(512, inner), 8)


def float_experts(
    shape: ExpertsShape,
    x: Tensor,
    arena: Tensor,
    slots: Tensor,
    rows: Tensor,
    mix: Tensor,
    scratch: ExpertsScratch,
    out: Tensor,
    *,
    early: bool = False,
    tuning: FloatTuning | None = None,
) -> None:
    """See ``executor.kernels.experts.experts``."""
    g, k = shape.geometry, shape.top_k
    weights = arena.view(torch.bfloat16 if g.dtype == "bf16" else torch.float32)
    stride = g.stride_bytes // weights.element_size()
    n = rows.shape[0]
    tuning = tuning or tuning_of(shape)
    launch(
        _gate_up,
        (n * k, -(-g.intermediate // tuning.up_rows)),
        x,
        weights,
        slots,
        scratch.inner,
        x.stride(0),
        stride,
        g.hidden,
        g.intermediate,
        k,
        shape.activation == "gelu_tanh",
        tuning.up_rows,
        tuning.up_columns,
        early,
        warps=tuning.up_warps,
        early=early,
    )
    launch(
        _down,
        (n, -(-g.hidden // tuning.down_rows)),
        scratch.inner,
        weights,
        slots,
        rows,
        mix,
        out,
        mix.stride(0),
        out.stride(0),
        stride,
        g.hidden,
        g.intermediate,
        k,
        tuning.down_rows,
        tuning.down_columns,
        warps=tuning.down_warps,
        early=True,
    )

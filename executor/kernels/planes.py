"""Inputs of the Q4_0 kernels: fp16 in the order of ``values.plane_order``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import as_half


@triton.jit
def plane_position(column, K: tl.constexpr):
    """Where weight ``column`` of a row of length K has its input: the inverse of ``values.plane_order``."""
    inside = column % 32
    half = inside % 16
    return (2 * (half % 2) + inside // 16) * (K // 4) + 8 * (column // 32) + half // 2


@triton.jit
def _to_planes(x, planes, x_stride, planes_stride, H: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * x_stride + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(planes + token * planes_stride + plane_position(column, H), as_half(value), mask=column < H)


def to_planes(x: Tensor, planes: Tensor) -> None:
    """``x`` [T, H] as fp16 planes, into ``planes`` [T, H]."""
    tokens, hidden = planes.shape
    launch(_to_planes, (tokens, -(-hidden // 1024)), x, planes, x.stride(0), planes.stride(0), hidden, 1024)

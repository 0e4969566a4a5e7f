"""RMS norms of the residual stream: of several weights at once, with what came before added first."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import as_half
from executor.kernels.planes import plane_position


@triton.jit
def _norm_out(value, weight, out, column, ok, WEIGHTED: tl.constexpr):
    if WEIGHTED:
        value = value * tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    result = value.to(out.dtype.element_ty)
    tl.store(out + column, result, mask=ok)
    return result


@triton.jit
def _rms_norm(
    x,
    rows,
    add,
    weight_0,
    weight_1,
    weight_2,
    out_0,
    out_1,
    out_2,
    planes,
    x_stride,
    add_stride,
    out_stride_0,
    out_stride_1,
    out_stride_2,
    planes_stride,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OUTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PLANES: tl.constexpr,
):
    token = tl.program_id(0)
    row = tl.load(rows + token)
    if row >= 0:
        column = tl.arange(0, BLOCK)
        ok = column < H
        source = x + row.to(tl.int64) * x_stride + column
        value = tl.load(source, mask=ok, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(add + token * add_stride + column, mask=ok, other=0.0).to(tl.float32)
            kept = value.to(x.dtype.element_ty)
            tl.store(source, kept, mask=ok)
            value = kept.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value) / H + eps)
        result = _norm_out(value, weight_0, out_0 + token * out_stride_0, column, ok, WEIGHTED % 2 == 1)
        if PLANES:
            position = plane_position(column, H)
            tl.store(planes + token * planes_stride + position, as_half(result.to(tl.float32)), mask=ok)
        if OUTS > 1:
            _norm_out(value, weight_1, out_1 + token * out_stride_1, column, ok, WEIGHTED // 2 % 2 == 1)
        if OUTS > 2:
            _norm_out(value, weight_2, out_2 + token * out_stride_2, column, ok, WEIGHTED // 4 % 2 == 1)


def rms_norm(
    x: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    *,
    eps: float,
    add: Tensor | None = None,
    planes: Tensor | None = None,
) -> None:
    """``outs[i][t] = x[rows[t]] / rms(x[rows[t]]) * weights[i]``, for one to three weights.

    ``x`` [R, H] by request row; ``outs`` [T, H] by token.  ``weights`` [H] as they multiply (families that store
    ``w - 1`` add the 1 before); None: no weight.  ``add`` [T, H]: added to ``x`` first, which keeps the sum.
    ``planes`` [T, H] fp16: the first output again, for Q4_0 experts (``values.plane_order``).
    """
    hidden, n = x.shape[1], rows.shape[0]
    flags = sum(1 << i for i, weight in enumerate(weights) if weight is not None)
    # Unused places of the argument list take any tensor: the kernel is compiled without a use of them.
    given = [x if weight is None else weight for weight in weights]
    given += [x] * (3 - len(weights))
    targets = [*outs, *[outs[0]] * (3 - len(outs))]
    launch(
        _rms_norm,
        (n,),
        x,
        rows,
        x if add is None else add,
        *given,
        *targets,
        outs[0] if planes is None else planes,
        x.stride(0),
        0 if add is None else add.stride(0),
        *[out.stride(0) for out in targets],
        0 if planes is None else planes.stride(0),
        eps,
        hidden,
        triton.next_power_of_2(hidden),
        add is not None,
        len(outs),
        flags,
        planes is not None,
        warps=8,
    )

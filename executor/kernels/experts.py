"""The experts of a group of 1 to 16 tokens, read in place from the slot arena.

A pair is a token with one of its experts.  Float experts run on vector units in float32; Q4_0 experts run on tensor
cores in groups of up to eight pairs that share a slot, found on the device.  Owns the choice between them.
"""

from __future__ import annotations

from torch import Tensor

from executor.kernels.experts_float import float_experts
from executor.kernels.experts_q4 import q4_experts
from executor.kernels.values import MAX_TOKENS, ExpertsScratch, ExpertsShape


def experts(
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
) -> None:
    """``out[t] = sum over j of mix[rows[t], j] * expert in slots[t, j] of x[t]``, j ascending.

    ``x`` [T, H]: the model's dtype for float experts; for Q4_0 fp16 planes (``values.plane_order``).  ``arena`` uint8,
    one expert every ``shape.stride_bytes``, of any size.  ``slots`` int32 [N, k], contiguous; -1: the pair counts
    nothing, and all pairs of padding must be -1.  ``rows`` int32 [N]: request rows, -1 is padding, whose rows of
    ``out`` stay as they are.  ``mix`` float32 [R, >= k].  ``out`` float32 [T, H].  ``early``: see ``launch.launch``;
    slots and rows must be older than the kernel before.  A token's bits depend only on its own x, experts and weights.
    """
    if rows.shape[0] > MAX_TOKENS:
        raise ValueError(f"{rows.shape[0]} tokens in one call, at most {MAX_TOKENS} are built")
    compute = q4_experts if shape.geometry.dtype == "q4_0" else float_experts
    compute(shape, x, arena, slots, rows, mix, scratch, out, early=early)

"""From projections to attention's operands: norms of q, k and v, rotary embedding, and the new place in the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import let_next_begin, wait_for_previous


@triton.jit
def _rotated(x, weight, cos, sin, eps, D: tl.constexpr, ROT: tl.constexpr, NORM: tl.constexpr):
    """One head: RMS norm, then the first ROT dimensions turned (halves form)."""
    d = tl.arange(0, D)
    turns = d < ROT
    partner = tl.where(turns, tl.where(d < ROT // 2, d + ROT // 2, d - ROT // 2), d)
    value = tl.load(x + d).to(tl.float32)
    other = tl.load(x + partner).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value) / D + eps)
        value = value * scale * tl.load(weight + d)
        other = other * scale * tl.load(weight + partner)
    c = tl.load(cos + d, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + d, mask=turns, other=0.0).to(tl.float32)
    return value * c + tl.where(d < ROT // 2, -other, other) * s


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    rows,
    positions,
    at,
    q_out,
    k_cache,
    v_cache,
    q_weight,
    k_weight,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    table_stride,
    out_token,
    out_head,
    cache_slot,
    cache_head,
    cache_place,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROT: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    NORM_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    wait_for_previous(EARLY)
    if row >= 0:
        d = tl.arange(0, D)
        position = tl.load(positions + token).to(tl.int64) * table_stride
        if head < HEADS:
            source = q + token * q_token + head * q_head
            value = _rotated(source, q_weight, cos + position, sin + position, eps, D, ROT, NORM_Q)
            tl.store(q_out + token * out_token + head * out_head + d, value.to(q_out.dtype.element_ty))
        else:
            kv = head - HEADS
            place = row.to(tl.int64) * cache_slot + kv * cache_head + tl.load(at + token).to(tl.int64) * cache_place
            source = k + token * k_token + kv * k_head
            value = _rotated(source, k_weight, cos + position, sin + position, eps, D, ROT, NORM_K)
            tl.store(k_cache + place + d, value.to(k_cache.dtype.element_ty))
            value = tl.load(v + token * v_token + kv * v_head + d).to(tl.float32)
            if NORM_V:
                value = value * tl.rsqrt(tl.sum(value * value) / D + eps)
            tl.store(v_cache + place + d, value.to(v_cache.dtype.element_ty))


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    positions: Tensor,
    at: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    eps: float,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_v: bool = False,
    early: bool = False,
) -> None:
    """Norm and turn q [T, heads, D] into ``q_out``, and k, v [T, kv heads, D] into the cache.

    ``q_weight``, ``k_weight`` float32 [D] as they multiply; None: no norm.  ``norm_v``: v has a norm without a weight.
    ``cos``, ``sin`` [P, rot]: the row ``positions[t]`` turns the first ``rot`` of D dimensions.  ``at`` [N]: the place
    in the cache ([slots, kv heads, room, D], both of the same strides) of request ``rows[t]``.  D is a power of two.
    """
    _, heads, dim = q.shape
    launch(
        _rotate_and_store,
        (rows.shape[0], heads + k.shape[1]),
        q,
        k,
        v,
        cos,
        sin,
        rows,
        positions,
        at,
        q_out,
        k_cache,
        v_cache,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos.stride(0),
        q_out.stride(0),
        q_out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        eps,
        heads,
        dim,
        cos.shape[1],
        q_weight is not None,
        k_weight is not None,
        norm_v,
        early,
        warps=2,
        early=early,
    )

"""The router: from gate logits to chosen experts and their mixing weights, for every family's rule."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import let_next_begin, wait_for_previous
from executor.kernels.values import TAG_BITS, MixRule

_TAG_BITS = tl.constexpr(TAG_BITS)
_LEAST = tl.constexpr(-3.0e38)
_WARPS = 1  # a few hundred scores: rounds of top-k within a warp need no shared memory


@triton.jit
def _route(
    logits,
    rows,
    mix,
    ids,
    expert_scale,
    sequence,
    given,
    logits_stride,
    mix_stride,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUNDING: tl.constexpr,
    SCALED: tl.constexpr,
    TAGGED: tl.constexpr,
    GIVEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    wait_for_previous(EARLY)
    if row >= 0:
        expert = tl.arange(0, BLOCK)
        rank = tl.arange(0, BLOCK_K)
        source = logits + token * logits_stride
        x = tl.load(source + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
        top = tl.max(x)
        total = tl.sum(tl.exp(x - top))
        # What is still free to be chosen stays above -inf, so that not even a gate of NaN names an expert twice.
        x = tl.where(expert < E, tl.where(x >= _LEAST, x, _LEAST), float("-inf"))
        chosen = tl.zeros([BLOCK_K], tl.int32)
        for j in tl.static_range(K):
            best = tl.argmax(x, 0, tie_break_left=True)
            x = tl.where(expert == best, float("-inf"), x)
            chosen = tl.where(rank == j, best, chosen)
        own = chosen
        if GIVEN:
            imposed = tl.load(given + token * K + rank, mask=rank < K, other=0)
            chosen = tl.where(tl.load(given + token * K) >= 0, imposed, own)
        weight = tl.exp(tl.load(source + chosen, mask=rank < K, other=float("-inf")).to(tl.float32) - top) / total
        if RENORMALISE:
            weight = weight / tl.sum(weight)
        if ROUNDING is not None:
            weight = weight.to(ROUNDING).to(tl.float32)
        if SCALED:
            weight = weight * tl.load(expert_scale + chosen).to(tl.float32)
        tl.store(mix + row.to(tl.int64) * mix_stride + rank, weight, mask=rank < K)
        if TAGGED:
            own = own | (tl.load(sequence) << _TAG_BITS)
        tl.store(ids + token * K + rank, own, mask=rank < K)


_ROUNDINGS = {None: None, torch.float32: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def route(
    logits: Tensor,
    rows: Tensor,
    mix: Tensor,
    ids: Tensor,
    rule: MixRule,
    *,
    n_experts: int,
    expert_scale: Tensor | None = None,
    sequence: Tensor | None = None,
    given: Tensor | None = None,
    early: bool = False,
) -> None:
    """Choose the ``ids.shape[1]`` experts of the largest logits and write their mixing weights.

    ``logits`` [T, >= n_experts] by token.  ``ids`` int32 [N, k], contiguous, on the device or pinned: best first, of
    equal ones the lower number first; with ``sequence`` (int32 [1]) tagged, see ``values.TAG_BITS``.  ``mix`` float32
    [R, >= k] by request row: softmax over all experts, then by ``rule``, then times ``expert_scale`` [E] if given.
    ``given`` int32 [N, k]: where its first entry is not negative the weights are those of the given experts; the
    ids remain the router's own.
    """
    n, k = ids.shape
    if n_experts > 1 << TAG_BITS:
        raise ValueError(f"{n_experts} experts do not fit in the {TAG_BITS} bits of a tagged id")
    launch(
        _route,
        (n,),
        logits,
        rows,
        mix,
        ids,
        mix if expert_scale is None else expert_scale,
        rows if sequence is None else sequence,
        rows if given is None else given,
        logits.stride(0),
        mix.stride(0),
        n_experts,
        triton.next_power_of_2(n_experts),
        k,
        triton.next_power_of_2(k),
        rule.renormalise,
        _ROUNDINGS[rule.rounding],
        expert_scale is not None,
        sequence is not None,
        given is not None,
        early,
        warps=_WARPS,
        early=early,
    )

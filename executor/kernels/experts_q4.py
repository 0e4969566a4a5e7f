"""Experts in split Q4_0, in groups of up to eight pairs that share a slot, on tensor cores in fp16.

Tensor cores are used not for their arithmetic but because a pair of nibbles becomes a pair of fp16 numbers in three
instructions.  The column step is fixed: rows of a program, warps, stages and the members of a group do not change
the bits of a row, the step would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import INTERPRETED, launch
from executor.kernels.maths import activated, as_half, let_next_begin, prefetch, wait_for_previous
from executor.kernels.planes import plane_position
from executor.kernels.values import MAX_TOKENS, ExpertsScratch, ExpertsShape

_MEMBERS = tl.constexpr(8)
_WORDS = 64
"""Words (of four weights) of a row in one step: part of what the results are, not a tuning parameter."""

# Four nibbles of two words to four pairs of fp16, (nibble - 8) * scale.  0x6400 is 1024 in fp16, and a nibble put into
# its last bits adds itself, or 16 times itself for the second and fourth.
_CONVERT = tl.constexpr(
    """{
    .reg .b32 n, high, offset, part, shift;
    mov.b32 offset, 0x64086408;
    mov.b32 part, 0x2C002C00;
    mov.b32 shift, 0xD480D480;
    lop3.b32 n, $4, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 n, n, offset;
    mul.rn.f16x2 $0, n, $5;
    lop3.b32 n, $4, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 n, n, part, shift;
    mul.rn.f16x2 $1, n, $5;
    shr.b32 high, $4, 8;
    lop3.b32 n, high, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 n, n, offset;
    mul.rn.f16x2 $2, n, $5;
    lop3.b32 n, high, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 n, n, part, shift;
    mul.rn.f16x2 $3, n, $5;
    }"""
)


@triton.jit
def _weights(words, scales):
    """int16 words and their fp16 scales -> the weights of nibbles 0 to 3."""
    if INTERPRETED:
        bits = words.to(tl.int32)
        scale = scales.to(tl.float32)
        a = ((bits & 15) - 8).to(tl.float32) * scale
        b = (((bits >> 4) & 15) - 8).to(tl.float32) * scale
        c = (((bits >> 8) & 15) - 8).to(tl.float32) * scale
        d = (((bits >> 12) & 15) - 8).to(tl.float32) * scale
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _CONVERT,
            "=&r,=&r,=&r,=&r,r,r",
            [words, scales],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def _group(slots, slot, n_pairs, BLOCK: tl.constexpr):
    """``slot`` of this program's pair, or -1 if another program has its group; the group's pairs [8], -1 for none.

    Pairs of one slot are cut into groups of eight in ascending order; the first of a group computes it.
    """
    pair = tl.program_id(0)
    every = tl.arange(0, BLOCK)
    others = tl.load(slots + every, mask=every < n_pairs, other=-1)
    same = (others == slot).to(tl.int32)
    before = tl.sum(tl.where(every < pair, same, 0))
    slot = tl.where(before % _MEMBERS == 0, slot, -1)
    rank = tl.where(same == 1, tl.cumsum(same, 0) - 1 - before, -1)
    member = tl.arange(0, _MEMBERS)
    pairs = tl.sum(tl.where(rank[None, :] == member[:, None], every[None, :] + 1, 0), 1) - 1
    return slot, pairs


@triton.jit
def _accumulate(total, words, scales, x0, x1, x2, x3, ROWS: tl.constexpr, WORDS: tl.constexpr):
    scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [ROWS, WORDS // 8, 8]), [ROWS, WORDS])
    a, b, c, d = _weights(words, scales)
    total = tl.dot(a, x0, total)
    total = tl.dot(b, x1, total)
    total = tl.dot(c, x2, total)
    return tl.dot(d, x3, total)


@triton.jit
def _inputs(x, ok, QUARTER: tl.constexpr):
    """The four planes of one step of inputs."""
    x0 = tl.load(x, mask=ok, other=0.0)
    x1 = tl.load(x + QUARTER, mask=ok, other=0.0)
    x2 = tl.load(x + 2 * QUARTER, mask=ok, other=0.0)
    x3 = tl.load(x + 3 * QUARTER, mask=ok, other=0.0)
    if INTERPRETED:
        x0 = x0.to(tl.float32)
        x1 = x1.to(tl.float32)
        x2 = x2.to(tl.float32)
        x3 = x3.to(tl.float32)
    return x0, x1, x2, x3


@triton.jit(do_not_specialize=["n_pairs"])
def _gate_up(
    planes,
    words,
    scales,
    slots,
    inner,
    planes_stride,
    n_pairs,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (pairs, I / ROWS).  ``words`` and ``scales`` are the arena as int16 and fp16, STRIDE in these."""
    let_next_begin(True)
    slot = tl.load(slots + tl.program_id(0))
    if AHEAD:
        if slot >= 0:
            start = slot.to(tl.int64) * STRIDE + 3 * I * (H // 4) + tl.program_id(1) * ROWS * (H // 32)
            prefetch(words + start, ROWS * H // 16)
            prefetch(words + start + I * (H // 32), ROWS * H // 16)
    slot, pairs = _group(slots, slot, n_pairs, BLOCK)
    wait_for_previous(EARLY)
    if slot >= 0:
        real = pairs >= 0
        token = tl.where(real, pairs, 0) // K
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        here = (row < I)[:, None]
        word = tl.arange(0, WORDS)
        block = tl.arange(0, WORDS // 8)
        base = slot.to(tl.int64) * STRIDE
        gate_words = words + base + row[:, None] * (H // 4) + word[None, :]
        gate_scales = scales + base + 3 * I * (H // 4) + row[:, None] * (H // 32) + block[None, :]
        source = planes + token[None, :] * planes_stride + word[:, None]
        gate = tl.zeros([ROWS, _MEMBERS], tl.float32)
        up = tl.zeros([ROWS, _MEMBERS], tl.float32)
        for i in tl.range(0, H // 4, WORDS, num_stages=STAGES):
            if (H // 4) % WORDS == 0 and I % ROWS == 0:
                gw = tl.load(gate_words + i)
                uw = tl.load(gate_words + I * (H // 4) + i)
                gs = tl.load(gate_scales + i // 8)
                us = tl.load(gate_scales + I * (H // 32) + i // 8)
            else:
                ok = here & (i + word < H // 4)[None, :]
                gw = tl.load(gate_words + i, mask=ok, other=0)
                uw = tl.load(gate_words + I * (H // 4) + i, mask=ok, other=0)
                ok = here & (i // 8 + block < H // 32)[None, :]
                gs = tl.load(gate_scales + i // 8, mask=ok, other=0.0)
                us = tl.load(gate_scales + I * (H // 32) + i // 8, mask=ok, other=0.0)
            ok = real[None, :] & (i + word < H // 4)[:, None]
            x0, x1, x2, x3 = _inputs(source + i, ok, H // 4)
            gate = _accumulate(gate, gw, gs, x0, x1, x2, x3, ROWS, WORDS)
            up = _accumulate(up, uw, us, x0, x1, x2, x3, ROWS, WORDS)
        result = as_half(activated(gate, GELU) * up)
        target = inner + tl.where(real, pairs, 0)[None, :] * I + plane_position(row, I)[:, None]
        tl.store(target, result, mask=here & real[None, :])


@triton.jit
def _row_weights(words, scales, row, here, i: tl.constexpr, I: tl.constexpr, WORDS: tl.constexpr, ALL: tl.constexpr):
    """Words and scales of one step of rows of ``down``.  ALL: every row is there."""
    row_words = words + row[:, None] * (I // 4) + i
    row_scales = scales + row[:, None] * (I // 32) + i // 8
    if ALL and i + WORDS <= I // 4:
        w = tl.load(row_words)
        s = tl.load(row_scales)
    else:
        w = tl.load(row_words, mask=here & (i + tl.arange(0, WORDS) < I // 4)[None, :], other=0)
        s = tl.load(row_scales, mask=here & (i // 8 + tl.arange(0, WORDS // 8) < I // 32)[None, :], other=0.0)
    return w, s


@triton.jit(do_not_specialize=["n_pairs"])
def _down(
    inner,
    words,
    scales,
    slots,
    partial,
    n_pairs,
    STRIDE: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    REPEAT: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    EAGER: tl.constexpr,
):
    """Grid (pairs, H / ROWS / REPEAT): outputs of pairs, not yet weighted.

    A row is short, so that one program takes REPEAT blocks of ROWS rows, and keeps the inputs of all of them.  EAGER:
    instead it takes one block, and reads its weights into registers before it waits for their inputs.
    """
    let_next_begin(True)
    slot = tl.load(slots + tl.program_id(0))
    slot, pairs = _group(slots, slot, n_pairs, BLOCK)
    base = tl.maximum(slot, 0).to(tl.int64) * STRIDE
    word = tl.arange(0, WORDS)
    block = tl.arange(0, WORDS // 8)
    first_words = words + base + 2 * I * (H // 4) + word[None, :]
    first_scales = scales + base + 3 * I * (H // 4) + 2 * I * (H // 32) + block[None, :]
    weights = ()
    if EAGER:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        here = ((row < H) & (slot >= 0))[:, None]
        for i in tl.static_range(0, I // 4, WORDS):
            weights = weights + _row_weights(first_words, first_scales, row, here, i, I, WORDS, False)
    wait_for_previous(True)
    if slot >= 0:
        real = pairs >= 0
        pair = tl.where(real, pairs, 0)
        inputs = ()
        for i in tl.static_range(0, I // 4, WORDS):
            ok = real[None, :] & (i + word < I // 4)[:, None]
            inputs = inputs + _inputs(inner + pair[None, :] * I + i + word[:, None], ok, I // 4)
        for repeat in tl.range(0, REPEAT, num_stages=STAGES):
            row = (tl.program_id(1) * REPEAT + repeat) * ROWS + tl.arange(0, ROWS)
            here = (row < H)[:, None]
            total = tl.zeros([ROWS, _MEMBERS], tl.float32)
            for i in tl.static_range(0, I // 4, WORDS):
                if EAGER:
                    w = weights[2 * (i // WORDS)]
                    s = weights[2 * (i // WORDS) + 1]
                else:
                    w, s = _row_weights(first_words, first_scales, row, here, i, I, WORDS, H % (ROWS * REPEAT) == 0)
                total = _accumulate(
                    total,
                    w,
                    s,
                    inputs[4 * (i // WORDS)],
                    inputs[4 * (i // WORDS) + 1],
                    inputs[4 * (i // WORDS) + 2],
                    inputs[4 * (i // WORDS) + 3],
                    ROWS,
                    WORDS,
                )
            tl.store(partial + pair[None, :] * H + row[:, None], total, mask=here & real[None, :])


@triton.jit
def _combine(
    partial,
    slots,
    rows,
    mix,
    out,
    mix_stride,
    out_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tokens, H / COLUMNS): the weighted sum of a token's pairs in their order."""
    let_next_begin(True)
    wait_for_previous(True)
    token = tl.program_id(0)
    request = tl.load(rows + token)
    if request >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], tl.float32)
        for j in tl.static_range(K):
            pair = token * K + j
            ok = column < tl.where(tl.load(slots + pair) >= 0, H, 0)
            weight = tl.load(mix + request.to(tl.int64) * mix_stride + j)
            total += weight * tl.load(partial + pair * H + column, mask=ok, other=0.0)
        tl.store(out + token * out_stride + column, total, mask=column < H)


@dataclass(frozen=True, slots=True)
class Q4Tuning:
    """What may differ from one group size to another without changing a bit.

    ``up_registers``: the most that a thread may have; the compiler's own guess for two warps is too low and spills.
    ``down_eager`` goes with ``down_repeat`` 1.
    """

    up_rows: int = 64
    up_warps: int = 4
    up_stages: int = 3
    down_rows: int = 64
    down_repeat: int = 1
    down_warps: int = 4
    down_stages: int = 3
    down_eager: bool = False
    up_registers: int | None = None


def tuning_of(shape: ExpertsShape, n: int) -> Q4Tuning:
    """What was fastest on an H200 for Qwen3.6's and Gemma4's sizes (docs/kernels.md)."""
    narrow = shape.geometry.hidden <= 2048
    if n <= 2 and narrow:
        return Q4Tuning(up_rows=32, up_warps=2, up_registers=128, down_eager=True)
    if n <= 2 or (n <= 4 and narrow):
        return Q4Tuning(down_eager=True)
    if n <= 8 and narrow:
        return Q4Tuning(up_rows=32, up_warps=2, up_stages=2, up_registers=128, down_repeat=2, down_stages=2)
    return Q4Tuning(down_repeat=2, down_stages=2)


def q4_experts(
    shape: ExpertsShape,
    planes: Tensor,
    arena: Tensor,
    slots: Tensor,
    rows: Tensor,
    mix: Tensor,
    scratch: ExpertsScratch,
    out: Tensor,
    *,
    early: bool = False,
    tuning: Q4Tuning | None = None,
) -> None:
    """See ``executor.kernels.experts.experts``."""
    g, k = shape.geometry, shape.top_k
    words, scales = arena.view(torch.int16), arena.view(torch.float16)
    stride = g.stride_bytes // 2
    n = rows.shape[0]
    pairs = n * k
    tuning = tuning or tuning_of(shape, n)
    block = triton.next_power_of_2(MAX_TOKENS * k)  # not of n: one kernel for all group sizes
    launch(
        _gate_up,
        (pairs, -(-g.intermediate // tuning.up_rows)),
        planes,
        words,
        scales,
        slots,
        scratch.inner,
        planes.stride(0),
        pairs,
        stride,
        g.hidden,
        g.intermediate,
        k,
        block,
        shape.activation == "gelu_tanh",
        tuning.up_rows,
        _WORDS,
        tuning.up_stages,
        g.intermediate % tuning.up_rows == 0,
        early,
        warps=tuning.up_warps,
        registers=tuning.up_registers,
        early=early,
    )
    launch(
        _down,
        (pairs, -(-g.hidden // (tuning.down_rows * tuning.down_repeat))),
        scratch.inner,
        words,
        scales,
        slots,
        scratch.partial,
        pairs,
        stride,
        g.hidden,
        g.intermediate,
        block,
        tuning.down_rows,
        tuning.down_repeat,
        _WORDS,
        tuning.down_stages,
        tuning.down_eager,
        warps=tuning.down_warps,
        early=True,
    )
    launch(
        _combine,
        (n, -(-g.hidden // 256)),
        scratch.partial,
        slots,
        rows,
        mix,
        out,
        mix.stride(0),
        out.stride(0),
        g.hidden,
        k,
        256,
        warps=2,
        early=True,
    )

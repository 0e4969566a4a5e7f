"""One token of the gated delta rule for each request of a group: convolution, recurrence, gated norm.

Yang et al., "Gated Delta Networks" (2024, arXiv:2412.06464), in the form of Qwen3.5 and Qwen3.6.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import let_next_begin, wait_for_previous


@triton.jit
def _convolve(
    qkv,
    rows,
    conv_state,
    conv_weight,
    mixed,
    qkv_stride,
    state_slot,
    state_channel,
    mixed_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    wait_for_previous(EARLY)
    if row >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        ok = channel < CHANNELS
        state = conv_state + row.to(tl.int64) * state_slot + channel * state_channel
        total = tl.zeros([BLOCK], tl.float32)
        # The last inputs move up by one place while they are read.
        for tap in tl.static_range(TAPS):
            if tap + 1 < TAPS:
                value = tl.load(state + tap, mask=ok, other=0.0)
            else:
                value = tl.load(qkv + token * qkv_stride + channel, mask=ok, other=0.0)
            weight = tl.load(conv_weight + channel * TAPS + tap, mask=ok, other=0.0).to(tl.float32)
            total += value.to(tl.float32) * weight
            if tap > 0:
                tl.store(state + tap - 1, value.to(conv_state.dtype.element_ty), mask=ok)
        tl.store(mixed + token * mixed_stride + channel, total * tl.sigmoid(total), mask=ok)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit
def _recur(
    mixed,
    z,
    a,
    b,
    rows,
    recurrent,
    a_log,
    dt_bias,
    norm_weight,
    out,
    mixed_stride,
    z_stride,
    a_stride,
    b_stride,
    state_slot,
    out_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    if row >= 0:
        kd = tl.arange(0, KEY)
        vd = tl.arange(0, VALUE)
        state = recurrent + row.to(tl.int64) * state_slot + head * KEY * VALUE + kd[:, None] * VALUE + vd[None, :]
        memory = tl.load(state)  # nobody else writes it in this job: read while the convolution still runs
        wait_for_previous(EARLY)
        source = mixed + token * mixed_stride
        key_head = head // (HEADS // KEY_HEADS)
        query = _unit(tl.load(source + key_head * KEY + kd)) * (KEY**-0.5)
        key = _unit(tl.load(source + (KEY_HEADS + key_head) * KEY + kd))
        value = tl.load(source + 2 * KEY_HEADS * KEY + head * VALUE + vd)
        beta = tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
        step = tl.load(a + token * a_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(step)))
        memory = memory * tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * step)
        change = (value - tl.sum(memory * key[:, None], 0)) * beta
        memory += key[:, None] * change[None, :]
        tl.store(state, memory)
        found = tl.sum(memory * query[:, None], 0)
        found = found * tl.rsqrt(tl.sum(found * found) / VALUE + eps)
        found = found * tl.load(norm_weight + vd).to(tl.float32)
        gate = tl.load(z + token * z_stride + head * VALUE + vd).to(tl.float32)
        result = found * gate * tl.sigmoid(gate)
        tl.store(out + token * out_stride + head * VALUE + vd, result.to(out.dtype.element_ty))


def delta_step(
    qkv: Tensor,
    z: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    conv_state: Tensor,
    recurrent: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    mixed: Tensor,
    out: Tensor,
    *,
    key_heads: int,
    eps: float,
    early: bool = False,
) -> None:
    """Advance the states of ``rows`` by one token and write the heads' normed, gated outputs.

    ``qkv`` [T, channels], ``z`` [T, heads * value dim], ``a`` and ``b`` [T, heads]: the projections.  ``conv_state``
    [slots, channels, taps - 1] and ``recurrent`` float32 [slots, heads, key dim, value dim] are updated in place.
    ``conv_weight`` [channels, taps], ``a_log`` and ``dt_bias`` [heads], ``norm_weight`` [value dim].  ``mixed`` float32
    [N, channels]: scratch.  ``out`` [T, heads * value dim].  Dimensions of a head are powers of two.
    """
    _, heads, key_dim, value_dim = recurrent.shape
    channels, taps = conv_weight.shape
    n = rows.shape[0]
    launch(
        _convolve,
        (n, -(-channels // 256)),
        qkv,
        rows,
        conv_state,
        conv_weight,
        mixed,
        qkv.stride(0),
        conv_state.stride(0),
        conv_state.stride(1),
        mixed.stride(0),
        channels,
        taps,
        256,
        early,
        early=early,
    )
    launch(
        _recur,
        (n, heads),
        mixed,
        z,
        a,
        b,
        rows,
        recurrent,
        a_log,
        dt_bias,
        norm_weight,
        out,
        mixed.stride(0),
        z.stride(0),
        a.stride(0),
        b.stride(0),
        recurrent.stride(0),
        out.stride(0),
        eps,
        key_heads,
        heads,
        key_dim,
        value_dim,
        early,
        warps=8,
        early=early,
    )

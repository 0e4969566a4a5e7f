"""Small functions inside kernels, and what they say to the chip."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from executor.kernels.launch import INTERPRETED


@triton.jit
def activated(x, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form: ``0.5 x (1 + tanh(u)) = x sigmoid(2 u)``."""
    if GELU:
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    else:
        inner = x
    return x * tl.sigmoid(inner)


@triton.jit
def as_half(x):
    """To fp16; what would overflow becomes the largest number, as infinity times a zero weight is not a number."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def product(a, b):
    """``a @ b`` in float32 accuracy for float32 operands, on tensor cores for narrower ones."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def prefetch(pointer, BYTES: tl.constexpr):
    """Bring ``BYTES`` from a 16-byte aligned address into the L2 cache without waiting: one instruction, one thread."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [pointer.to(tl.int64), BYTES],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The kernel after this one may start, if it was launched ``early``; it still waits for this one's end."""
    if EARLY:
        if not INTERPRETED:
            cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """The kernel before this one has ended and its results can be read; every program must come past here."""
    if EARLY:
        if not INTERPRETED:
            cuda.gdc_wait()

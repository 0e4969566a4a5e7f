"""One call of every kernel at real models' shapes, on tensors without storage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.geometry import ExpertGeometry
from executor.kernels import attention, delta, experts_float, experts_q4, norm, planes, rotary, router
from executor.kernels.values import ExpertsShape, MixRule, attention_scratch

META = torch.device("meta")
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


def bind(launch: Callable[..., None]) -> None:
    """Let ``launch`` see every start of a kernel instead of the GPU."""
    for module in (attention, delta, experts_float, experts_q4, norm, planes, rotary, router):
        module.launch = launch  # type: ignore[attr-defined]


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def call_experts(dtype: str, model: str, n: int) -> None:
    hidden, intermediate, activation = {"qwen": (2048, 512, "silu"), "gemma": (2816, 704, "gelu_tanh")}[model]
    shape: Any = ExpertsShape(ExpertGeometry(dtype, hidden, intermediate), 8, activation)  # type: ignore[arg-type]
    x = empty(16, hidden, dtype={"q4_0": torch.float16, "bf16": BF16, "f32": F32}[dtype])
    arena = empty(4 * shape.stride_bytes, dtype=torch.uint8)
    rows, slots, mix = empty(n, dtype=I32), empty(n, 8, dtype=I32), empty(16, 8, dtype=F32)
    compute = experts_q4.q4_experts if dtype == "q4_0" else experts_float.float_experts
    compute(shape, x, arena, slots, rows, mix, shape.scratch(n, META), empty(16, hidden, dtype=F32))


def call_planes() -> None:
    planes.to_planes(empty(16, 2816), empty(16, 2816, dtype=torch.float16))


def call_norm(outs: int, add: bool) -> None:
    x, rows = empty(9, 2816, dtype=F32), empty(8, dtype=I32)
    weights: list[Tensor | None] = [empty(2816, dtype=F32), None, empty(2816, dtype=F32)]
    added = empty(16, 2816, dtype=F32) if add else None
    halves = empty(16, 2816, dtype=torch.float16) if add else None
    norm.rms_norm(x, rows, weights[:outs], [empty(16, 2816)] * outs, eps=1e-6, add=added, planes=halves)


def call_router(experts: int, tagged: bool) -> None:
    extra = {"sequence": empty(1, dtype=I32), "given": empty(8, 8, dtype=I32)} if tagged else {}
    scale = empty(experts) if tagged else None
    rule = MixRule(True, BF16)
    rows, mix, ids = empty(8, dtype=I32), empty(16, 8, dtype=F32), empty(8, 8, dtype=I32)
    router.route(empty(16, experts), rows, mix, ids, rule, n_experts=experts, expert_scale=scale, **extra)


def call_attention(heads: int, kv_heads: int, dim: int, gated: bool) -> None:
    q, cache = empty(16, heads, 2 * dim), empty(8, kv_heads, 8192, dim)
    rows = empty(8, dtype=I32)
    scratch = attention_scratch(8, heads, 8192, dim, META)
    gate = q[..., dim:] if gated else None
    out = empty(16, heads * dim)
    attention.decode_attention(q[..., :dim], cache, cache, rows, rows, rows, scratch, out, scale=0.1, gate=gate)
    weight, table, k = empty(dim, dtype=F32), empty(8192, dim // 4, dtype=F32), empty(16, kv_heads, dim)
    rotary.rotate_and_store(
        q[..., :dim], k, k, table, table, rows, rows, rows, empty(16, heads, dim), cache, cache,
        eps=1e-6, q_weight=weight, k_weight=weight, norm_v=not gated,
    )  # fmt: skip


def call_delta() -> None:
    one = empty(16, 8192 + 4096 + 64)
    qkv, z, a, b = one.split([8192, 4096, 32, 32], dim=1)
    rows = empty(8, dtype=I32)
    states = empty(9, 8192, 3), empty(8, 32, 128, 128, dtype=F32)
    weights = empty(8192, 4), empty(32), empty(32), empty(128)
    mixed = empty(8, 8192, dtype=F32)
    delta.delta_step(qkv, z, a, b, rows, *states, *weights, mixed, empty(16, 4096), key_heads=16, eps=1e-6)


CALLS: list[Callable[[], None]] = [
    *[partial(call_experts, dtype, model, 8) for dtype in ("bf16", "q4_0") for model in ("qwen", "gemma")],
    partial(call_experts, "f32", "qwen", 1),
    partial(call_experts, "q4_0", "qwen", 16),
    call_planes,
    partial(call_norm, 1, True),
    partial(call_norm, 3, False),
    partial(call_router, 256, True),
    partial(call_router, 60, False),
    partial(call_attention, 16, 2, 256, True),
    partial(call_attention, 16, 2, 512, False),
    partial(call_attention, 16, 8, 256, False),
    call_delta,
]

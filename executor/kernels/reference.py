"""What each kernel computes, in plain torch: same arguments, same buffers written.

Runs on any device and needs no triton.  ``compute`` is the dtype of the arithmetic: float64 for tests.  Reads row
numbers on the host, so it is not for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from executor.geometry import ExpertGeometry
from executor.kernels.values import (
    TAG_BITS,
    Activation,
    AttentionScratch,
    ExpertsScratch,
    ExpertsShape,
    MixRule,
    plane_order,
)
from executor.quant import dequantise_views


def _real(rows: Tensor) -> Iterator[tuple[int, int]]:
    """(token, row) of every token that is not padding."""
    return ((token, row) for token, row in enumerate(rows.tolist()) if row >= 0)


def _activated(gate: Tensor, activation: Activation) -> Tensor:
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")


def slot_matrices(geometry: ExpertGeometry, arena: Tensor, slot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``(gate_up [2I, H], down [H, I])`` of the expert in one slot of a uint8 arena."""
    start = slot * geometry.stride_bytes
    views = {
        part.name: arena[start + part.offset : start + part.offset + part.n_bytes]
        .view(getattr(torch, part.element))
        .view(part.shape)
        for part in geometry.parts
    }
    return dequantise_views(views, dtype)


def to_planes(x: Tensor, planes: Tensor) -> None:
    """``x`` [T, H] as fp16 in the order that Q4_0 kernels read (``values.plane_order``), into ``planes`` [T, H]."""
    planes.copy_(x[:, plane_order(x.shape[1]).to(x.device)])


def experts(
    shape: ExpertsShape,
    x: Tensor,
    arena: Tensor,
    slots: Tensor,
    rows: Tensor,
    mix: Tensor,
    scratch: ExpertsScratch,
    out: Tensor,
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.experts.experts``.  ``scratch`` is not used."""
    g = shape.geometry
    order = plane_order(g.hidden).to(x.device) if g.dtype == "q4_0" else torch.arange(g.hidden, device=x.device)
    for token, row in _real(rows):
        inputs = torch.zeros(g.hidden, dtype=compute, device=x.device)
        inputs[order] = x[token].to(compute)
        total = torch.zeros(g.hidden, dtype=compute, device=x.device)
        for pair, slot in enumerate(slots[token].tolist()):
            if slot < 0:
                continue
            gate_up, down = slot_matrices(g, arena, slot, compute)
            gate, up = (gate_up @ inputs).chunk(2)
            total += mix[row, pair].to(compute) * (down @ (_activated(gate, shape.activation) * up))
        out[token] = total


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
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.router.route``."""
    k = ids.shape[1]
    tag = 0 if sequence is None else int(sequence[0]) << TAG_BITS
    for token, row in _real(rows):
        scores = logits[token, :n_experts].to(compute).softmax(-1)
        own = logits[token, :n_experts].double().sort(descending=True, stable=True).indices[:k]
        chosen = own
        if given is not None and int(given[token, 0]) >= 0:
            chosen = given[token].long()
        weights = scores[chosen]
        if rule.renormalise:
            weights = weights / weights.sum()
        if rule.rounding is not None:
            weights = weights.to(rule.rounding).to(compute)
        if expert_scale is not None:
            weights = weights * expert_scale[chosen].to(compute)
        mix[row, :k] = weights
        ids[token] = own.to(ids) | tag


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rows: Tensor,
    first: Tensor,
    end: Tensor,
    scratch: AttentionScratch,
    out: Tensor,
    *,
    scale: float,
    gate: Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.attention.decode_attention``.  ``scratch`` is not used."""
    heads, dim = q.shape[1:]
    kv_heads = k_cache.shape[1]
    for token, row in _real(rows):
        seen = slice(int(first[token]), int(end[token]))
        keys, values = k_cache[row, :, seen].to(compute), v_cache[row, :, seen].to(compute)
        queries = q[token].to(compute).view(kv_heads, -1, dim)
        found = ((queries @ keys.mT) * scale).softmax(-1) @ values
        found = found.reshape(heads, dim)
        if gate is not None:
            found = found * torch.sigmoid(gate[token].to(compute))
        out[token] = found.reshape(-1)


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.to(x.dtype)


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
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.rotary.rotate_and_store``."""

    def rotated(x: Tensor, token: int) -> Tensor:
        c, s = (table[int(positions[token])].to(compute) for table in (cos, sin))
        width = c.shape[0]
        turned, kept = x[:, :width], x[:, width:]
        low, high = turned.chunk(2, dim=-1)
        return torch.cat([turned * c + torch.cat([-high, low], -1) * s, kept], -1)

    for token, row in _real(rows):
        place = int(at[token])
        queries, keys, values = (x[token].to(compute) for x in (q, k, v))
        queries = queries if q_weight is None else _normed(queries, q_weight, eps)
        keys = keys if k_weight is None else _normed(keys, k_weight, eps)
        q_out[token] = rotated(queries, token)
        k_cache[row, :, place] = rotated(keys, token)
        v_cache[row, :, place] = _normed(values, None, eps) if norm_v else values


def rms_norm(
    x: Tensor,
    rows: Tensor,
    weights: Sequence[Tensor | None],
    outs: Sequence[Tensor],
    *,
    eps: float,
    add: Tensor | None = None,
    planes: Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.norm.rms_norm``."""
    for token, row in _real(rows):
        value = x[row].to(compute)
        if add is not None:
            value = value + add[token].to(compute)
            x[row] = value
        for weight, out in zip(weights, outs, strict=True):
            out[token] = _normed(value, weight, eps)
        if planes is not None:
            to_planes(outs[0][token : token + 1], planes[token : token + 1])


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
    compute: torch.dtype = torch.float32,
) -> None:
    """See ``executor.kernels.delta.delta_step``.  ``mixed`` is not used."""
    heads, key_dim, value_dim = recurrent.shape[1:]
    for token, row in _real(rows):
        recent = torch.cat([conv_state[row].to(compute), qkv[token, :, None].to(compute)], 1)
        conv_state[row] = recent[:, 1:]
        channels = functional.silu((recent * conv_weight.to(compute)).sum(1))
        query, key, value = channels.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim])
        query, key = (
            (part / torch.sqrt((part * part).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(heads // key_heads, 0)
            for part in (query.view(key_heads, key_dim), key.view(key_heads, key_dim))
        )
        decay = (-a_log.to(compute).exp() * functional.softplus(a[token].to(compute) + dt_bias.to(compute))).exp()
        memory = recurrent[row].to(compute) * decay[:, None, None]
        expected = (memory * key[:, :, None]).sum(1)
        delta = (value.view(heads, value_dim) - expected) * b[token].to(compute).sigmoid()[:, None]
        memory = memory + key[:, :, None] * delta[:, None, :]
        recurrent[row] = memory
        found = (memory * query[:, :, None]).sum(1) / key_dim**0.5
        gated = _normed(found, norm_weight, eps) * functional.silu(z[token].to(compute).view(heads, value_dim))
        out[token] = gated.reshape(-1)

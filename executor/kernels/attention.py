"""Decode attention over the executor's cache: chunks of keys at fixed places, then a merge.

The grid covers the whole room of the cache, so that it is the same for every length; a program whose chunk has no key
that its token sees returns at once.  Follows split-KV decoding (Dao et al., "Flash-Decoding", 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from executor.kernels.launch import launch
from executor.kernels.maths import let_next_begin, product, wait_for_previous
from executor.kernels.values import ATTENTION_CHUNK, AttentionScratch

_CHUNK = tl.constexpr(ATTENTION_CHUNK)
_QUERIES = tl.constexpr(16)  # rows of a tensor core's operand; the query heads of one key head fill some of them
_FAR = tl.constexpr(-1e30)
_MERGED = tl.constexpr(8)


@triton.jit
def _chunks(
    q,
    k_cache,
    v_cache,
    rows,
    first,
    end,
    partial,
    log_sum,
    scale,
    q_token,
    q_head,
    cache_slot,
    cache_head,
    cache_place,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    kv = tl.program_id(1)
    chunk = tl.program_id(2)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    begin = tl.load(first + token)
    stop = tl.load(end + token)
    wait_for_previous(EARLY)
    if (row >= 0) & (chunk * _CHUNK < stop) & ((chunk + 1) * _CHUNK > begin):
        query = tl.arange(0, _QUERIES)
        d = tl.arange(0, D)
        head = kv * GROUP + query
        real = query < GROUP
        x = tl.load(q + token * q_token + head[:, None] * q_head + d[None, :], mask=real[:, None], other=0.0)
        base = row.to(tl.int64) * cache_slot + kv * cache_head
        top = tl.full([_QUERIES], _FAR, tl.float32)
        total = tl.zeros([_QUERIES], tl.float32)
        found = tl.zeros([_QUERIES, D], tl.float32)
        for i in tl.range(0, _CHUNK, KEYS, num_stages=2):
            place = chunk * _CHUNK + i + tl.arange(0, KEYS)
            seen = (place >= begin) & (place < stop)
            offset = base + place.to(tl.int64) * cache_place
            keys = tl.load(k_cache + offset[None, :] + d[:, None], mask=seen[None, :], other=0.0)
            score = tl.where(seen[None, :], product(x, keys) * (scale * 1.4426950408889634), _FAR)
            higher = tl.maximum(top, tl.max(score, 1))
            share = tl.where(seen[None, :], tl.exp2(score - higher[:, None]), 0.0)
            fade = tl.exp2(top - higher)
            values = tl.load(v_cache + offset[:, None] + d[None, :], mask=seen[:, None], other=0.0)
            total = total * fade + tl.sum(share, 1)
            found = found * fade[:, None] + product(share.to(values.dtype), values)
            top = higher
        out = (token * KV_HEADS * GROUP + head) * CHUNKS + chunk
        tl.store(partial + out[:, None] * D + d[None, :], found / total[:, None], mask=real[:, None])
        tl.store(log_sum + out, top + tl.log2(total), mask=real)


@triton.jit
def _merge(
    rows,
    first,
    end,
    partial,
    log_sum,
    gate,
    out,
    gate_token,
    gate_head,
    out_token,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    let_next_begin(EARLY)
    row = tl.load(rows + token)
    wait_for_previous(EARLY)
    if row >= 0:
        begin = tl.load(first + token)
        stop = tl.load(end + token)
        d = tl.arange(0, D)
        base = (token * HEADS + head) * CHUNKS
        every = tl.arange(0, BLOCK)
        used = (every < CHUNKS) & (every * _CHUNK < stop) & ((every + 1) * _CHUNK > begin)
        logs = tl.load(log_sum + base + every, mask=used, other=_FAR)
        top = tl.max(logs)
        total = tl.sum(tl.where(used, tl.exp2(logs - top), 0.0))
        found = tl.zeros([D], tl.float32)
        for i in tl.range(0, CHUNKS, _MERGED, loop_unroll_factor=4):
            some = i + tl.arange(0, _MERGED)
            ok = (some < CHUNKS) & (some * _CHUNK < stop) & ((some + 1) * _CHUNK > begin)
            share = tl.exp2(tl.load(log_sum + base + some, mask=ok, other=_FAR) - top)
            part = tl.load(partial + (base + some)[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
            found += tl.sum(part * share[:, None], 0)
        found = found / total
        if GATED:
            found *= tl.sigmoid(tl.load(gate + token * gate_token + head * gate_head + d).to(tl.float32))
        tl.store(out + token * out_token + head * D + d, found.to(out.dtype.element_ty))


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
    early: bool = False,
) -> None:
    """Each token's attention over its own request's keys, ``first[t] <= place < end[t]``.

    ``q`` [T, heads, D]; caches [slots, kv heads, room, D] of the same strides, indexed by ``rows``; ``out``
    [T, heads * D].  ``gate`` [T, heads, D]: the output is multiplied by its sigmoid.  ``scratch``: from
    ``values.attention_scratch``.  D is a power of two; at most 16 query heads share a key head.
    """
    _, heads, dim = q.shape
    _, kv_heads, room, _ = k_cache.shape
    n, chunks = rows.shape[0], -(-room // ATTENTION_CHUNK)
    group = heads // kv_heads
    if group > _QUERIES.value:
        raise ValueError(f"{group} query heads a key head, at most {_QUERIES.value} are built")
    launch(
        _chunks,
        (n, kv_heads, chunks),
        q,
        k_cache,
        v_cache,
        rows,
        first,
        end,
        scratch.partial,
        scratch.log_sum,
        scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        kv_heads,
        group,
        dim,
        chunks,
        32 if dim > 256 else 64,
        early,
        early=early,
    )
    launch(
        _merge,
        (n, heads),
        rows,
        first,
        end,
        scratch.partial,
        scratch.log_sum,
        out if gate is None else gate,
        out,
        0 if gate is None else gate.stride(0),
        0 if gate is None else gate.stride(1),
        out.stride(0),
        heads,
        dim,
        chunks,
        triton.next_power_of_2(chunks),
        gate is not None,
        early,
        early=early,
    )

"""Routing statistics of a trace's decode tokens, in NumPy: popularity, reuse, overlap, and batches for a cache walk.

The definitions are those of the table that ``traces.info`` prints.  Knows no cache and no policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from traces.format import Array, RequestTrace, Trace
from traces.workload import TraceWorkload


def chosen(request: RequestTrace, n_experts: int) -> Array:
    """Which experts each decode token chose: bool [tokens, layers, E]."""
    mask = np.zeros((*request.decode.shape[:2], n_experts), bool)
    np.put_along_axis(mask, request.decode.astype(np.int64), True, axis=-1)
    return mask


def popularity(trace: Trace) -> Array:
    """How often each expert is chosen, int64 [layers, E]."""
    layers, experts = trace.model.n_layers, trace.model.n_experts
    offsets = (np.arange(layers) * experts)[:, None]
    counts = np.zeros(layers * experts, np.int64)
    for request in trace.requests:
        counts += np.bincount((request.decode + offsets).ravel(), minlength=layers * experts)
    return counts.reshape(layers, experts)


def hottest_share(counts: Array, fraction: float) -> Array:
    """Share of all selections that go to the hottest ``fraction`` of a layer's experts, rounded up: [layers]."""
    hottest = max(1, int(np.ceil(fraction * counts.shape[-1])))
    share: Array = -np.sort(-counts, axis=-1)[:, :hottest].sum(-1) / counts.sum(-1)
    return share


def relative_entropy(counts: Array) -> Array:
    """Entropy of a layer's selections over that of a uniform choice, 0 to 1: [layers]."""
    if counts.shape[-1] == 1:
        return np.ones(len(counts))
    p = counts / counts.sum(-1, keepdims=True)
    entropy: Array = -(p * np.log(np.where(p > 0, p, 1))).sum(-1) / np.log(counts.shape[-1])
    return entropy


def gini(counts: Array) -> Array:
    """Gini coefficient of a layer's popularity, 0 = all alike: [layers]."""
    ordered = np.sort(counts, axis=-1)
    n = counts.shape[-1]
    coefficient: Array = ((2 * np.arange(1, n + 1) - n - 1) * ordered).sum(-1) / (n * ordered.sum(-1))
    return coefficient


def reuse(trace: Trace, lags: Sequence[int]) -> dict[int, Array]:
    """Probability that an expert used now is used ``lag`` steps later by the same request: [layers] for each lag.

    A lag that no request is long enough for is left out.
    """
    both = {lag: np.zeros(trace.model.n_layers) for lag in lags}
    pairs = dict.fromkeys(lags, 0)
    for request in trace.requests:
        mask = chosen(request, trace.model.n_experts)
        for lag in lags:
            if len(mask) > lag:
                both[lag] += (mask[:-lag] & mask[lag:]).sum(axis=(0, 2))
                pairs[lag] += len(mask) - lag
    return {lag: both[lag] / pairs[lag] / trace.model.top_k for lag in lags if pairs[lag]}


def inclusion(trace: Trace) -> Array:
    """Share of each request's decode tokens that choose an expert: [requests, layers, E]."""
    return np.stack([chosen(r, trace.model.n_experts).mean(axis=0) for r in trace.requests if r.n_decode])


def overlap(frequency: Array, top_k: int) -> Array:
    """Share of a token's experts that a token of another request chooses too: [layers], from ``inclusion``.

    The mean over all pairs of different requests, at any two of their tokens.
    """
    n = len(frequency)
    total = frequency.sum(axis=0)
    pairs: Array = ((total**2).sum(-1) - (frequency**2).sum(axis=(0, 2))) / (n * (n - 1))
    return pairs / top_k


def union_share(frequency: Array, together: int) -> float:
    """Distinct experts of ``together`` different requests at one layer over all its experts, from ``inclusion``.

    Exact mean over all sets of requests and all their tokens: an expert is missed by a set with the product of its
    requests' chances to miss it, and the mean product over all sets is an elementary symmetric polynomial.
    """
    missed = 1 - frequency
    mean = np.zeros((together + 1, *frequency.shape[1:]))  # mean[b]: over the b-subsets of the requests so far
    mean[0] = 1
    for n, miss in enumerate(missed, 1):
        for b in range(min(n, together), 0, -1):
            mean[b] = ((n - b) * mean[b] + b * miss * mean[b - 1]) / n
    return float(1 - mean[together].mean())


def lockstep(trace: Trace, together: int, steps: int, seed: int) -> Array:
    """Packed expert ids of ``together`` requests that decode in lockstep: int64 [steps, together, layers, k].

    Requests in a seeded order, each from its first token; when one ends the next takes its place.  Stops after
    ``steps``, or where a place stays empty.
    """
    workload = TraceWorkload(trace, together, 1, seed=seed, selection="random")
    steps = min(steps, workload.full_steps)
    workload = TraceWorkload(trace, together, steps, seed=seed, selection="random")
    by_id = {request.request: request for request in trace.requests}
    offsets = (np.arange(trace.model.n_layers) * trace.model.n_experts)[:, None]
    rows = []
    while workload.begin(0.0) is not None:
        rows.append([by_id[request].experts[at] for request, at in workload.positions.items()])
    return np.array(rows, np.int64) + offsets


def batches(ids: Array) -> list[list[int]]:
    """The distinct experts of each (step, layer), ascending, of what ``lockstep`` returns."""
    steps, together, layers, k = ids.shape
    flat = np.sort(ids.transpose(0, 2, 1, 3).reshape(steps * layers, together * k), axis=-1)
    first = np.ones(flat.shape, bool)
    first[:, 1:] = flat[:, 1:] != flat[:, :-1]
    return [row[mask].tolist() for row, mask in zip(flat, first, strict=True)]


def correlation(a: Array, b: Array) -> float:
    """Pearson correlation; NaN where one side is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else float("nan")


def straggling(misses: Iterable[Array], early_layers: int = 4) -> dict[str, Array | float]:
    """How misses of one request hang together across layers.

    ``misses``: arrays [steps, requests, layers] of one group of requests each.  ``halves``: correlation of a
    request's misses in the lower and the upper half of the layers, over (request, step); ``variation``: coefficient
    of variation of its misses a step; ``early`` and ``all``: misses above the group's mean of the requests ranked by
    their misses in the first ``early_layers``, in those layers and in all: [requests].
    """
    groups = list(misses)
    half = groups[0].shape[-1] // 2
    lower = np.concatenate([group[..., :half].sum(-1).ravel() for group in groups])
    upper = np.concatenate([group[..., half:].sum(-1).ravel() for group in groups])
    total = lower + upper
    above = np.concatenate([group - group.mean(axis=1, keepdims=True) for group in groups])
    early = np.concatenate([group[..., :early_layers].sum(-1) for group in groups])
    rank = np.argsort(-early, axis=1, kind="stable")
    ranked = np.take_along_axis(above, rank[..., None], axis=1)
    return {
        "halves": correlation(lower, upper),
        "variation": float(total.std() / total.mean()) if total.any() else float("nan"),
        "early": ranked[..., :early_layers].sum(-1).mean(axis=0),
        "all": ranked.sum(-1).mean(axis=0),
    }

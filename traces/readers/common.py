"""What all readers share: options, the report of what was kept and dropped, and the way from raw ids to a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policies.core.types import ModelSpec
from traces.format import ABSENT, DECODE, PREFILL, Array, RequestTrace, Trace, TraceError


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may say about a source that does not say it itself."""

    n_experts: int | None = None
    model: str | None = None
    key: str | None = None
    top_k: int | None = None


@dataclass(slots=True)
class Report:
    """What a conversion kept, dropped and assumed."""

    format: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def drop(self, reason: str, count: int) -> None:
        """Count something that is in the source and not in the trace."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def change(self, what: str, count: int) -> None:
        """Count something that is in the trace otherwise than a reader of the source might think."""
        if count:
            self.changed[what] = self.changed.get(what, 0) + count

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(slots=True, eq=False)
class RawRequest:
    """One request as a reader found it.

    ``ids``: integers [tokens, layers, k], negative = absent; ``phase``: [tokens] or None for decode only;
    ``weights``: floats of the shape of ``ids`` or None; ``ranked``: the ids are known to be in router rank order.
    """

    ids: Array
    phase: Array | None = None
    weights: Array | None = None
    label: str = ""
    ranked: bool = True


def build(
    raw: Sequence[RawRequest],
    options: Options,
    report: Report,
    *,
    source: str,
    model: str,
    n_experts: int | None = None,
    layer_indices: tuple[int, ...] = (),
    notes: Mapping[str, Any] | None = None,
) -> Trace:
    """Clean raw requests and make a trace of them.

    Tokens that come after the first incomplete decode token of a request are dropped with it, so that what remains
    is what really followed each other; rows of padding at the end are no loss and are not counted.
    ``n_experts`` and ``model`` are what the source says; the options override the name and must agree on the number.
    """
    kept = []
    for request in raw:
        cut = _cut_top_k(request, options.top_k)
        cut = _rank(cut, report)
        cut = _complete(cut, report)
        if len(cut.ids):
            kept.append(cut)
        else:
            report.drop("requests without a complete token", 1)
    if not kept:
        raise TraceError(f"{source} holds no requests with a complete token; nothing to convert")
    spec = ModelSpec(
        name=options.model or model,
        n_layers=kept[0].ids.shape[1],
        n_experts=_n_experts(kept, options, report, n_experts, source),
        top_k=kept[0].ids.shape[2],
    )
    phases = any(request.phase is not None and (request.phase == PREFILL).any() for request in kept)
    weighted = [request.weights is not None for request in kept]
    if any(weighted) and not all(weighted):
        report.note("weights left out: some requests have none")
    return Trace(
        model=spec,
        requests=tuple(
            _finish(number, request, spec.n_experts, phases, all(weighted)) for number, request in enumerate(kept)
        ),
        source=source,
        layer_indices=layer_indices,
        notes=notes or {},
    )


def _cut_top_k(request: RawRequest, top_k: int | None) -> RawRequest:
    k = request.ids.shape[-1]
    if top_k is None or top_k == k:
        return request
    if not 1 <= top_k < k:
        raise TraceError(
            f"top_k={top_k} does not fit, the source has {k} experts a gate; give 1 to {k} or leave it out"
        )
    ranked = _rank(request, Report())
    weights = None if ranked.weights is None else ranked.weights[..., :top_k]
    return RawRequest(ranked.ids[..., :top_k], request.phase, weights, request.label)


def _rank(request: RawRequest, report: Report) -> RawRequest:
    """Order each gate by weight where the source does not promise rank order."""
    if request.ranked:
        return request
    if request.weights is None:
        report.note("order within a gate taken for router rank order (the source has no weights to tell)")
        return request
    sortable = np.where(request.ids < 0, -np.inf, np.nan_to_num(request.weights.astype(np.float64)))
    order = np.argsort(-sortable, axis=-1, kind="stable")
    moved = int((order != np.arange(order.shape[-1])).any(-1).sum())
    report.change("gates put into router rank order by their weights", moved)
    return RawRequest(
        np.take_along_axis(request.ids, order, -1),
        request.phase,
        np.take_along_axis(request.weights, order, -1),
        request.label,
    )


def _complete(request: RawRequest, report: Report) -> RawRequest:
    """Prompt tokens, then the decode tokens up to the first that lacks an expert."""
    ids = request.ids
    tokens = len(ids)
    prefill = np.zeros(tokens, bool) if request.phase is None else request.phase == PREFILL
    seen = (ids >= 0).any(axis=(1, 2))
    last = int(np.flatnonzero(seen)[-1]) + 1 if seen.any() else 0  # the rest is padding
    hole = np.flatnonzero((ids[:last] < 0).any(axis=(1, 2)) & ~prefill[:last])
    end = int(hole[0]) if len(hole) else last
    if end < last:
        report.drop("decode tokens that lack a layer", 1)
        report.drop("tokens after a token that lacks a layer", last - end - 1)
    incomplete = (ids[:end] < 0).any(axis=(1, 2)) & prefill[:end]
    report.change("prefill tokens that lack some layers kept, with those gates marked absent", int(incomplete.sum()))
    return RawRequest(
        ids[:end],
        None if request.phase is None else request.phase[:end],
        None if request.weights is None else request.weights[:end],
        request.label,
    )


def _n_experts(kept: Sequence[RawRequest], options: Options, report: Report, in_source: int | None, source: str) -> int:
    largest = max(int(request.ids.max()) for request in kept)
    if options.n_experts is not None:
        if in_source is not None and in_source != options.n_experts:
            raise TraceError(
                f"n_experts={options.n_experts} contradicts {source}, which says {in_source}; leave it out"
            )
        return options.n_experts
    if in_source is not None:
        return in_source
    report.note(
        f"n_experts is INFERRED: {largest + 1}, from the largest id {largest}; {source} does not say it. "
        f"If the model has more, give n_experts="
    )
    return max(largest + 1, int(kept[0].ids.shape[-1]))


def _finish(number: int, request: RawRequest, n_experts: int, phases: bool, weights: bool) -> RequestTrace:
    ids = request.ids.astype(np.int64)
    if (over := int(ids.max())) >= n_experts:
        token, layer, _ = (int(i) for i in np.unravel_index(int(ids.argmax()), ids.shape))
        raise TraceError(
            f"request {number}, token {token}, layer {layer}: expert id {over} is out of range, the model has "
            f"{n_experts} experts a layer (0 to {n_experts - 1}); correct the source or n_experts"
        )
    absent = ids < 0
    columns: dict[str, Array] = {}
    prompt = None
    if phases:
        phase = np.full(len(ids), DECODE) if request.phase is None else request.phase
        columns["phase"] = phase.astype(np.uint8)
        prompt = int(np.count_nonzero(phase == PREFILL)) or None
    if weights and request.weights is not None:
        columns["weights"] = np.where(absent, np.nan, request.weights).astype(np.float16)
    return RequestTrace(
        request=number,
        experts=np.where(absent, ABSENT, ids).astype(np.uint16),
        columns=columns,
        prompt_tokens=prompt,
        label=request.label,
    )

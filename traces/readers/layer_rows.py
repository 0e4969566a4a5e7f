"""Reader of JSON lines with one object a (token, layer).

Keys: ``request_id``, ``phase`` ("prefill" | "decode", or 0 | 1; decode if absent), ``step_id``, ``layer_id``,
``expert_ids`` (a list, or a list of lists where one line holds several prompt tokens) and perhaps ``weights``.
Layer numbers need not begin at 0 or be contiguous; a request's tokens are ordered by phase and step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traces.format import DECODE, PREFILL, Trace, TraceError
from traces.readers.common import Options, RawRequest, Report, build

PHASES = {"prefill": PREFILL, "prompt": PREFILL, "decode": DECODE, "generation": DECODE, 0: PREFILL, 1: DECODE}
WEIGHTS = ("weights", "expert_weights", "topk_weights")

Token = tuple[int, int, int]
"""Phase, step, and the place among the tokens of one prefill step."""


def read(path: Path, options: Options, report: Report) -> Trace:
    """Read one file; lines that are no JSON object or lack a key are dropped and counted."""
    requests: dict[str, dict[tuple[Token, int], tuple[list[int], list[float] | None]]] = {}
    layers: set[int] = set()
    for number, row in _rows(path, report):
        try:
            request, step, layer = str(row["request_id"]), int(row["step_id"]), int(row["layer_id"])
            phase = PHASES[row.get("phase", DECODE)]
            gates, weights = _gates(row)
        except (KeyError, TypeError, ValueError):
            report.drop("lines without request_id, step_id, layer_id, a known phase or expert_ids", 1)
            continue
        layers.add(layer)
        tokens = requests.setdefault(request, {})
        for place, experts in enumerate(gates):
            at = place
            if phase == PREFILL:
                while ((phase, step, at), layer) in tokens:
                    at += 1
            if ((phase, step, at), layer) in tokens:
                raise TraceError(
                    f"{path}, line {number}: request {request}, step {step}, layer {layer} is there twice; "
                    f"a decode step has one token"
                )
            tokens[(phase, step, at), layer] = (experts, weights[place] if weights else None)
    if not requests:
        raise TraceError(f"{path} has no line with request_id, step_id, layer_id and expert_ids; nothing to convert")
    order = sorted(layers)
    raw = [_request(label, tokens, order) for label, tokens in requests.items()]
    widths = {request.ids.shape[-1] for request in raw}
    if len(widths) > 1:
        raise TraceError(f"{path}: gates have {min(widths)} to {max(widths)} experts; a trace needs one top-k")
    return build(raw, options, report, source=path.name, model=path.stem, layer_indices=tuple(order))


def _rows(path: Path, report: Report) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield number, row
            else:
                report.drop("lines that are no JSON object", 1)


def _gates(row: dict[str, Any]) -> tuple[list[list[int]], list[list[float]] | None]:
    """The experts of each token of a line, and their weights."""
    ids = np.array(row["expert_ids"])
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError("expert_ids")
    raw = next((row[name] for name in WEIGHTS if row.get(name) is not None), None)
    gates: list[list[int]] = np.atleast_2d(ids).tolist()
    if raw is None:
        return gates, None
    weights = np.array(raw, np.float64)
    if weights.shape != ids.shape:
        raise ValueError("weights")
    return gates, np.atleast_2d(weights).tolist()


def _request(
    label: str, gates: dict[tuple[Token, int], tuple[list[int], list[float] | None]], layers: list[int]
) -> RawRequest:
    tokens = {token: row for row, token in enumerate(sorted({token for token, _ in gates}))}
    place = {layer: index for index, layer in enumerate(layers)}
    k = max(len(experts) for experts, _ in gates.values())
    ids = np.full((len(tokens), len(layers), k), -1, np.int64)
    weights = np.full(ids.shape, np.nan)
    weighted = all(weight is not None for _, weight in gates.values())
    for (token, layer), (experts, weight) in gates.items():
        ids[tokens[token], place[layer], : len(experts)] = experts
        if weighted and weight is not None:
            weights[tokens[token], place[layer], : len(experts)] = weight
    phase = np.array([token[0] for token in tokens], np.uint8)
    return RawRequest(ids, phase, weights if weighted else None, label, ranked=False)

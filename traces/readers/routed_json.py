"""Reader of ``routed_experts`` in JSON or JSON lines: nested lists [tokens, layers, k], as vLLM and SGLang return them.

Accepted: the bare nested list of one request; an object with ``routed_experts`` and perhaps
``prompt_routed_experts``; a list, or one a line, of such objects; and responses that hold them in ``choices``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from traces.format import DECODE, PREFILL, Array, Trace, TraceError
from traces.readers.common import Options, RawRequest, Report, build

IDS, PROMPT_IDS = "routed_experts", "prompt_routed_experts"


def read(path: Path, options: Options, report: Report) -> Trace:
    """Read one file, a request for each ``routed_experts``."""
    raw, shape, n_experts = [], None, None
    for number, item in enumerate(_items(path, report)):
        if item.get(IDS) is None:
            report.drop(f"entries without {IDS}", 1)
            continue
        ids = _array(path, number, IDS, item[IDS])
        phase = None
        if item.get(PROMPT_IDS) is not None:
            prompt = _array(path, number, PROMPT_IDS, item[PROMPT_IDS])
            if prompt.shape[1:] != ids.shape[1:]:
                raise TraceError(f"{path}, entry {number}: {PROMPT_IDS} and {IDS} differ in layers or experts a gate")
            phase = np.concatenate([np.full(len(prompt), PREFILL), np.full(len(ids), DECODE)])
            ids = np.concatenate([prompt, ids])
        if shape not in (None, ids.shape[1:]):
            raise TraceError(
                f"{path}, entry {number}: [layers, k] is {list(ids.shape[1:])}, before it was {list(shape)}"
            )
        shape = ids.shape[1:]
        label = item.get("request_id", item.get("id", ""))
        raw.append(RawRequest(ids, phase, None, str(label)))
        if isinstance(item.get("n_experts"), int):
            n_experts = item["n_experts"]
    return build(raw, options, report, source=path.name, model=path.stem, n_experts=n_experts)


def _items(path: Path, report: Report) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise TraceError(f"{path} is no JSON: {error}") from None
        for line in lines:
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                report.drop("lines that are no JSON", 1)
                continue
            yield from _entries(entry, report)
        return
    if isinstance(whole, list) and whole and isinstance(whole[0], list):
        yield {IDS: whole}
        return
    for entry in whole if isinstance(whole, list) else [whole]:
        yield from _entries(entry, report)


def _entries(entry: object, report: Report) -> Iterator[dict[str, Any]]:
    if not isinstance(entry, dict):
        report.drop("entries that are no object", 1)
        return
    choices = entry.get("choices")
    if isinstance(choices, list):
        shared = {key: entry[key] for key in ("id", PROMPT_IDS) if key in entry}
        for choice in choices:
            if isinstance(choice, dict):
                yield {**shared, **choice}
    else:
        yield entry


def _array(path: Path, number: int, name: str, nested: object) -> Array:
    try:
        ids = np.array(nested)
    except ValueError:
        ids = np.empty(0)
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape[1:]:
        raise TraceError(f"{path}, entry {number}: {name} must be integers in even nested lists [tokens, layers, k]")
    return ids.astype(np.int64)

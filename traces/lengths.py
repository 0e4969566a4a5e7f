"""Lengths of requests without their texts: flat or agentic JSON lines with token counts and arrivals in nanoseconds.

A flat line is one request; an agentic one is a session whose requests follow each other, each after the tool's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.prompts import Tally
from traces.records import read_records


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompt and answer.  ``arrival_s``: seconds; of a session's later requests, their earliest time:
    tools' times only, because how long an answer takes is not known here.
    """

    label: str
    prompt_tokens: int
    answer_tokens: int
    arrival_s: float | None = None


def read_lengths(path: str | Path, tally: Tally) -> Iterator[Lengths]:
    """The usable requests of a file, in its order."""
    for number, record in enumerate(read_records(path, tally)):
        session = record.get("sub_requests") if isinstance(record, Mapping) else None
        label = str(record.get("session_id", number)) if isinstance(record, Mapping) else ""
        start = _count(record, "arrival_time_ns")
        later = 0
        for at, request in enumerate(session if isinstance(session, list) else [record]):
            prompt, answer = _count(request, "input_toks"), _count(request, "output_toks")
            if not prompt or not answer:
                tally.drop("requests without lengths")
                continue
            tally.kept += 1
            name = f"{label}.{at}" if isinstance(session, list) else label
            yield Lengths(name, prompt, answer, None if start is None else (start + later) * 1e-9)
            later += _count(request, "tool_duration_ns") or 0


def _count(record: Any, key: str) -> int | None:
    value = record.get(key) if isinstance(record, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 62:
        return None
    return int(value)

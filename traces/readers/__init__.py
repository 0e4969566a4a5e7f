"""Readers of routing records that other programs write: one form a file, told apart by content.

A reader turns a file into ``RawRequest`` values; ``common.build`` cleans them, counts what it drops and makes the
trace.  A new form is one module with ``read(path, options, report)`` and one line in ``READERS``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from traces.format import Trace, TraceError
from traces.readers import arrays, bigmoe, layer_rows, routed_json
from traces.readers.common import Options, Report

READERS: dict[str, Callable[[Path, Options, Report], Trace]] = {
    "bigmoe": bigmoe.read,
    "arrays": arrays.read,
    "routed_json": routed_json.read,
    "layer_rows": layer_rows.read,
}

SNIFF_BYTES = 1 << 16


def read(path: str | Path, options: Options, format: str | None = None) -> tuple[Trace, Report]:
    """Read a file of any known form; ``format`` (a key of ``READERS``) overrides what its content suggests."""
    path = Path(path)
    if format is not None and format not in READERS:
        raise TraceError(f"unknown format {format}; expected one of {', '.join(READERS)}")
    report = Report()
    try:
        report.format = format or sniff(path)
        trace = READERS[report.format](path, options, report)
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no text file in UTF-8, as format {report.format} expects") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from None
    return trace, report


def sniff(path: Path) -> str:
    """The form of a file, from its first bytes."""
    with path.open("rb") as file:
        head = file.read(SNIFF_BYTES)
    if head.startswith(b"PAR1"):
        raise TraceError(f"{path} is a Parquet file; if it is a trace, use it as it is")
    if head.startswith((b"PK\x03\x04", b"\x93NUMPY")):
        return "arrays"
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text.startswith("#") or ("expert" in text.split("\n", 1)[0] and not text.startswith(("{", "["))):
        return "bigmoe"
    if text.startswith("{"):
        try:
            first = json.loads(text.split("\n", 1)[0])
        except ValueError:  # a JSON text that goes on over several lines, or past what was read
            first = {}
        return "layer_rows" if "expert_ids" in first else "routed_json"
    if text.startswith("["):
        return "routed_json"
    raise TraceError(f"{path}: cannot tell its form; give format= one of {', '.join(READERS)}")

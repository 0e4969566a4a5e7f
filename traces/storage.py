"""The trace on disk: one Parquet file that pandas, polars and duckdb open as it is.

A row is one (request, token, layer), sorted so; ``experts``, ``weights`` and scores are fixed-size lists; the header
is JSON under the key ``trace`` of the file's key-value metadata, with schema version, model, source, seed, requests
and digest.  The same trace gives the same bytes (of one pyarrow version): no clock, no host, no hash order.

``hidden`` holds the boundary before the row's layer; the last boundary of a token stands in ``hidden_out`` of its
last layer's row and is null elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policies.core.types import ModelSpec, RequestId
from traces.format import (
    COLUMN_DTYPES,
    DECODE,
    PREFILL,
    Array,
    Digest,
    RequestTrace,
    Trace,
    TraceError,
    check_layer_indices,
    check_model,
    check_request,
)

VERSION = 1
METADATA_KEY = b"trace"
ROW_GROUP_BYTES = 4 << 20
"""Raw size of a row group: large enough for a small footer, small enough to read one request with its scores."""
PER_TOKEN = ("phase", "token_id")
KEYS = ("request", "token", "layer")


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """What the header says about one request."""

    request: RequestId
    tokens: int
    prompt_tokens: int | None
    arrival_s: float | None
    label: str


class TraceWriter:
    """Writes a trace request by request, or a long request in parts, holding one row group in memory.

    The file appears under ``path`` when the writer closes without an error, and never half-written.
    ``columns``: the optional columns that every request will have; ``hidden_size``: length of a hidden state.
    """

    def __init__(
        self,
        path: str | Path,
        model: ModelSpec,
        *,
        columns: Iterable[str] = (),
        source: str = "",
        seed: int | None = None,
        layer_indices: tuple[int, ...] = (),
        notes: Mapping[str, Any] | None = None,
        hidden_size: int = 0,
    ) -> None:
        self._path = Path(path)
        self._model = model
        check_model(model)
        indices = layer_indices or tuple(range(model.n_layers))
        check_layer_indices(model, indices)
        wanted = set(columns)
        if unknown := wanted - set(COLUMN_DTYPES):
            raise TraceError(f"unknown column {min(unknown)}; a trace may have {', '.join(COLUMN_DTYPES)}")
        self._columns = tuple(name for name in COLUMN_DTYPES if name in wanted)
        self._header = {
            "version": VERSION,
            "model": {
                "name": model.name,
                "n_layers": model.n_layers,
                "n_experts": model.n_experts,
                "top_k": model.top_k,
            },
            "layer_indices": list(indices),
            "source": source,
            "seed": seed,
            "notes": dict(notes or {}),
        }
        self._schema = schema(model, self._columns, hidden_size)
        self._digest = Digest(model)
        self._requests: list[StoredRequest] = []
        self._last_phase = PREFILL
        self._pending: list[tuple[int, RequestTrace]] = []
        self._pending_tokens = 0
        self._group_tokens = max(1, ROW_GROUP_BYTES // _token_bytes(model, self._columns, hidden_size))
        self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            self._file = pq.ParquetWriter(
                self._partial,
                self._schema,
                compression="zstd",
                compression_level=3,
                use_dictionary=[name for name in (*KEYS, *PER_TOKEN) if name in self._schema.names],
                write_statistics=list(KEYS),
                write_page_checksum=True,
            )
        except OSError as error:
            raise TraceError(f"cannot write {self._path}: {error.strerror or error}") from None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def write(self, part: RequestTrace) -> None:
        """Append a request, or the next tokens of the request of the last call."""
        check_request(self._model, part)
        if set(part.columns) != set(self._columns):
            raise TraceError(
                f"request {part.request} has columns {sorted(part.columns)}, this file was opened for "
                f"{sorted(self._columns)}"
            )
        phase = part.columns.get("phase")
        last = self._requests[-1] if self._requests else None
        if last is not None and last.request == part.request:
            if phase is not None and phase[0] < self._last_phase:
                raise TraceError(f"request {part.request}: a prefill token follows a decode token")
            self._requests[-1] = replace(last, tokens=last.tokens + part.n_tokens)
        elif last is not None and last.request > part.request:
            raise TraceError(f"request {part.request} comes after request {last.request}; write requests in order")
        else:
            self._requests.append(
                StoredRequest(part.request, part.n_tokens, part.prompt_tokens, part.arrival_s, part.label)
            )
        self._last_phase = DECODE if phase is None else int(phase[-1])
        self._digest.add(part)
        first = self._requests[-1].tokens - part.n_tokens
        taken = 0
        while taken < part.n_tokens:
            until = min(part.n_tokens, taken + self._group_tokens - self._pending_tokens)
            self._pending.append((first + taken, _tokens(part, taken, until)))
            self._pending_tokens += until - taken
            taken = until
            if self._pending_tokens == self._group_tokens:
                self._flush()

    def close(self) -> None:
        """Write what is pending and the header, and move the file to its place."""
        try:
            if not self._requests:
                raise TraceError(f"nothing to write to {self._path}: no requests")
            self._flush()
            header = {
                **self._header,
                "columns": list(self._columns),
                "requests": [[r.request, r.tokens, r.prompt_tokens, r.arrival_s, r.label] for r in self._requests],
                "digest": self._digest.hexdigest(),
            }
            self._file.add_key_value_metadata({METADATA_KEY: json.dumps(header, sort_keys=True, allow_nan=False)})
            self._file.close()
            os.replace(self._partial, self._path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up: remove what was written so far."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._pending:
            rows = pa.concat_tables(_table(self._schema, self._model, first, part) for first, part in self._pending)
            self._file.write_table(rows, row_group_size=rows.num_rows)
            self._pending, self._pending_tokens = [], 0


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a whole trace; reading it back and writing it again gives the same bytes."""
    hidden = trace.requests[0].columns.get("hidden")
    with TraceWriter(
        path,
        trace.model,
        columns=trace.columns,
        source=trace.source,
        seed=trace.seed,
        layer_indices=trace.layer_indices,
        notes=trace.notes,
        hidden_size=0 if hidden is None else hidden.shape[-1],
    ) as writer:
        for request in trace.requests:
            writer.write(request)


# ---------------------------------------------------------------------------- rows


def schema(model: ModelSpec, columns: tuple[str, ...], hidden_size: int) -> pa.Schema:
    """Columns of a file in order; ``hidden_size`` matters only with the column ``hidden``."""
    sizes = {"weights": model.top_k, "hidden": hidden_size}
    fields = [
        pa.field("request", pa.int32()),
        pa.field("token", pa.int32()),
        pa.field("layer", pa.uint16()),
        pa.field("experts", pa.list_(pa.uint16(), model.top_k)),
    ]
    for name in columns:
        if name in PER_TOKEN:
            fields.append(pa.field(name, pa.uint8() if name == "phase" else pa.int32()))
        else:
            fields.append(pa.field(name, pa.list_(pa.float16(), sizes.get(name, model.n_experts))))
    if "hidden" in columns:
        fields.append(pa.field("hidden_out", pa.list_(pa.float16(), hidden_size)))
    return pa.schema(fields)


def _token_bytes(model: ModelSpec, columns: tuple[str, ...], hidden_size: int) -> int:
    wide = {"weights": model.top_k, "hidden": hidden_size}
    values = model.top_k + sum(wide.get(name, model.n_experts) for name in columns if name not in PER_TOKEN)
    return 2 * model.n_layers * (values + len(KEYS))


def _table(schema: pa.Schema, model: ModelSpec, first: int, part: RequestTrace) -> pa.Table:
    tokens, layers = part.n_tokens, model.n_layers
    arrays: dict[str, pa.Array] = {
        "request": pa.array(np.full(tokens * layers, part.request, np.int32)),
        "token": pa.array(np.repeat(np.arange(first, first + tokens, dtype=np.int32), layers)),
        "layer": pa.array(np.tile(np.arange(layers, dtype=np.uint16), tokens)),
        "experts": _lists(part.experts),
    }
    for name, values in part.columns.items():
        if name in PER_TOKEN:
            arrays[name] = pa.array(np.repeat(values, layers))
        elif name == "hidden":
            arrays["hidden"] = _lists(values[:, :-1])
            out = np.repeat(values[:, -1], layers, axis=0)
            inner = np.arange(tokens * layers) % layers != layers - 1
            arrays["hidden_out"] = _lists(out, mask=pa.array(inner))
        else:
            arrays[name] = _lists(values)
    return pa.table([arrays[name] for name in schema.names], schema=schema)


def _lists(values: Array, mask: pa.Array | None = None) -> pa.Array:
    flat = np.ascontiguousarray(values).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), values.shape[-1], mask=mask)


def _tokens(part: RequestTrace, begin: int, end: int) -> RequestTrace:
    columns = {name: values[begin:end] for name, values in part.columns.items()}
    return replace(part, experts=part.experts[begin:end], columns=columns)

"""Reading a trace file: the header at once, columns and requests when asked for, no Python object for any row.

Whatever a damaged file provokes comes out as one ``TraceError``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policies.core.types import ModelSpec, RequestId, UserError
from traces.format import Array, RequestTrace, Trace, TraceError
from traces.storage import KEYS, METADATA_KEY, PER_TOKEN, VERSION, StoredRequest, schema


class TraceFile:
    """An open trace file: its header at once, its columns when asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _readable(self.path):
            self._file = pq.ParquetFile(self.path, page_checksum_verification=True)
            raw = (self._file.metadata.metadata or {}).get(METADATA_KEY)
            if raw is None:
                raise TraceError(
                    f"{self.path} is a Parquet file but no trace (its metadata has no {METADATA_KEY.decode()!r}); "
                    f"make one with python -m traces.convert"
                )
            header = json.loads(raw)
            version = header["version"]
            if version != VERSION:
                raise TraceError(
                    f"{self.path} has trace version {version}, this program reads {VERSION}; convert it again"
                )
            self.model = ModelSpec(**header["model"])
            self.layer_indices = tuple(header["layer_indices"])
            self.source: str = header["source"]
            self.seed: int | None = header["seed"]
            self.notes: dict[str, Any] = header["notes"]
            self.columns: tuple[str, ...] = tuple(header["columns"])
            self.requests = tuple(StoredRequest(*stored) for stored in header["requests"])
            self.digest: str = header["digest"]
            self._check_schema()

    def read(self, columns: Iterable[str] | None = None, requests: Sequence[RequestId] | None = None) -> Trace:
        """The trace, or some of its columns and requests; the expert ids always come along.

        ``columns``: None for all.  ``requests``: None for all, and then the digest is checked too.
        """
        wanted = self.columns if columns is None else tuple(columns)
        if missing := [name for name in wanted if name not in self.columns]:
            raise TraceError(
                f"{self.path} has no column {missing[0]} (it has {', '.join(self.columns) or 'expert ids only'}); "
                f"record or generate the trace with it"
            )
        if "phase" in self.columns and "phase" not in wanted:
            wanted = ("phase", *wanted)
        chosen = self._chosen(requests)
        with _readable(self.path):
            trace = Trace(
                model=self.model,
                requests=tuple(self._read_requests(chosen, wanted)),
                source=self.source,
                seed=self.seed,
                layer_indices=self.layer_indices,
                notes=self.notes,
            )
        if requests is None and trace.digest != self.digest:
            raise TraceError(
                f"{self.path}: digest of the expert ids is {trace.digest[:12]}, the header says {self.digest[:12]}; "
                f"the file was changed after it was written, make it again"
            )
        return trace

    def keys(self) -> dict[str, Array]:
        """The columns ``request``, ``token`` and ``layer`` of every row."""
        with _readable(self.path):
            table = self._file.read(columns=list(KEYS))
            return {name: table[name].to_numpy() for name in KEYS}

    def _chosen(self, requests: Sequence[RequestId] | None) -> list[tuple[int, StoredRequest]]:
        """``(first row, request)`` of each chosen request, in file order."""
        first, found = 0, []
        wanted = None if requests is None else set(requests)
        for stored in self.requests:
            if wanted is None or stored.request in wanted:
                found.append((first, stored))
            first += stored.tokens * self.model.n_layers
        if wanted is not None and len(found) < len(wanted):
            absent = min(wanted - {stored.request for _, stored in found})
            raise TraceError(f"{self.path} has no request {absent}; it has {len(self.requests)} requests")
        return found

    def _read_requests(
        self, chosen: list[tuple[int, StoredRequest]], wanted: tuple[str, ...]
    ) -> Iterator[RequestTrace]:
        layers = self.model.n_layers
        groups, starts = self._row_groups(chosen)
        names = ["experts", *wanted, *(["hidden_out"] if "hidden" in wanted else [])]
        table = self._file.read_row_groups(groups, columns=names)
        arrays = {name: _to_numpy(table[name]) for name in names}
        for first, stored in chosen:
            group = max(i for i, (file_row, _) in enumerate(starts) if file_row <= first)
            begin = (starts[group][1] + first - starts[group][0]) // layers
            span = slice(begin, begin + stored.tokens)
            columns: dict[str, Array] = {}
            for name in wanted:
                if name in PER_TOKEN:
                    columns[name] = arrays[name].reshape(-1, layers)[span, 0]
                elif name == "hidden":
                    inner = _per_token(arrays["hidden"], layers)[span]
                    columns[name] = np.concatenate([inner, arrays["hidden_out"][span, None]], axis=1)
                else:
                    columns[name] = _per_token(arrays[name], layers)[span]
            yield RequestTrace(
                request=stored.request,
                experts=_per_token(arrays["experts"], layers)[span],
                columns=columns,
                prompt_tokens=stored.prompt_tokens,
                arrival_s=stored.arrival_s,
                label=stored.label,
            )

    def _row_groups(self, chosen: list[tuple[int, StoredRequest]]) -> tuple[list[int], list[tuple[int, int]]]:
        """Row groups that hold the chosen requests; ``(row of the file, row of what is read)`` where each begins."""
        groups: list[int] = []
        starts: list[tuple[int, int]] = []
        spans = [(first, first + stored.tokens * self.model.n_layers) for first, stored in chosen]
        row = read = 0
        for group in range(self._file.num_row_groups):
            rows = self._file.metadata.row_group(group).num_rows
            if any(begin < row + rows and row < end for begin, end in spans):
                groups.append(group)
                starts.append((row, read))
                read += rows
            row += rows
        return groups, starts

    def _check_schema(self) -> None:
        found = self._file.schema_arrow
        hidden = found.field("hidden").type.list_size if "hidden" in found.names and "hidden" in self.columns else 0
        for field in schema(self.model, self.columns, hidden):
            if field.name not in found.names:
                raise TraceError(f"{self.path} lacks the column {field.name}; make the trace again")
            if found.field(field.name).type != field.type:
                raise TraceError(
                    f"{self.path}: column {field.name} has type {found.field(field.name).type}, expected {field.type}"
                )
        rows = sum(stored.tokens for stored in self.requests) * self.model.n_layers
        if not self.requests:
            raise TraceError(f"{self.path} holds no requests")
        if self._file.metadata.num_rows != rows:
            raise TraceError(
                f"{self.path} has {self._file.metadata.num_rows} rows, its header promises {rows}; make the trace again"
            )


def read_trace(
    path: str | Path, columns: Iterable[str] | None = None, requests: Sequence[RequestId] | None = None
) -> Trace:
    """Read a trace: ``TraceFile(path).read(columns, requests)``."""
    return TraceFile(path).read(columns, requests)


def _to_numpy(column: pa.ChunkedArray) -> Array:
    """Values of a column without Python objects: [rows], or [rows that are not null, list size]."""
    whole = column.combine_chunks()
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray(whole.to_numpy(zero_copy_only=False))
    return np.asarray(whole.flatten().to_numpy(zero_copy_only=False)).reshape(-1, column.type.list_size)


def _per_token(rows: Array, layers: int) -> Array:
    return rows.reshape(-1, layers, rows.shape[-1])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file provokes into one clear line."""
    try:
        yield
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except TraceError as error:
        raise error if str(path) in str(error) else TraceError(f"{path}: {error}") from None
    except UserError as error:
        raise TraceError(f"{path}: {error}") from None
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise TraceError(f"{path} is no readable trace (damaged, truncated or not Parquet): {reason}") from None

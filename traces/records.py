"""Records of a data set, one at a time in bounded memory: JSON array, JSON lines, a JSON object, gz, Parquet, a folder.

Owns formats, not meanings: a record is whatever stands there, usually a dict.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from traces.format import TraceError
from traces.prompts import Tally

CHUNK_BYTES = 1 << 20
LARGEST_RECORD = 64 << 20
"""Characters that one record of a JSON array may have: beyond it the file is taken for broken."""
SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".traj", ".gz")
_ROWS = 32


class Readable(Protocol):
    """Bytes from somewhere."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most ``size``; none at the end."""
        ...


def read_records(path: str | Path, tally: Tally, columns: Iterable[str] | None = None) -> Iterator[Any]:
    """The records of a file, or of all data files below a folder in the order of their names.

    ``columns``: of a Parquet file, read these and no others.  Lines that are no JSON are counted in ``tally``.
    Raises TraceError for a missing file and for a JSON array that is broken.
    """
    path = Path(path)
    if path.is_dir():
        below = [found for found in sorted(path.rglob("*")) if found.suffix in SUFFIXES and found.is_file()]
        if not below:
            raise TraceError(f"{path} holds no data file; expected some of {', '.join(SUFFIXES)}")
        for found in below:
            yield from read_records(found, tally, columns)
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            start = file.read(4)
            file.seek(0)
            if start == b"PAR1":
                yield from _parquet(path, columns)
                return
            packed = start[:2] == b"\x1f\x8b"
            yield from _json(stack.enter_context(gzip.open(file)) if packed else file, path, tally)
        except (OSError, EOFError) as error:
            raise TraceError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _parquet(path: Path, columns: Iterable[str] | None) -> Iterator[dict[str, Any]]:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            wanted = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=wanted):
                    yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise TraceError(f"{path} is no readable Parquet file: {' '.join(str(error).split())[:160]}") from None


def _json(data: Readable, path: Path, tally: Tally) -> Iterator[Any]:
    text = _Text(data)
    text.skip_space()
    if not text.buffer:
        return
    if text.buffer[0] == "[":
        yield from _array(text, path)
        return
    first = text.line() or ""
    try:
        yield json.loads(first)
    except ValueError:
        rest = text.rest()
        if first.lstrip()[:1] == "{":
            try:  # an object that is laid out over many lines
                yield json.loads(f"{first}\n{rest}")
            except ValueError:
                pass
            else:
                return
        yield from _lines([first, *rest.splitlines()], tally)
        return
    yield from _lines(iter(text.line, None), tally)


def _lines(lines: Iterable[str | None], tally: Tally) -> Iterator[Any]:
    for line in lines:
        if line and line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                tally.drop("lines that are no JSON")


def _array(text: _Text, path: Path) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    text.take(1)
    number = 0
    while True:
        text.skip_space()
        if text.buffer[:1] == "," and number:
            text.take(1)
            text.skip_space()
        if text.buffer[:1] == "]":
            return
        while True:
            try:
                record, end = decoder.raw_decode(text.buffer)
            except json.JSONDecodeError as error:
                cut_off = error.pos >= len(text.buffer) - 8 or error.msg.startswith("Unterminated string")
                if len(text.buffer) > LARGEST_RECORD or not cut_off or not text.grow():
                    raise TraceError(
                        f"{path}: record {number} of the array is broken or cut off: {error.msg}"
                    ) from None
            else:
                # A number may go on in what is not read yet: only what stands behind a record ends it.
                if text.buffer[end : end + 1].strip(",] \t\r\n") != text.buffer[end : end + 1] or not text.grow():
                    break
        text.take(end)
        number += 1
        yield record


class _Text:
    """Decoded text of a file, as much as is needed at a time.  Bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, data: Readable) -> None:
        self.buffer = ""
        self._data = data
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode

    def grow(self) -> bool:
        """Read on, by as much again as is there, so that a long record costs linear time; False at the end."""
        raw = self._data.read(max(CHUNK_BYTES, len(self.buffer)))
        more = self._decode(raw, final=not raw)
        self.buffer += more
        return bool(raw)

    def take(self, characters: int) -> str:
        """Remove and return the first characters."""
        taken, self.buffer = self.buffer[:characters], self.buffer[characters:]
        return taken

    def skip_space(self) -> None:
        """Drop white space; the buffer is empty afterwards only at the end of the file."""
        while True:
            self.buffer = self.buffer.lstrip()
            if self.buffer or not self.grow():
                return

    def line(self) -> str | None:
        """The next line without its end, None at the end of the file."""
        while (end := self.buffer.find("\n")) < 0:
            if not self.grow():
                return self.take(len(self.buffer)) or None
        return self.take(end + 1)[:-1]

    def rest(self) -> str:
        """All that is left."""
        while self.grow():
            pass
        return self.take(len(self.buffer))

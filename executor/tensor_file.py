"""Tensors in files, row by row: safetensors headers, and the reading of rows.

Owns where each tensor lies, the check of every size, and plain positioned reads (a memory map would count every
page that was touched).  ``executor.gguf_file`` gives the same entries from GGUF.  Does not know what a tensor is for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.errors import PackError, shown
from executor.quant import Bytes, Matrix

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_MAX_HEADER_BYTES = 256 << 20

Decode = Callable[[Bytes, int], Matrix]
"""Raw rows and their length in weights -> ``[rows, K]``."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: ``shape`` with the output dimension first, ``rows`` of ``row_bytes`` each.

    ``kind`` is the file's own name of its type.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    row_bytes: int
    decode: Decode = field(repr=False)

    @property
    def rows(self) -> int:
        """All dimensions but the last, flattened; a vector is one row."""
        return prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of one tensor."""

    entry: TensorEntry
    start: int
    count: int


class RowReader:
    """Positioned reads of rows; owns the open files."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def read(self, rows: Rows) -> Matrix:
        """``[count, K]``, in the file's float type or as Q4_0 blocks."""
        entry = rows.entry
        if entry.path not in self._files:
            self._files[entry.path] = os.open(entry.path, os.O_RDONLY)
        buffer = np.empty(rows.count * entry.row_bytes, dtype=np.uint8)
        view = buffer.data
        offset = entry.offset + rows.start * entry.row_bytes
        done = 0
        while done < len(view):
            got = os.preadv(self._files[entry.path], [view[done:]], offset + done)
            if got == 0:
                raise PackError(f"{entry.path.name}: ended inside tensor {entry.name}; download the file again")
            done += got
        return entry.decode(buffer.reshape(rows.count, entry.row_bytes), entry.shape[-1])

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def decode_as(dtype: torch.dtype) -> Decode:
    """Rows that are plain floats."""
    return lambda raw, _: torch.from_numpy(raw).view(dtype)


def safetensors_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, from its header, every size checked.

    Raises:
        PackError: not a safetensors file, a cut one, a type that is not a float, or a size that contradicts a shape.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise PackError(f"{path.name}: header of {length} bytes in a file of {size}; not complete safetensors")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise PackError(f"{path.name}: the safetensors header is not JSON: {shown(str(error))}") from error
    if not isinstance(header, dict):
        raise PackError(f"{path.name}: the safetensors header is not a mapping")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, item, 8 + length, size) for name, item in header.items()}


def _entry(path: Path, name: str, item: Any, data_start: int, file_bytes: int) -> TensorEntry:
    where = f"{path.name}: tensor {shown(name, 120)}"
    try:
        kind, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise PackError(f"{where}: its header entry is {shown(item)}, expected dtype, shape, data_offsets") from error
    if kind not in _FLOATS:
        raise PackError(f"{where} has type {shown(kind)}; only {', '.join(_FLOATS)} are read (is it quantised?)")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, begin, end)):
        raise PackError(f"{where}: shape {shown(shape)} or offsets {shown((begin, end))} are not whole numbers")
    shape = shape or (1,)
    expected = prod(shape) * _FLOATS[kind].itemsize
    if end - begin != expected:
        raise PackError(f"{where} has {end - begin} bytes, but shape {shape} of {kind} needs {expected}")
    if data_start + end > file_bytes:
        raise PackError(f"{where} ends at byte {data_start + end}, but the file has {file_bytes}; download it again")
    row_bytes = shape[-1] * _FLOATS[kind].itemsize
    return TensorEntry(name, kind, shape, path, data_start + begin, row_bytes, decode_as(_FLOATS[kind]))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping from a file, or a PackError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PackError(f"{path} is missing; expected a Hugging Face checkpoint folder or a .gguf file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PackError(f"{path}: cannot be read as JSON: {shown(str(error), 120)}") from error
    if not isinstance(value, dict):
        raise PackError(f"{path}: expected a JSON mapping")
    return value


def folder_entries(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint folder: of the shards that the index names, or of every ``*.safetensors``."""
    index = folder / "model.safetensors.index.json"
    listed: dict[str, str] = {}
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise PackError(f"{index}: weight_map must map tensor names to file names")
        listed = weight_map
        files = sorted({folder / Path(file).name for file in listed.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PackError(f"{folder}: no *.safetensors here; expected a checkpoint in that format (not .bin)")
    entries: dict[str, TensorEntry] = {}
    for file in files:
        if not file.is_file():
            raise PackError(f"{index}: names {file.name}, which is missing; download it")
        for name, entry in safetensors_entries(file).items():
            if name in entries:
                raise PackError(f"tensor {name} is both in {entries[name].path.name} and in {file.name}; remove one")
            entries[name] = entry
    absent = sorted(set(listed) - set(entries))
    if absent:
        raise PackError(f"{index}: names tensor {absent[0]}, which no shard holds ({len(absent)} such)")
    return entries

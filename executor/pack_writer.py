"""The writing of an expert pack.

Owns the file on its way to the disk: it is streamed (a few experts, or some rows of one shared weight, in memory) and
atomic: it is written under a temporary name beside its final one, which exists only once all is on disk.
Knows neither the checkpoint's format nor how packs are read.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from executor.errors import PackError, shown
from executor.geometry import ExpertGeometry
from executor.naming import Family, MoeShape
from executor.quant import Bytes, raw
from executor.store import CHECKSUMS, EXPERTS, MANIFEST, SHARED, SHARED_DTYPES, Manifest

CHUNK_BYTES = 8 << 20
"""Shared weights are converted in pieces of about this size."""

Item = TypeVar("Item")
Made = TypeVar("Made")

WriteBytes = Callable[[int, Any], int]
"""``os.write``; tests put failures here."""


class Source(Protocol):
    """Where weights come from: a checkpoint or a random generator.

    ``shared``: canonical name -> shape; ``expert_types``: how many expert matrices have which type in the source;
    ``extra_files`` are copied.  ``threads``: how many experts may be filled at one time.
    """

    name: str
    family: Family
    config: dict[str, Any]
    moe: MoeShape
    shared: dict[str, tuple[int, ...]]
    origin: dict[str, Any]
    expert_types: Mapping[str, int]
    extra_files: tuple[Path, ...]
    random: bool
    threads: int

    def expert(self, layer: int, index: int, geometry: ExpertGeometry, out: Bytes) -> None:
        """Fill ``out`` with one expert's ``expert_bytes``."""
        ...

    def shared_rows(self, name: str, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count, last dimension]`` of a shared weight."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


def free_bytes(folder: Path) -> int:
    """Free space where ``folder`` lies."""
    return shutil.disk_usage(folder).free


def write_pack(
    source: Source,
    out: Path,
    dtype: str,
    *,
    shared_dtype: str | None = None,
    write: WriteBytes = os.write,
    free: Callable[[Path], int] = free_bytes,
) -> Manifest:
    """Write a pack of ``source`` to the new directory ``out``.

    Raises:
        PackError: ``out`` exists, too little space, or a write failed; nothing is left behind.
    """
    geometry = source.moe.geometry(dtype)
    shared_dtype = shared_dtype or ("f32" if dtype == "f32" else "bf16")
    if shared_dtype not in SHARED_DTYPES:
        raise PackError(f"shared_dtype {shown(shared_dtype)} is unknown; use one of {', '.join(SHARED_DTYPES)}")
    if out.exists():
        raise PackError(f"{out} exists; remove it or choose another out=")
    header = _safetensors_header(source.shared, shared_dtype)
    n_total = len(source.moe.layers) * source.moe.n_experts
    experts_bytes = n_total * geometry.stride_bytes
    shared_bytes = len(header) + sum(map(prod, source.shared.values())) * _torch_dtype(shared_dtype).itemsize
    extra_bytes = sum(file.stat().st_size for file in source.extra_files)
    needed = experts_bytes + shared_bytes + 4 * n_total + extra_bytes + (1 << 20)
    out.parent.mkdir(parents=True, exist_ok=True)
    available = free(out.parent)
    print(f"{out}: {needed / 1e9:.2f} GB to write, {available / 1e9:.2f} GB free", file=sys.stderr)
    if needed > available:
        raise PackError(f"{out} needs {needed / 1e9:.2f} GB, but {available / 1e9:.2f} are free; choose another out=")

    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        with tqdm(total=experts_bytes + shared_bytes, unit="B", unit_scale=True, disable=None) as bar:
            checksums = _write_experts(source, geometry, _File(temporary / EXPERTS, write, bar))
            table = _File(temporary / CHECKSUMS, write, None)
            table.add(checksums.astype("<u4").tobytes())
            table.close()
            shared_crc = _write_shared(source, header, shared_dtype, _File(temporary / SHARED, write, bar))
        crc32 = {CHECKSUMS: table.crc32, SHARED: shared_crc}
        for file in source.extra_files:
            copy = _File(temporary / file.name, write, None)
            copy.add(file.read_bytes())
            copy.close()
            crc32[file.name] = copy.crc32
        manifest = Manifest(
            name=source.name,
            family=source.family.name,
            dtype=dtype,
            shared_dtype=shared_dtype,
            random=source.random,
            layers=source.moe.layers,
            n_experts=source.moe.n_experts,
            top_k=source.moe.top_k,
            hidden_size=source.moe.hidden,
            intermediate_size=source.moe.intermediate,
            expert_bytes=geometry.expert_bytes,
            stride_bytes=geometry.stride_bytes,
            experts_file_bytes=experts_bytes,
            shared_file_bytes=shared_bytes,
            crc32=crc32,
            source={**source.origin, "requantised": requantised(source, dtype)},
            config=source.config,
        )
        last = _File(temporary / MANIFEST, write, None)
        last.add(manifest.to_json().encode())
        last.close()
        temporary.chmod(0o755)
        temporary.rename(out)
    except OSError as error:
        what = "the disk is full" if error.errno in {errno.ENOSPC, errno.EDQUOT} else error.strerror
        raise PackError(f"{out}: {what} while writing {needed / 1e9:.2f} GB; nothing was kept") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already if the pack is complete
    return manifest


def requantised(source: Source, dtype: str) -> dict[str, int]:
    """Expert matrices that were quantised otherwise and lose precision a second time, by type."""
    exact = {"Q4_0", "F32", "F16", "BF16"}
    return {kind: n for kind, n in source.expert_types.items() if dtype == "q4_0" and kind not in exact}


class _File:
    """A file that is written once, in order: counts its checksum, and is on the disk after ``close``."""

    def __init__(self, path: Path, write: WriteBytes, bar: tqdm[Any] | None) -> None:
        self.crc32 = 0
        self._write = write
        self._bar = bar
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def add(self, data: bytes | memoryview) -> None:
        """Append bytes that count in the file's checksum."""
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.append(view)

    def append(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._write(self._fd, view[done:])
        if self._bar is not None:
            self._bar.update(len(view))

    def close(self) -> None:
        os.fsync(self._fd)
        if hasattr(os, "posix_fadvise"):  # a new pack must not be read from memory afterwards
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._fd)


def _write_experts(source: Source, geometry: ExpertGeometry, file: _File) -> np.ndarray[Any, np.dtype[np.uint32]]:
    n_experts = source.moe.n_experts
    checksums = np.empty((len(source.moe.layers), n_experts), dtype=np.uint32)
    ahead = source.threads + 1
    strides = np.zeros((ahead, geometry.stride_bytes), dtype=np.uint8)

    def fill(number: int) -> int:
        stride = strides[number % ahead]
        source.expert(*divmod(number, n_experts), geometry, stride[: geometry.expert_bytes])
        return zlib.crc32(stride.data)

    for number, checksum in enumerate(_ahead(fill, range(checksums.size), source.threads)):
        checksums.flat[number] = checksum
        file.append(strides[number % ahead].data)
    file.close()
    return checksums


def _write_shared(source: Source, header: bytes, shared_dtype: str, file: _File) -> int:
    dtype = _torch_dtype(shared_dtype)

    def pieces() -> Iterator[tuple[str, int, int]]:
        for name, shape in source.shared.items():
            rows = prod(shape[:-1])
            step = max(1, CHUNK_BYTES // (shape[-1] * 4))
            for start in range(0, rows, step):
                yield name, start, min(step, rows - start)

    file.add(header)
    for data in _ahead(lambda piece: raw(source.shared_rows(*piece, dtype)).data, pieces(), source.threads):
        file.add(data)
    file.close()
    return file.crc32


def _ahead(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Iterator[Made]:
    """``make`` of each item, in order, made by ``threads`` while the caller uses what came before.

    At most ``threads`` results are made or wait beside the one in use.
    """
    with ThreadPoolExecutor(threads) as pool:
        left = iter(items)
        making = deque(pool.submit(make, item) for item in itertools.islice(left, threads))
        try:
            while making:
                made = making.popleft().result()
                making.extend(pool.submit(make, item) for item in itertools.islice(left, 1))
                yield made
        finally:
            for waiting in making:
                waiting.cancel()


def _safetensors_header(shared: Mapping[str, tuple[int, ...]], shared_dtype: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shared.items():
        end = offset + prod(shape) * _torch_dtype(shared_dtype).itemsize
        header[name] = {"dtype": shared_dtype.upper(), "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _torch_dtype(shared_dtype: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, SHARED_DTYPES[shared_dtype])
    return dtype

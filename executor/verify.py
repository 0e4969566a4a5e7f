"""Checking every byte of a pack: ``python -m executor.verify PACK``.

Owns nothing; reads each file once, in order.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from executor.errors import PackError
from executor.store import ExpertStore
from policies.core.types import UserError

USAGE = "python -m executor.verify PACK\n\nReads a pack and compares every checksum.\n"
_CHUNK_BYTES = 8 << 20


def verify(store: ExpertStore) -> None:
    """Compare every checksum of an opened pack.

    Raises:
        PackError: damaged; names the first damaged expert and its offset, or the file.
    """
    damaged: list[int] = []
    with (
        store.experts_path.open("rb", buffering=0) as file,
        tqdm(total=store.n_total, unit=" experts", disable=None) as bar,
    ):
        stride = bytearray(store.stride)
        for expert in range(store.n_total):
            view = memoryview(stride)
            while view.nbytes:
                got = file.readinto(view)
                if not got:
                    raise PackError(f"{store.experts_path} ends inside expert {store.label(expert)}; copy it again")
                view = view[got:]
            if zlib.crc32(stride) != store.checksum(expert):
                damaged.append(expert)
            bar.update()
    if damaged:
        first = damaged[0]
        raise PackError(
            f"{store.experts_path}: {len(damaged)} of {store.n_total} experts are damaged, first {store.label(first)} "
            f"at offset {store.offset(first)}; copy or make the pack again"
        )
    for name, expected in store.manifest.crc32.items():
        if _crc32(store.path / name) != expected:
            raise PackError(f"{store.path / name} is damaged: its checksum differs; copy or make the pack again")


def _crc32(path: Path) -> int:
    value = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}; copy or make the pack again") from error
    return value


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0 if every checksum is right, 2 otherwise."""
    if len(arguments) != 1 or arguments[0] in {"--help", "-h"}:
        print(USAGE, end="")
        return 0 if {"--help", "-h"} & set(arguments) else 2
    try:
        store = ExpertStore.open(arguments[0])
        verify(store)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    kind = "random weights" if store.manifest.random else "weights"
    print(f"{store.path}: {store.n_total} experts and all {kind} are intact")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Tiny runs through the command: a random pack on disk, and the settings that make it quick."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from packs import random_store

from executor.sources import IoOps

QUICK = (
    *("concurrency=4", "steps=8", "warmup=3", "settle=1", "readers=2", "threads=1", "cache.fraction=0.5"),
    *("workload=chat", "++workload.context_tokens=5", "study=t", "progress=false", "allow_buffered=true"),
)


LIVE = ("mode=live", "workload=prompts", "warmup=1")
"""The quick run with the model's own tokens."""


def tiny_pack(folder: Path) -> Path:
    """Two layers of eight experts, top-4."""
    return random_store(folder / "pack").path


def quick(pack: Path, runs: Path, *more: str) -> list[str]:
    """The arguments of a quick run; later ones win."""
    return [f"pack={pack}", f"runs={runs}", *QUICK, *more]


def the_run(runs: Path, study: str = "t") -> Path:
    """The only finished run directory of a study."""
    (found,) = [path for path in (runs / study).iterdir() if (path / "summary.json").is_file()]
    return found


def failing_reads(at: int, fail: Callable[[], int]) -> Callable[[], IoOps]:
    """A replacement for ``IoOps`` whose n-th read (from 1, over all sources) does something else."""
    calls = [0]

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        calls[0] += 1
        return fail() if calls[0] == at else os.preadv(fd, buffers, offset)

    return lambda: IoOps(os.open, preadv)

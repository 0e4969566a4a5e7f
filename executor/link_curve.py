"""How fast a pack's file can be read: by size of a read and number of readers, and what cannot be true.

Owns the timed reads and the physical limits.  Knows neither cores nor models.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from executor.geometry import ALIGNMENT_BYTES, aligned
from executor.sources import page_aligned
from executor.store import ExpertStore
from policies.core.types import UserError


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Reads of ``size_bytes`` by ``readers`` threads: rate of all together, and the time of one read."""

    size_bytes: int
    readers: int
    bytes_per_s: float
    read_s_p50: float
    read_s_p99: float
    reads: int

    def describe(self) -> dict[str, Any]:
        """For the profile."""
        return asdict(self)


def measure_point(path: Path, size_bytes: int, readers: int, seconds: float, *, direct: bool, seed: int) -> LinkPoint:
    """Read at random aligned places of ``path`` for ``seconds``, each thread one read at a time."""
    flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0)
    fd = os.open(path, flags)
    places = (path.stat().st_size - size_bytes) // ALIGNMENT_BYTES + 1
    times: list[list[float]] = [[] for _ in range(readers)]
    failed: list[OSError] = []
    begin, barrier = [0.0], threading.Barrier(readers + 1)

    def read(thread: int) -> None:
        rng, buffer = np.random.default_rng([seed, size_bytes, readers, thread]), page_aligned(size_bytes)
        barrier.wait()
        try:
            while (asked := time.perf_counter()) < begin[0] + seconds or not times[thread]:
                got = os.preadv(fd, [buffer], int(rng.integers(places)) * ALIGNMENT_BYTES)
                if got != size_bytes:
                    raise OSError(f"short read, {got} of {size_bytes} bytes")
                times[thread].append(time.perf_counter() - asked)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(readers)]
    for thread in threads:
        thread.start()
    begin[0] = time.perf_counter()
    barrier.wait()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - begin[0]
    os.close(fd)
    if failed:
        raise UserError(f"{path} cannot be read for calibration ({failed[0]}); check the pack and the disk")
    every = np.array([t for each in times for t in each])
    p50, p99 = (float(np.percentile(every, p)) for p in (50, 99))
    return LinkPoint(size_bytes, readers, len(every) * size_bytes / took_s, p50, p99, len(every))


def measure_curve(
    store: ExpertStore, *, direct: bool, seconds: float = 0.3, readers: Sequence[int] = (1, 2, 4, 8)
) -> list[LinkPoint]:
    """Sizes of a quarter, one and four experts (as far as the file is long enough) by ``readers``."""
    size = store.experts_path.stat().st_size
    sizes = [n for n in (aligned(store.stride // 4), store.stride, 4 * store.stride) if n <= size]
    return [
        measure_point(store.experts_path, n, count, seconds, direct=direct, seed=0) for n in sizes for count in readers
    ]


def memory_bytes_per_s(device: torch.device | str = "cpu", repeats: int = 4) -> float:
    """Rate at which a device reads its memory, the best of ``repeats``: no product is faster, and no disk on a CPU."""
    cuda = torch.device(device).type == "cuda"
    words = torch.ones((4096 if cuda else 256) * (1 << 18), dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        words.sum()
        if cuda:
            torch.cuda.synchronize()
        best = max(best, words.numel() * 4 / (time.perf_counter() - began))
    return best


def pcie_bytes_per_s(path: Path) -> float | None:
    """What the PCIe link of the drive under ``path`` can carry, from sysfs; None if it has none or does not say."""
    try:
        device = os.stat(path).st_dev
        node = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None
    for folder in (node, *node.parents):
        try:
            speed = float((folder / "current_link_speed").read_text().split()[0])  # GT/s
            width = int((folder / "current_link_width").read_text())
        except (OSError, ValueError, IndexError):
            continue
        coding = 128 / 130 if speed >= 8 else 8 / 10
        return speed * 1e9 * width * coding / 8
    return None


def check_rate(what: str, bytes_per_s: float, limits: Sequence[tuple[str, float | None]]) -> None:
    """Raise UserError if a measured rate is above a physical limit: then something else was measured."""
    for name, limit in limits:
        if limit is not None and bytes_per_s > limit:
            raise UserError(
                f"{what} came out at {bytes_per_s / 1e9:.2f} GB/s, above {name} of {limit / 1e9:.2f} GB/s: a cache was "
                "measured, or a wait is missing; no profile is written"
            )

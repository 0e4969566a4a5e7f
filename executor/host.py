"""What the machine did while a run lasted: device reads, page cache, clocks, a fixed probe.

Owns the questions to the kernel.  Every answer may be missing: None where the platform does not tell.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from executor.reader import process_read_bytes

RATIO_LOW, RATIO_HIGH = 0.98, 1.02
"""Bytes that the process made storage deliver over bytes that were asked for; outside, a run is invalid."""

BESIDE_BYTES = 64 << 20
"""What a process may read beside experts: libraries of kernels that CUDA loads when they are first used."""

CLOCK_SPREAD = 0.05
"""A clock that moved by more than this share of its mean is worth a warning."""


@dataclass(slots=True)
class IoMeter:
    """Compares what a run thinks it read with what the kernel counted, over one or more intervals."""

    asked_bytes: int = 0
    device_bytes: int | None = 0
    counter: Callable[[], int | None] = process_read_bytes
    _at: tuple[int, int | None] = (0, None)

    def begin(self, asked_bytes: int) -> None:
        """An interval begins; ``asked_bytes``: the readers' own count so far."""
        self._at = (asked_bytes, self.counter())

    def end(self, asked_bytes: int) -> None:
        """The interval ends, with no read in flight."""
        before, device = self._at
        self.asked_bytes += asked_bytes - before
        now = self.counter()
        if device is None or now is None or self.device_bytes is None:
            self.device_bytes = None
        else:
            self.device_bytes += now - device

    @property
    def ratio(self) -> float | None:
        """Device bytes over asked bytes; None if one of them is unknown or nothing was read."""
        if self.device_bytes is None or not self.asked_bytes:
            return None
        return self.device_bytes / self.asked_bytes


@dataclass(slots=True)
class HostTimes:
    """Where a batch's time went: sums in seconds over ``batches``.

    Of a backend whose driver launches batches itself (``executor.fast``): ``start_s`` is the launch, ``compute_s`` from
    there until it was seen that the batch had run, and ``blocked_s`` how long the driver waited with nothing to do.
    """

    batches: int = 0
    start_s: float = 0.0  # submit -> the compute thread takes it
    compute_s: float = 0.0  # on the compute thread, pacing not included
    notice_s: float = 0.0  # done -> wait returns
    blocked_s: float = 0.0
    late: int = 0  # batches that took longer than their pace
    foreign: int = 0  # experts imposed by replay that the model's own gate would not have chosen


def why_invalid(meter: IoMeter, direct: bool) -> list[str]:
    """Reasons why times of this run are not those of the storage; empty for a good one."""
    if not direct:
        return ["reads went through the page cache or memory, not directly to the device"]
    if not meter.asked_bytes:
        return []
    if meter.ratio is None:
        return ["the kernel does not tell how many bytes were read from the device (no /proc/self/io)"]
    excess = (meter.device_bytes or 0) - meter.asked_bytes
    if meter.ratio < RATIO_LOW or (meter.ratio > RATIO_HIGH and excess > BESIDE_BYTES):
        return [
            f"{meter.device_bytes} bytes came from the device for {meter.asked_bytes} asked for, a ratio of "
            f"{meter.ratio:.3f}; expected {RATIO_LOW} to {RATIO_HIGH}"
        ]
    return []


def cached_share(path: Path) -> float | None:
    """Share of a file's pages that lie in the page cache (mincore); None if that cannot be asked."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mincore = libc.mincore
    except (OSError, AttributeError):
        return None
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    if not pages:
        return None
    libc.mmap.restype = ctypes.c_void_p  # python's own map gives no address of a file that is only readable
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    seen = (ctypes.c_ubyte * pages)()
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            return None
        try:
            if mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), seen) != 0:
                return None
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(byte & 1 for byte in bytes(seen)) / pages


@dataclass(slots=True)
class Clocks:
    """Clock samples of the compute device, MHz."""

    device: str
    samples_mhz: list[float] = field(default_factory=list)

    def sample(self) -> None:
        """Take one, between turns, never within a step: microseconds, but a process on a GPU without its library."""
        value = _gpu_mhz() if self.device == "cuda" else _cpu_mhz()
        if value is not None:
            self.samples_mhz.append(value)

    def describe(self) -> dict[str, Any] | None:
        """Least, mean and most; None without samples."""
        if not self.samples_mhz:
            return None
        low, mean, high = min(self.samples_mhz), fmean(self.samples_mhz), max(self.samples_mhz)
        return {"min_mhz": low, "mean_mhz": mean, "max_mhz": high, "samples": len(self.samples_mhz)}

    def warnings(self) -> list[str]:
        """One line if the clock moved."""
        found = self.describe()
        if found is None or found["max_mhz"] - found["min_mhz"] <= CLOCK_SPREAD * found["mean_mhz"]:
            return []
        return [f"the clock moved from {found['min_mhz']:.0f} to {found['max_mhz']:.0f} MHz during the run"]


def _cpu_mhz() -> float | None:
    values = []
    for path in sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")):
        try:
            values.append(int(path.read_text()) / 1e3)
        except (OSError, ValueError):
            continue
    if not values:
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        values = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return fmean(values) if values else None


_NVML_SM_CLOCK = 1


@lru_cache(maxsize=1)
def _nvml() -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """The driver's management library and its first GPU; None without them."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        gpu = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu)):
            return None
    except (OSError, AttributeError):
        return None
    return library, gpu


def _gpu_mhz() -> float | None:
    if (found := _nvml()) is not None:
        library, gpu = found
        mhz = ctypes.c_uint()
        if library.nvmlDeviceGetClockInfo(gpu, _NVML_SM_CLOCK, ctypes.byref(mhz)) == 0:
            return float(mhz.value)
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return float(answer.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


class Compiled:
    """Counts the Triton kernels that are compiled while it is open; a time with one in it is no measurement."""

    def __init__(self) -> None:
        self.count = 0
        self._exit = ExitStack()

    def __enter__(self) -> Compiled:
        triton = sys.modules.get("triton")  # if nobody has imported it, nothing is compiled
        if triton is not None:
            runtime = triton.knobs.runtime
            self._exit.callback(setattr, runtime, "jit_post_compile_hook", runtime.jit_post_compile_hook)
            runtime.jit_post_compile_hook = self._heard
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _heard(self, *_: object, **__: object) -> None:
        self.count += 1


def load_average() -> float | None:
    """Processes that wanted to run, over the last minute: above the number of CPUs, others slow the run."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


class Probe:
    """A fixed piece of work, timed before and after: if it changed, the machine changed and not the system."""

    def __init__(self, device: torch.device | str = "cpu", megabytes: int = 64) -> None:
        """``megabytes`` of bf16 weights, 16 matrices, multiplied by one tile of rows each."""
        columns = 1024
        rows = megabytes * (1 << 20) // (2 * columns * 16)
        self._device = torch.device(device)
        self._weights = [torch.ones(rows, columns, dtype=torch.bfloat16, device=self._device) for _ in range(16)]
        self._x = torch.ones(8, columns, dtype=torch.bfloat16, device=self._device)
        self.seconds: list[float] = []

    def run(self, repeats: int = 3) -> float:
        """The median of ``repeats`` passes, seconds; kept in ``seconds``."""
        times = sorted(self._once() for _ in range(repeats))
        self.seconds.append(times[len(times) // 2])
        return self.seconds[-1]

    def _once(self) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            for weight in self._weights:
                torch.nn.functional.linear(self._x, weight)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def drift(values: Sequence[float]) -> float | None:
    """Last over first; None with fewer than two."""
    return values[-1] / values[0] if len(values) > 1 else None


def versions() -> dict[str, Any]:
    """What computes: torch, its threads, the CPU or GPU."""
    cuda = torch.cuda.is_available()
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)

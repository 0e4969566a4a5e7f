"""Copies from pinned host memory into device slots, queued by the driver itself on one stream.

Owns the stream and the events behind its copies, which end in the order in which they were started.  Calls the CUDA
driver's own functions and keeps the interpreter's lock meanwhile: none of them waits, and each takes about a
microsecond, where giving the lock away and getting it back would take longer.  Knows neither fetches nor time.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

import torch

from executor.slots import PinnedArena, SlotArena

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class CopyStream:
    """Copies piece ``i`` of ``pack`` into a slot of ``slots``; does not own the two: close this first."""

    def __init__(self, pack: PinnedArena, slots: SlotArena) -> None:
        self._cuda = _driver()
        self._stream = torch.cuda.Stream(slots.device)  # type: ignore[no-untyped-call]
        self._handle = ctypes.c_void_p(self._stream.cuda_stream)
        self._stride = pack.pieces[0].numel()
        self._from, self._to = pack.arena.data_ptr(), slots.arena.data_ptr()
        self._flying: deque[ctypes.c_void_p] = deque()
        self._free: list[ctypes.c_void_p] = []

    def start(self, piece: int, slot: int) -> None:
        """Queue one copy.  Whatever read the slot before must have ended."""
        cuda, stride = self._cuda, self._stride
        _check(cuda.cuMemcpyHtoDAsync_v2(self._to + slot * stride, self._from + piece * stride, stride, self._handle))
        event = self._free.pop() if self._free else self._new_event()
        _check(cuda.cuEventRecord(event, self._handle))
        self._flying.append(event)

    def ended(self) -> int:
        """How many more have ended, oldest first, since this was asked last."""
        flying, count = self._flying, 0
        while flying and (status := self._cuda.cuEventQuery(flying[0])) != _NOT_READY:
            _check(status)
            self._free.append(flying.popleft())
            count += 1
        return count

    def close(self) -> None:
        """Let the copies end and give the events back."""
        self._stream.synchronize()
        for event in (*self._flying, *self._free):
            _check(self._cuda.cuEventDestroy_v2(event))
        self._flying.clear()
        self._free.clear()

    def _new_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        _check(self._cuda.cuEventCreate(ctypes.byref(event), _NO_TIMING))
        return event


def _driver() -> Any:
    library = ctypes.PyDLL("libcuda.so.1")
    address, handle = ctypes.c_uint64, ctypes.c_void_p
    library.cuMemcpyHtoDAsync_v2.argtypes = [address, address, ctypes.c_size_t, handle]
    library.cuEventCreate.argtypes = [ctypes.POINTER(handle), ctypes.c_uint]
    library.cuEventRecord.argtypes = [handle, handle]
    library.cuEventQuery.argtypes = [handle]
    library.cuEventDestroy_v2.argtypes = [handle]
    return library


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver answered a copy with error {status}; the run is broken")

"""Copies from pinned host memory into device slots, queued by the driver itself on one stream.

Owns the stream and the events behind its copies, which end in the order in which they were started.  Knows neither
fetches nor time.
"""

from __future__ import annotations

import ctypes
from collections import deque

import torch

from executor.cuda_driver import NO_TIMING, NOT_READY, checked, cuda_driver
from executor.slots import PinnedArena, SlotArena


class CopyStream:
    """Copies piece ``i`` of ``pack`` into a slot of ``slots``; does not own the two: close this first."""

    def __init__(self, pack: PinnedArena, slots: SlotArena) -> None:
        self._cuda = cuda_driver()
        self._stream = torch.cuda.Stream(slots.device)  # type: ignore[no-untyped-call]
        self._handle = ctypes.c_void_p(self._stream.cuda_stream)
        self._stride = pack.pieces[0].numel()
        self._from, self._to = pack.arena.data_ptr(), slots.arena.data_ptr()
        self._flying: deque[ctypes.c_void_p] = deque()
        self._free: list[ctypes.c_void_p] = []

    def start(self, piece: int, slot: int) -> None:
        """Queue one copy.  Whatever read the slot before must have ended."""
        cuda, stride = self._cuda, self._stride
        checked(cuda.cuMemcpyHtoDAsync_v2(self._to + slot * stride, self._from + piece * stride, stride, self._handle))
        event = self._free.pop() if self._free else self._new_event()
        checked(cuda.cuEventRecord(event, self._handle))
        self._flying.append(event)

    def ended(self) -> int:
        """How many more have ended, oldest first, since this was asked last."""
        flying, count = self._flying, 0
        while flying and (status := self._cuda.cuEventQuery(flying[0])) != NOT_READY:
            checked(status)
            self._free.append(flying.popleft())
            count += 1
        return count

    def close(self) -> None:
        """Let the copies end and give the events back."""
        self._stream.synchronize()
        for event in (*self._flying, *self._free):
            checked(self._cuda.cuEventDestroy_v2(event))
        self._flying.clear()
        self._free.clear()

    def _new_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        checked(self._cuda.cuEventCreate(ctypes.byref(event), NO_TIMING))
        return event

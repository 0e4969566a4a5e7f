"""The memory behind the expert cache: one slot per cache entry.

Owns the arena and the tensor views of each slot, made once.  Does not know which expert is in which slot.
"""

from __future__ import annotations

from typing import Any

import torch

from executor.errors import PackError
from executor.sources import page_aligned
from executor.store import ExpertStore


class SlotArena:
    """``n_slots`` slots of one pack's stride on one device.

    On the CPU the arena is one anonymous map, so slots are page-aligned and reads go straight into them
    (``buffers``); on a GPU it is one device tensor and ``buffers`` is empty.
    """

    def __init__(self, store: ExpertStore, n_slots: int, device: torch.device | str = "cpu") -> None:
        """Raises PackError if there is not enough memory."""
        self.n_slots = n_slots
        self.device = torch.device(device)
        n_bytes = n_slots * store.stride
        self.buffers: tuple[memoryview, ...] = ()
        try:
            if self.device.type == "cpu":
                memory = page_aligned(n_bytes)
                self.buffers = tuple(memory[i * store.stride : (i + 1) * store.stride] for i in range(n_slots))
                self.arena = torch.frombuffer(memory, dtype=torch.uint8)
            else:
                self.arena = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise PackError(
                f"{n_slots} slots need {n_bytes / 1e9:.2f} GB on {self.device}, more than is free; lower cache.fraction"
            ) from error
        self.slots = _pieces(self.arena, n_slots, store.stride)
        self.views = tuple(store.views(slot) for slot in self.slots)


def _pieces(arena: torch.Tensor, n: int, n_bytes: int) -> tuple[torch.Tensor, ...]:
    return tuple(arena[i * n_bytes : (i + 1) * n_bytes] for i in range(n))


class PinnedArena:
    """Page-locked host memory of exactly the asked size, in ``n`` pieces of ``piece_bytes``.

    Registered in place: torch's own pinned allocator rounds up to a power of two.
    """

    def __init__(self, n: int, piece_bytes: int) -> None:
        """Needs CUDA.  Raises PackError if the memory cannot be locked."""
        self.memory = page_aligned(n * piece_bytes)
        self.buffers = tuple(self.memory[i * piece_bytes : (i + 1) * piece_bytes] for i in range(n))
        self.arena = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.pieces = _pieces(self.arena, n, piece_bytes)
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = self._runtime.cudaHostRegister(self.arena.data_ptr(), self.arena.numel(), 0)
        if status != self._runtime.cudaError.success:
            raise PackError(f"cannot lock {self.arena.numel() / 1e9:.2f} GB of host memory: {status}")

    def close(self) -> None:
        """Unlock; no copy from it may be in flight."""
        self._runtime.cudaHostUnregister(self.arena.data_ptr())

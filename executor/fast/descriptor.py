"""What a job is told: one small block of int32, written on the host and copied to the device as the job's first act.

Owns the layout.  Whatever differs from job to job stands here, so that a graph holds no address that depends on data.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

SEQUENCE_LIMIT = 1 << 20
"""Sequence numbers begin again here: with an expert's id below they must fit into an int32."""

_FIELD = 16
"""Every field begins at a multiple of this, so that kernels may load it in wide words."""


class Descriptor:
    """``tile`` tokens of ``top_k`` experts each.  On the device, by name (``tokens`` n gives the first n of each):

    ``rows`` request row or -1; ``tokens`` to embed; ``positions``; ``at`` place in the cache for this token; ``first``
    and ``end`` the places that it attends to; ``slots`` [n, top_k] of its experts; ``given`` [n, top_k] imposed experts
    or -1; ``sequence`` [1] the job's number.
    """

    def __init__(self, tile: int, top_k: int, device: torch.device) -> None:
        self.tile, self.top_k = tile, top_k
        line = -(-tile // _FIELD) * _FIELD
        table = -(-tile * top_k // _FIELD) * _FIELD
        self._start = {name: _FIELD + i * line for i, name in enumerate(("rows", "tokens", "positions", "at"))}
        self._start |= {"first": _FIELD + 4 * line, "end": _FIELD + 5 * line}
        self._start |= {"slots": _FIELD + 6 * line, "given": _FIELD + 6 * line + table}
        words = _FIELD + 6 * line + 2 * table
        self.host = torch.full((words,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.device = torch.full((words,), -1, dtype=torch.int32, device=device)
        self._words = memoryview(self.host.numpy()).cast("B")
        self._imposed = False

    def copy(self) -> None:
        """Host to device, on the current stream."""
        self.device.copy_(self.host, non_blocking=True)

    def field(self, name: str, n: int) -> Tensor:
        """The first ``n`` tokens of a field, on the device."""
        if name == "sequence":
            return self.device[:1]
        start = self._start[name]
        if name in {"slots", "given"}:
            return self.device[start : start + n * self.top_k].view(n, self.top_k)
        return self.device[start : start + n]

    def begin(self, sequence: int, rows: Sequence[int], padded: int) -> None:
        """Begin to fill the host's side; the job that it told before must have run.

        Padding has no row, and none of its pairs has a slot.
        """
        self._pack(0, (sequence,))
        missing = padded - len(rows)
        self.put("rows", [*rows, *[-1] * missing] if missing else rows)
        if missing:
            self._pack(self._start["slots"] + len(rows) * self.top_k, [-1] * (missing * self.top_k))

    def put(self, name: str, values: Sequence[int]) -> None:
        """A field of the group's tokens, without padding."""
        self._pack(self._start[name], values)

    def impose(self, given: Sequence[Sequence[int]] | None) -> None:
        """The experts to use instead of the gate's own, or None."""
        if given is not None:
            self.put("given", [expert for experts in given for expert in experts])
        elif self._imposed:
            self.put("given", [-1] * (self.tile * self.top_k))
        self._imposed = given is not None

    def _pack(self, start: int, values: Sequence[int]) -> None:
        # Twice as fast as an assignment to a slice of an array.
        _ints(len(values)).pack_into(self._words, 4 * start, *values)


@lru_cache(maxsize=1024)
def _ints(count: int) -> struct.Struct:
    return struct.Struct(f"={count}i")
